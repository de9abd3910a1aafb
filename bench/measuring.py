"""Measuring a row: first one lifecycle at a time, then saturated; and rounds over all rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

from bench.crew import Crew
from bench.probes import Cost
from bench.rows import Kind, Row
from bench.saves import measure_store
from bench.storms import cancel_storm, timer_storm

WARM_UP_COUNT = 40
FEWEST_IDLE = 5


@dataclass(frozen=True, slots=True)
class Plan:
    rounds: int = 3
    count: int = 1000
    idle_count: int = 100
    settle_s: float = 1.1
    """Long enough for the marks that a worker writes a second after a call left."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One row in one round."""

    per_second: float
    cost: Cost
    latencies_ms: list[float]
    """Times of one lifecycle at a time; for timers, how late each task ended; for cancels, nothing; for the store,
    times of one operation at a time.
    """
    idle_cost: Cost | None = None


Found = dict[str, list[Measured]]
"""By row, one for each round."""


async def measure_all(crew: Crew, rows: Sequence[Row], plan: Plan, *, say: Callable[[str], None]) -> Found:
    """Go round the rows, so that other load on the machine affects all of them alike."""
    found: Found = {row.name: [] for row in rows}
    for row in rows:
        if row.kind is Kind.LIFECYCLES:
            await crew.client.throughput(crew.bench.queue(row.role), row.handler, count=WARM_UP_COUNT, width=10)
    for number in range(1, plan.rounds + 1):
        for row in rows:
            say(f"round {number} of {plan.rounds}: {row.name}")
            found[row.name].append(await measure(crew, row, plan))
    return found


async def measure(crew: Crew, row: Row, plan: Plan) -> Measured:
    count = max(1, round(plan.count * row.weight))
    match row.kind:
        case Kind.LIFECYCLES:
            return await _measure_lifecycles(crew, row, plan, count=count)
        case Kind.TIMERS:
            storm = await timer_storm(crew, count=count, settle_s=plan.settle_s)
        case Kind.CANCELS:
            storm = await cancel_storm(crew, count=count, settle_s=plan.settle_s)
        case Kind.STORE:
            storm = await measure_store(crew, row, count=count)
        case _:
            assert_never(row.kind)
    return Measured(storm.per_second, storm.cost, storm.late_ms)


async def _measure_lifecycles(crew: Crew, row: Row, plan: Plan, *, count: int) -> Measured:
    queue = crew.bench.queue(row.role)
    idle_count = max(FEWEST_IDLE, round(plan.idle_count * min(1.0, row.weight)))
    begun = await crew.read(row.role, settle_s=plan.settle_s)
    latencies_ms = await crew.client.latencies_ms(queue, row.handler, count=idle_count)
    between = await crew.read(row.role, settle_s=plan.settle_s)
    per_second = await crew.client.throughput(queue, row.handler, count=count, width=row.width)
    ended = await crew.read(row.role, settle_s=plan.settle_s)
    return Measured(
        per_second, Cost.between(between, ended, count), latencies_ms, Cost.between(begun, between, idle_count)
    )
