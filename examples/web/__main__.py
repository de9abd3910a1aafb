"""Start the service and its peer, then the front in this process; run until Ctrl-C."""

import argparse
import socket
import sys

import uvicorn

from examples.stage import Stage, play
from examples.web.front import front


async def main(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)) as listening:
        async with Stage() as stage:
            await stage.workers("examples.web.reports:app", "examples.web.reports:app", "examples.web.reports:sections")
            print(f"open http://127.0.0.1:{listening.getsockname()[1]}/", flush=True)
            # Open streams would keep the server from stopping for as long as a browser watches.
            config = uvicorn.Config(front, log_level="warning", timeout_graceful_shutdown=1)
            await uvicorn.Server(config).serve(sockets=[listening])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.web", description="Reports with live progress.")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free (default: %(default)s)")
    sys.exit(play(main(parser.parse_args().port)))
