"""Starts processes quickly: what they import is imported once, here, and each of them is a fork.

A trial starts several hundred processes; importing alone would take a second of each. It reads orders from stdin, one
JSON object a line, and writes to stdout who was started and who has ended. When its stdin ends, so do its children.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MODULES = (
    *("tests.chaos.replica", "tests.chaos.peer", "tests.chaos.client"),
    *("tests.chaos.amqp_wires", "tests.chaos.port_wires", "coatcheck.broker.postgres", "uvloop"),
)
INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


class Child:
    """A process that the nursery started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        # An ended child that the nursery has reaped may have given its id away, so we look first.
        if self.returncode is None:
            os.kill(self.pid, number)

    def note_end(self, returncode: int) -> None:
        self.returncode = returncode
        self._ended.set()


class Nursery:
    """The trial's side of it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._children: dict[int, Child] = {}
        self._starting: asyncio.Queue[int] = asyncio.Queue()
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Nursery:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.chaos.nursery",
            cwd=self._root,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        await self._reading

    async def start(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Child:
        order = {"module": module, "arguments": arguments, "environment": dict(environment), "log": str(log)}
        assert self._process.stdin is not None
        async with self._lock:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            await self._process.stdin.drain()
            return self._children[await self._starting.get()]

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            said = json.loads(line)
            if "ended" in said:
                self._children.pop(said["ended"]).note_end(said["code"])
            else:
                self._children[said["started"]] = Child(said["started"])
                self._starting.put_nowait(said["started"])
        for child in self._children.values():  # it has ended, so they have
            child.note_end(-signal.SIGKILL)


def main() -> None:
    for module in MODULES:
        importlib.import_module(module)
    children: set[int] = set()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in INTERRUPTS:  # they go to the whole group; the trial that hears of them ends us
        signal.signal(number, signal.SIG_IGN)
    orders = b""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap(children)
        if 0 in ready:
            read = os.read(0, 65536)
            if not read:
                break
            *lines, orders = (orders + read).split(b"\n")
            for line in lines:
                pid = _fork(json.loads(line), close=(woken, wake))
                children.add(pid)
                _say(started=pid)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while children:
        children.discard(os.wait()[0])


def _reap(children: set[int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        children.discard(pid)
        _say(ended=pid, code=os.waitstatus_to_exitcode(status))


def _say(**fields: Any) -> None:
    os.write(1, json.dumps(fields).encode() + b"\n")


def _fork(order: dict[str, Any], *, close: tuple[int, ...]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, *INTERRUPTS):
            signal.signal(number, signal.SIG_DFL)
        for descriptor in close:
            os.close(descriptor)
        nothing = os.open(os.devnull, os.O_RDONLY)
        log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.environ.update(order["environment"])
        sys.argv = [order["module"], *order["arguments"]]
        importlib.import_module(order["module"]).start()
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:  # noqa: BLE001 - the end of a process: what it died of is its last word
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
