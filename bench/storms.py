"""Storms: many parked tasks that time out or are cancelled at once."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass, field

from bench.client import PATIENCE_S, NoAnswer, wait_for
from bench.crew import Crew
from bench.probes import Cost

from coatcheck.broker import Names, Outgoing, make_cancel

READ_S = 0.5
"""How long it takes to read all counters, just before a storm."""
LONGEST_LEAD_S = 300.0
LOOK_AGAIN_S = 0.1
BATCH_SIZE = 500

OPEN_TIMERS = "SELECT count(*) FROM coatcheck.call WHERE kind = 'timer' AND state = 'open'"
# Both instants are by Postgres's clock: when the timer was due, and when the task's end was committed.
LATE_MS = """
    SELECT extract(epoch FROM task.finished_at - call.due_at) * 1000
      FROM coatcheck.task JOIN coatcheck.call ON call.task_id = task.id
     WHERE task.correlation_id = ANY($1::text[]) AND call.kind = 'timer'
"""
PARKED = "SELECT count(*) FROM coatcheck.task WHERE correlation_id = ANY($1::text[]) AND state = 'parked'"


@dataclass(frozen=True, slots=True)
class Storm:
    per_second: float
    cost: Cost
    late_ms: list[float] = field(default_factory=list)


async def timer_storm(crew: Crew, *, count: int, settle_s: float) -> Storm:
    """Park so many tasks until one instant, and measure how long after it they are all answered.

    All have to be parked before that instant. If they were not, it is tried again with more time.
    """
    lead_s = 1.0 + READ_S + count / 400
    while lead_s < LONGEST_LEAD_S:
        due_s = time.time() + lead_s
        queue, body = crew.bench.queue("flows"), json.dumps(due_s).encode()
        asked = [crew.client.ask(queue, "nap", body) for _ in range(count)]
        await asyncio.sleep(due_s - time.time() - READ_S)
        is_ready = await crew.sql.fetchval(OPEN_TIMERS) == count
        before = await crew.read("flows", settle_s=0)
        await wait_for([answer for _, answer in asked], "timer storm")
        taken_s = time.time() - due_s
        if is_ready:
            after = await crew.read("flows", settle_s=settle_s)
            late = await crew.sql.fetch(LATE_MS, [correlation_id for correlation_id, _ in asked])
            return Storm(count / taken_s, Cost.between(before, after, count), [float(row[0]) for row in late])
        lead_s *= 2
    raise NoAnswer(f"{count} timers could not be parked within {LONGEST_LEAD_S:.0f} s")


async def cancel_storm(crew: Crew, *, count: int, settle_s: float) -> Storm:
    """Park so many tasks on a peer that never answers, cancel them all, and wait for as many replies."""
    queue, silent = crew.bench.queue("flows"), Names(crew.bench.queue("silent"))
    asked = [crew.client.ask(queue, "unanswered") for _ in range(count)]
    await _until_parked(crew, [correlation_id for correlation_id, _ in asked])
    before = await crew.read("flows", settle_s=settle_s)
    begun_s = time.perf_counter()
    control = Names(queue).control
    cancels = (Outgoing(control, make_cancel(correlation_id=it, reason="a storm")) for it, _ in asked)
    while batch := list(itertools.islice(cancels, BATCH_SIZE)):
        await crew.client.broker.publish(batch)
    await wait_for([answer for _, answer in asked], "cancel storm")
    taken_s = time.perf_counter() - begun_s
    after = await crew.read("flows", settle_s=settle_s)
    if wrong := [answer.result() for _, answer in asked if b"cancelled" not in answer.result()]:
        raise NoAnswer(f"{len(wrong)} of {count} were answered, not cancelled: {wrong[0][:200]!r}")
    for name in (silent.requests, silent.control):
        await crew.client.broker.purge(name)
    return Storm(count / taken_s, Cost.between(before, after, count))


async def _until_parked(crew: Crew, correlation_ids: list[str]) -> None:
    try:
        async with asyncio.timeout(PATIENCE_S):
            while await crew.sql.fetchval(PARKED, correlation_ids) < len(correlation_ids):  # noqa: ASYNC110, rows send no event
                await asyncio.sleep(LOOK_AGAIN_S)
    except TimeoutError:
        raise NoAnswer(f"not all of {len(correlation_ids)} tasks were parked within {PATIENCE_S:.0f} s") from None
