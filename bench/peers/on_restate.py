"""The fan-4 lifecycle in Restate: a handler that calls an echo service four times and gathers.

What was chosen, and why:
- One server with its defaults, among them an fsync of its log before it goes on. Telemetry is off, and ports are
  passed in so that it can run beside another server.
- The services are served by Hypercorn with the settings for production of Restate's documentation, in one process:
  the server takes the other core, and a second process made it no faster in trials.
- The client sends requests over HTTP with aiohttp and keeps its connections.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import aiohttp
import restate
from hypercorn.config import Config
from hypercorn.run import run
from load import FAN, PATIENCE_S, PAYLOAD, ready, serve

INGRESS, ADMIN, NODE, SERVICES = (f"127.0.0.1:{port}" for port in os.environ["PEERS_PORTS"].split(","))

echoes, flows = restate.Service("Echo"), restate.Service("Flows")


@echoes.handler()
async def echo(ctx: restate.Context, value: dict[str, str]) -> dict[str, str]:
    return value


@flows.handler()
async def fan4(ctx: restate.Context, value: dict[str, str]) -> int:
    calls = [ctx.service_call(echo, arg=value) for _ in range(FAN)]
    await restate.gather(*calls)
    return sum([await call == value for call in calls])


app = restate.app([echoes, flows])


def fetch(url: str, body: object = None) -> None:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as response:
        response.read()


def server() -> None:
    settings = {
        "RESTATE_BASE_DIR": os.environ["PEERS_DATA"],
        "RESTATE_INGRESS__BIND_ADDRESS": INGRESS,
        "RESTATE_ADMIN__BIND_ADDRESS": ADMIN,
        "RESTATE_BIND_ADDRESS": NODE,
        "RESTATE_LISTEN_MODE": "tcp",
        "RESTATE_DISABLE_TELEMETRY": "true",
        "RESTATE_LOG_FILTER": "warn",
        "DO_NOT_TRACK": "1",
    }
    [program] = Path(os.environ["PEERS_HOME"]).glob("node_modules/@restatedev/restate-server-*/bin/restate-server")
    process = subprocess.Popen([program], env={**os.environ, **settings}, stdout=sys.stderr)
    until = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(OSError):
            fetch(f"http://{ADMIN}/health")
            fetch(f"http://{INGRESS}/restate/health")
            ready()
            break
        time.sleep(0.2)
    raise SystemExit(process.wait())


def work() -> None:
    config = Config()
    config.application_path = "on_restate:app"
    config.bind = [SERVICES]
    config.workers = 1
    config.h2_max_concurrent_streams = config.keep_alive_max_requests = 2147483647
    config.keep_alive_timeout = 2147483647
    ready()
    run(config)


def register() -> None:
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            fetch(f"http://{ADMIN}/deployments", {"uri": f"http://{SERVICES}", "use_http_11": False})
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)
        else:
            break
    ready()


async def client() -> None:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def call() -> object:
            async with session.post(f"http://{INGRESS}/Flows/fan4", json=PAYLOAD) as response:
                return await response.json()

        await serve(call)


if __name__ == "__main__":
    if sys.argv[1] == "client":
        asyncio.run(client())
    else:
        {"server": server, "worker": work, "register": register}[sys.argv[1]]()
