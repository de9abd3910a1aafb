"""The load that every framework gets, and the orders for it: the same few lines in each client, stdlib only.

A client reads orders from its standard input and answers each with one line of JSON:

    idle COUNT SECONDS   lifecycles one at a time, until either is used up     {"taken_ms": [...]}
    load WIDTH SECONDS   keep so many lifecycles under way until killed        {"loading": WIDTH}
    count                how many have ended since the load began              {"done": N}

A load begins its lifecycles one after the other over some seconds. Begun at once they would queue at every step in the
same order, and end at once too.

The process that gives the orders reads the clocks, so throughput and CPU are measured alike for all.
"""

import asyncio
import collections
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from queue import SimpleQueue
from typing import Any

FAN = 4
PAYLOAD = {"text": "x" * 1000}
PATIENCE_S = 60.0
"""A lifecycle that takes longer is a failure of the run."""


def say(**answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def ready() -> None:
    """Say that the next role may begin, once; from then on live as long as the process that started us."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    say(ready=True)


def _end_with_input() -> None:
    """Wait for the end of our input, which our parent process holds, then kill our own process group."""
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


def check(result: object) -> None:
    """Check that a lifecycle ended with the number of echoes that came back whole."""
    if result != FAN:
        raise SystemExit(f"a lifecycle ended with {result!r} and not with {FAN}")


class Orders:
    """A thread that reads orders. It answers `count` itself, so that a busy client answers too; it passes others on."""

    def __init__(self) -> None:
        self.done_count = 0
        self.queue: SimpleQueue[list[str]] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        say(ready=True)

    def _read(self) -> None:
        for line in sys.stdin:
            order = line.split()
            if order == ["count"]:
                say(done=self.done_count)
            else:
                self.queue.put(order)
        os._exit(0)


async def serve(call: Callable[[], Awaitable[object]]) -> None:
    """Carry out orders for a client whose `call` is one whole lifecycle on the event loop."""
    orders = Orders()

    async def once() -> None:
        async with asyncio.timeout(PATIENCE_S):
            check(await call())

    async def lane(delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        while True:
            await once()
            orders.done_count += 1

    while True:
        order, *numbers = await asyncio.to_thread(orders.queue.get)
        if order == "idle":
            count, until = int(numbers[0]), time.monotonic() + float(numbers[1])
            taken_ms: list[float] = []
            while len(taken_ms) < count and time.monotonic() < until:
                begun = time.perf_counter()
                await once()
                taken_ms.append((time.perf_counter() - begun) * 1000)
            say(taken_ms=taken_ms)
        elif order == "load":
            width = int(numbers[0])
            say(loading=width)
            async with asyncio.TaskGroup() as lanes:
                for number in range(width):
                    lanes.create_task(lane(number / width * float(numbers[1])))


def serve_blocking(submit: Callable[[], Any], wait: Callable[[Any], object]) -> None:
    """Carry out orders for a client that blocks: a window of handles, and the oldest is waited for."""
    orders = Orders()
    while True:
        order, *numbers = orders.queue.get()
        if order == "idle":
            count, until = int(numbers[0]), time.monotonic() + float(numbers[1])
            taken_ms: list[float] = []
            while len(taken_ms) < count and time.monotonic() < until:
                begun = time.perf_counter()
                check(wait(submit()))
                taken_ms.append((time.perf_counter() - begun) * 1000)
            say(taken_ms=taken_ms)
        elif order == "load":
            width = int(numbers[0])
            say(loading=width)
            window = collections.deque(submit() for _ in range(width))
            while True:
                check(wait(window.popleft()))
                orders.done_count += 1
                window.append(submit())
