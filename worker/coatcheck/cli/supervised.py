"""How a replica under `--processes` is run: the command line as it is, a lifeline, and a link to the supervisor.

    python -m coatcheck.cli.supervised PARENT LIFELINE LINK worker module:app --name shop-1

PARENT is the process id of the supervisor, LIFELINE a pipe whose other end only it holds, LINK a socket. Addresses come
in a variable: they may have passwords in them.
"""

from __future__ import annotations

import json
import os
import sys

from coatcheck.cli.lifeline import bind_to
from coatcheck.cli.link import ReplicaEnd
from coatcheck.cli.main import main
from coatcheck.cli.replicas import ADDRESSES

if __name__ == "__main__":
    bind_to(int(sys.argv[1]), int(sys.argv[2]))
    addresses = json.loads(os.environ.pop(ADDRESSES, "[]"))
    main([*sys.argv[4:], *addresses], prog_name="coatcheck", obj=ReplicaEnd(int(sys.argv[3])))
