"""How long a handler takes to get through a long journal, in the engine alone: no broker, no store."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Coroutine
from typing import Any
from uuid import UUID

from bench.scale.report import Line, percentile

from coatcheck.store import CallState, Kind, encode
from coatcheck.store.rows import Changes, Committed, Known, NewCall, Recorded
from coatcheck.worker import Context
from coatcheck.worker.engine.run import Run
from coatcheck.worker.engine.run_port import Finished

VALUE = encode({"text": "x" * 100})
Handler = Callable[[Context], Coroutine[Any, Any, Any]]


def step(number: int) -> int:
    return number


async def steps_in_turn(ctx: Context, count: int) -> int:
    return len([await ctx.step(step, number) for number in range(count)])


async def calls_in_turn(ctx: Context, count: int) -> int:
    return len([await ctx.call("search", number) for number in range(count)])


async def calls_at_once(ctx: Context, count: int) -> int:
    return len(await ctx.gather(*(ctx.call("search", number) for number in range(count))))


class Desk:
    """A port that answers every call at once, so that a first run leaves a whole journal behind."""

    def __init__(self) -> None:
        self.recorded: list[Recorded] = []

    async def before_first_effect(self) -> None:
        """There are no rows to look at."""

    async def commit(self, changes: Changes) -> Committed:
        fresh = [
            Recorded(one.key, one.kind, one.name, one.digest, 0, CallState.OK, one.value) for one in changes.entries
        ]
        fresh += [_answered(one) for one in changes.opens]
        first = len(self.recorded) + 1
        numbered = [
            Recorded(one.key, one.kind, one.name, one.digest, seq, one.state, one.value, one.call_id)
            for seq, one in enumerate(fresh, first)
        ]
        self.recorded += numbered
        return Committed(is_parked=False, news=tuple(numbered))

    def progress(self, done: float | None, total: float | None, message: str | None) -> None:
        """Drop it: there is no requester."""


def _answered(one: NewCall) -> Recorded:
    assert one.kind is Kind.CALL
    return Recorded(one.key, one.kind, one.name, one.digest, 0, CallState.OK, VALUE, one.call_id)


async def replay_lines(*, entries: int = 1000, times: int = 9) -> list[Line]:
    lines = []
    for name, handler in (
        ("steps, one after the other", steps_in_turn),
        ("calls, one after the other", calls_in_turn),
        ("calls, in one gather", calls_at_once),
    ):
        desk = Desk()
        await _run(handler, entries, desk, Known())
        known = Known(tuple(desk.recorded))
        assert len(desk.recorded) == entries
        taken = []
        for _ in range(times):
            gc.collect()
            begun = time.process_time()  # CPU time of this process, so other load does not count
            await _run(handler, entries, desk, known)
            taken.append((time.process_time() - begun) * 1000)
        assert len(desk.recorded) == entries, "a replay wrote something"
        note = f"of CPU, median of {times}; best {min(taken):.1f} ms"
        lines.append(Line(f"replay of {entries:,} {name}", percentile(taken, 0.5), "ms", target=20, note=note))
    return lines


async def _run(
    handler: Callable[[Context, int], Coroutine[Any, Any, int]], count: int, desk: Desk, known: Known
) -> None:
    run = Run(
        task_id=UUID(int=7), identity="bench", attempt=1, version="1", invoke=lambda ctx: handler(ctx, count),
        known=known, port=desk,
    )  # fmt: skip
    outcome = await run.execute()
    assert isinstance(outcome, Finished), outcome
    assert outcome.value == count
