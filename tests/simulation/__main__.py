"""Run schedules: `python -m tests.simulation --seeds 0:1000`, or one again, told step by step: `--seed 17`."""

from __future__ import annotations

import argparse
import copy
import gc
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator

from tests.simulation import bugs, plans
from tests.simulation.scenario import Plan, Scene

_clock = time.monotonic  # the simulation puts its own in the place of this


def main() -> int:
    options = _parse()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of a schedule
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    warnings.simplefilter("ignore", RuntimeWarning)  # coroutines of dead processes that nobody will ever await
    sys.unraisablehook = lambda _: None  # what a dead process leaves behind is swept up without a word
    gc.collect()
    gc.freeze()
    if options.bugs:
        return hunt(options.count, seconds=options.seconds)
    bug = f" --bug {options.bug}" if options.bug else ""
    with bugs.planted(options.bug):
        if options.seed is not None:
            return tell(f"--seed {options.seed}", options.seed, plans.draw(options.seed))
        if options.crash is not None:
            return tell(f"--crash {options.crash!r}", 0, dict(_exhaustive())[options.crash])
        found = _exhaustive() if options.exhaustive else _drawn(options.first, options.count)
        return Runner(options.seconds, is_exhaustive=options.exhaustive, stops_at=options.stop_at, bug=bug).run(found)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one, and print what happens")
    parser.add_argument("--crash", help="run this one of the exhaustive crashes, and print what happens")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1000, help="how many seeds")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this long")
    parser.add_argument("--exhaustive", action="store_true", help="one task, a crash at every point and every pair")
    parser.add_argument("--bug", choices=sorted(bugs.BUGS), help="plant this mistake")
    parser.add_argument("--bugs", action="store_true", help="plant each mistake and see that it is found")
    parser.add_argument("--stop-at", type=int, default=3, help="stop after this many bad schedules")
    return parser.parse_args()


def _drawn(first: int, count: int) -> Iterator[tuple[str, Plan]]:
    for seed in range(first, first + count):
        yield str(seed), plans.draw(seed)


def _exhaustive() -> Iterator[tuple[str, Plan]]:
    calm = plans.calm()
    scene = Scene(0, copy.deepcopy(calm))
    assert not scene.run(), scene.world.violations
    for name, faults in (
        *plans.single_crashes(scene.victim_turns, dict(scene.reached)),
        *plans.paired_crashes(dict(scene.reached)),
    ):
        plan = copy.deepcopy(calm)
        plan.faults = faults
        yield name, plan
    yield from _crowded()
    yield from _ordered()


def _ordered() -> Iterator[tuple[str, Plan]]:
    """A crash at every point while people give orders, theirs among them."""
    scene = Scene(0, plans.ordered())
    assert not scene.run(), scene.world.violations
    assert scene.reached["after_order"], "no order was given"
    for name, faults in plans.single_crashes(0, dict(scene.reached)):
        plan = plans.ordered()
        plan.faults = faults
        yield f"{name}, ordered", plan


def _crowded() -> Iterator[tuple[str, Plan]]:
    """A crash at every point while queues are full, the first few times it is reached."""
    scene = Scene(0, plans.crowded())
    assert not scene.run(), scene.world.violations
    assert scene.reached["after_leave"], "no final reply was refused"
    for name, faults in plans.single_crashes(0, {point: min(count, 3) for point, count in scene.reached.items()}):
        plan = plans.crowded()
        plan.faults.kill_points = faults.kill_points
        yield f"{name}, full", plan


class Runner:
    """Runs schedules until one of them is bad, or all are done, and says how many."""

    def __init__(self, seconds: float, *, is_exhaustive: bool, stops_at: int, bug: str) -> None:
        self._until = _clock() + seconds
        self._begun = _clock()
        self._is_exhaustive = is_exhaustive
        self._stops_at = stops_at
        self._bug = bug
        self.counts: Counter[str] = Counter()

    def run(self, found: Iterator[tuple[str, Plan]]) -> int:
        bad = 0
        for name, plan in found:
            seed = 0 if self._is_exhaustive else int(name)
            scene = Scene(seed, plan)
            violations = scene.run()
            self._count(scene)
            if violations:
                bad += 1
                again = f"--crash {name!r}" if self._is_exhaustive else f"--seed {name}"
                print(f"\nBAD {name}: {violations[0]}")
                print(f"  again, step by step: python -m tests.simulation {again}{self._bug}", flush=True)
                if bad >= self._stops_at:
                    break
            if _clock() > self._until:
                break
        self._say()
        return 1 if bad else 0

    def _count(self, scene: Scene) -> None:
        self.counts["schedules"] += 1
        self.counts["tasks"] += len(scene.plan.asks)
        self.counts["kills"] += scene.kills
        self.counts["freezes"] += scene.freezes
        self.counts["callbacks"] += scene.world.turns
        self.counts.update(scene.judge.counts)
        if self.counts["schedules"] % 1000 == 0 and sys.stderr.isatty():
            print(f"\r{self.counts['schedules']} schedules", end="", file=sys.stderr, flush=True)

    def _say(self) -> None:
        took = _clock() - self._begun
        told = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        print(f"simulated {told}, in {took:.0f} s")


def hunt(count: int, *, seconds: float) -> int:
    """Plant one mistake after the other; each must be found within so many schedules. Begins none after the time."""
    until = _clock() + seconds
    missed = tried = 0
    for name in bugs.BUGS:
        if _clock() > until:
            break
        tried += 1
        with bugs.planted(name):
            found = _find(count)
        print(
            f"{name.replace('_', ' ')}: {'NOT FOUND' if found is None else f'seed {found[0]}: {found[1]}'}", flush=True
        )
        missed += found is None
    print(f"found {tried - missed} of {tried} planted bugs; there are {len(bugs.BUGS)}")
    return 1 if missed else 0


def _find(count: int) -> tuple[int, str] | None:
    for seed in range(count):
        violations = Scene(seed, plans.draw(seed)).run()
        if violations:
            return seed, violations[0]
    return None


def tell(how: str, seed: int, plan: Plan) -> int:
    """Run one schedule and print everything that happens in it."""
    scene = Scene(seed, plan, is_traced=True)
    violations = scene.run()
    print(f"python -m tests.simulation {how}")
    print(f"asks: {[(ask.number, ask.kind, ask.n, round(ask.at, 3)) for ask in plan.asks]}")
    print(f"faults: {plan.faults}")
    for at, who, what in scene.world.trace:
        print(f"{at:10.4f}  {who:<12} {what}")
    for violation in violations:
        print(f"VIOLATION {violation}")
    print("bad" if violations else "good")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
