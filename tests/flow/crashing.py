"""A replica that dies at a chosen point, as `kill -9` would have it: `python -m tests.flow.crashing POINT MODULE:APP`.

The points are lines of the protocol between commit, publish and ack. Each dies once: the replica that comes after
lives.
"""

import os
import sys
from collections.abc import Iterable
from typing import Any

from coatcheck.broker.port import Outgoing, Routing
from coatcheck.cli import main
from coatcheck.worker.executor import Executor
from coatcheck.worker.outbox import Outbox
from coatcheck.worker.store_host import StoreHost


def die(*_: Any, **__: Any) -> Any:
    os._exit(137)


async def publish_two_then_die(self: Outbox, messages: Iterable[Outgoing]) -> list[Routing]:
    batch = list(messages)
    if len(batch) == 4:
        await self._broker.publish(batch[:2])
        die()
    return await self._broker.publish(batch)


async def run_step_then_die(self: StoreHost, changes: Any) -> Any:
    die()


def arm(point: str) -> None:
    if point == "two_calls_published":
        Outbox.publish = publish_two_then_die  # type: ignore[method-assign]
    elif point == "calls_committed":
        StoreHost.send = die  # type: ignore[method-assign]
    elif point == "before_commit":
        StoreHost.commit = run_step_then_die  # type: ignore[method-assign]
    elif point == "final_committed":
        Executor._answer = die  # type: ignore[method-assign]
    elif point == "granted":
        Executor._make_run = die  # type: ignore[method-assign]
    else:
        raise SystemExit(f"no such point: {point}")


if __name__ == "__main__":
    arm(sys.argv[1])
    main(["worker", *sys.argv[2:]])
