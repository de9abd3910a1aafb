"""How a process of `coatcheck dev` is run: the command line as it is, and a bond with whoever started it.

    python -m coatcheck.cli.dev_child PARENT LIFELINE worker module:app --name w1

PARENT is the process id of `dev`, LIFELINE a pipe whose other end only `dev` holds.
"""

from __future__ import annotations

import sys

from coatcheck.cli.lifeline import bind_to
from coatcheck.cli.main import main

if __name__ == "__main__":
    bind_to(int(sys.argv[1]), int(sys.argv[2]))
    main(sys.argv[3:], prog_name="coatcheck")
