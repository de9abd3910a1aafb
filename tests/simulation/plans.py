"""What a schedule consists of: drawn from a seed, or gone through one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.simulation import flows
from tests.simulation.scenario import Ask, Faults, Plan

QUEUES = (
    *("client", "client", flows.PEER, flows.PEER, flows.QUIET, flows.SERVICE),
    *(f"{flows.SERVICE}.{each}" for each in ("replies", "control", "dead")),
)
KINDS = tuple(handler.__name__ for handler in flows.HANDLERS)


def draw(seed: int) -> Plan:
    """A few tasks of any kind, and some of the faults there are."""
    rng = random.Random(seed * 2 + 1)
    asks = [_draw_ask(rng, number) for number in range(rng.randint(1, 4))]
    is_crowd = rng.random() < 0.1
    if is_crowd:  # everybody at once, and some for the same: so that they meet in batches
        kinds = rng.choice((["plain"], ["one"], ["chain"], ["careful"], ["unstorable", "one", "careful", "fan", "one"]))
        asks = [
            Ask(number, kind, rng.randrange(100), at=1.0, repeats=rng.randint(1, 4))
            for number, kind in enumerate(kinds)
        ]
    if rng.random() < 0.05:
        asks.append(Ask(len(asks), "newer", rng.randrange(100), rng.random() * 5))
    faults = _draw_faults(rng, span=600 + 500 * len(asks))
    if is_crowd:
        faults.repeats = 0.5
    plan = Plan(
        asks,
        faults,
        workers=rng.randint(2, 3),
        sweepers=rng.choice((1, 1, 2)),
        bad_messages=rng.choice((0, 0, 0, 5)),
        first_version=rng.choice(("1", "1", "2")),
    )
    if rng.random() < 0.3:
        faults.fulls = [
            (rng.random() * rng.choice((0.05, 3.0, 15.0)), rng.choice((0.5, 5.0, 60.0)), rng.choice(QUEUES))
            for _ in range(rng.randint(1, 4))
        ]
    plan.orders = _draw_orders(random.Random(seed * 2 + 2), plan.asks)
    return plan


def _draw_orders(rng: random.Random, asks: list[Ask]) -> list[tuple[float, str, int]]:
    """Now and then people give orders, for tasks that one requester waits for."""
    if rng.random() < 0.1:
        asks.append(Ask(len(asks), "hopeless", rng.randrange(100), rng.random() * 5))
        return [(asks[-1].at + 3.0, "retry", asks[-1].number)]
    alone = [ask for ask in asks if not ask.repeats and ask.cancel_after is None]
    if not alone or rng.random() > 0.25:
        return []
    kinds = ("rewind", "rewind", "pause", "retry")
    picked = [rng.choice(alone) for _ in range(rng.randint(1, 4))]
    return sorted(
        (ask.at + rng.random() * rng.choice((0.1, 1.0, 8.0)), rng.choice(kinds), ask.number) for ask in picked
    )


def _draw_faults(rng: random.Random, *, span: int) -> Faults:
    faults = Faults(restart_s=rng.choice((0.1, 5.0, 30.0)))
    if rng.random() < 0.7:
        faults.kill_turns = {rng.randrange(20, span) for _ in range(rng.randint(1, 5))}
    if rng.random() < 0.4:
        faults.freeze_turns = {
            rng.randrange(20, span): rng.choice((1.0, 7.0, 25.0)) * (0.5 + rng.random())
            for _ in range(rng.randint(1, 3))
        }
    if rng.random() < 0.5:
        faults.cuts = [(rng.random() * 15, rng.choice((0.05, 1.0, 8.0))) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.3:
        faults.outages = [(rng.random() * 15, rng.choice((0.2, 3.0, 10.0))) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.15:
        faults.clock_jumps = [(rng.random() * 15, rng.choice((-40.0, -5.0, 5.0, 40.0)))]
    if rng.random() < 0.15:
        faults.deploys = [rng.random() * 10 for _ in range(2)]
    if rng.random() < 0.4:
        faults.store_doubt = rng.choice((0.02, 0.1, 0.3))
    if rng.random() < 0.4:
        faults.repeats = rng.choice((0.02, 0.1, 0.4))
    return faults


def _draw_ask(rng: random.Random, number: int) -> Ask:
    return Ask(
        number,
        rng.choice(KINDS),
        rng.randrange(100),
        at=rng.random() * 3,
        cancel_after=rng.random() * rng.choice((0.05, 0.5, 5.0)) if rng.random() < 0.15 else None,
        repeats=rng.randint(1, 2) if rng.random() < 0.2 else 0,
    )


def crowded() -> Plan:
    """The same with queues that are full from the start: the peers', then the client's."""
    fulls = [(0.3, 8.0, flows.PEER), (0.3, 4.0, flows.QUIET), (0.3, 40.0, "client")]
    asks = [Ask(0, "plain", 5, 0.1), Ask(1, "branches", 5, 0.5), Ask(2, "plain", 6, 0.5)]  # the first makes the queue
    return Plan(asks, Faults(fulls=fulls, restart_s=2.0))


def calm() -> Plan:
    """One task, two calls, two replicas, and nothing goes wrong: the ground on which every crash is tried."""
    return Plan([Ask(0, "branches", 5, 0.0)], Faults(restart_s=2.0))


def ordered() -> Plan:
    """One task that people take back, pause and retry while it waits, and nothing else goes wrong."""
    orders = [(0.5, "rewind", 0), (1.0, "pause", 0), (25.0, "retry", 0)]
    return Plan([Ask(0, "branches", 5, 0.0)], Faults(restart_s=2.0), orders=orders)


def single_crashes(turns: int, reached: dict[str, int]) -> Iterator[tuple[str, Faults]]:
    """A crash at every await, and at every time a named point is reached."""
    for turn in range(1, turns + 1):
        yield f"turn {turn}", Faults(kill_turns={turn}, restart_s=2.0)
    for point, count in reached.items():
        for number in range(1, count + 1):
            yield f"{point}:{number}", Faults(kill_points={point: {number}}, restart_s=2.0)


def paired_crashes(reached: dict[str, int]) -> Iterator[tuple[str, Faults]]:
    """A crash at every pair of named points, the first time each is reached; the same point: twice."""
    names = sorted(reached)
    for first in names:
        for second in names:
            kills = {first: {1}, second: {2}} if first == second else {first: {1}, second: {1}}
            if first == second:
                kills = {first: {1, 2}}
            yield f"{first} + {second}", Faults(kill_points=kills, restart_s=2.0)
