"""A process that needs the server: `python -m tests.embedded.user DIRECTORY`. Says what it got, stays until told."""

import json
import sys
from pathlib import Path

from coatcheck.embedded import join
from coatcheck.errors import CoatcheckError


def main() -> None:
    try:
        server = join(Path(sys.argv[1]))
    except CoatcheckError as error:
        print(json.dumps({"error": type(error).__name__, "text": str(error)}), flush=True)
        return
    print(json.dumps({"url": server.url, "tcp_url": server.tcp_url}), flush=True)
    sys.stdin.read()
    server.leave()


if __name__ == "__main__":
    main()
