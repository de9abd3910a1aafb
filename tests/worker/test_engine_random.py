"""Random handlers against a random world: replies in any order, live or parked, crashes at any commit.

What must hold: every run observes what the runs before it observed, in the same order, before it observes anything new;
no call is sent twice and no recorded step runs again; the task ends; a replay of its whole journal changes nothing.
`COATCHECK_TEST_SEEDS` widens it.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from typing import Any

import pytest
from tests.worker.fake_port import Desk

from coatcheck.errors import CallFailed
from coatcheck.store.kinds import Kind
from coatcheck.store.rows import CallState
from coatcheck.worker.engine.run_port import Abandoned, Finished, Parked

SEEDS = int(os.environ.get("COATCHECK_TEST_SEEDS", "60"))
BATCHES = 16

EXECUTED: Counter[str] = Counter()


async def step_value(label: str) -> str:
    EXECUTED[label] += 1
    for _ in range(len(label) % 3):
        await asyncio.sleep(0)
    return f"s{label}"


# --- a random handler ---

LEAVES = ["call", "call", "step", "sleep", "now"]
NODES = [
    "seq",
    "gather",
    "group",
    "rows",
    "first",
    "quorum",
    "mixed",
    "completed",
    "wait",
    "timeout",
    "cancel",
    "locked",
    "shield",
]


def make_spec(rng: random.Random, depth: int, label: str) -> tuple[str, str, list[Any]]:
    if depth == 0 or rng.random() < 0.25:
        return (rng.choice(LEAVES), label, [])
    children = [make_spec(rng, depth - 1, f"{label}{n}") for n in range(rng.randint(1, 3))]
    return (rng.choice(NODES), label, children)


class Program:
    """A handler made from a specification; it keeps what it observed, in order."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self.trace: list[Any] = []

    async def handler(self, ctx: Any) -> Any:
        self.trace = []
        return await self.node(ctx, self.spec)

    def see(self, label: str, what: Any) -> Any:
        self.trace.append((label, what))
        return what

    async def node(self, ctx: Any, spec: Any) -> Any:
        kind, label, _ = spec
        value = await getattr(self, f"do_{kind}")(ctx, spec)
        return self.see(label, value)

    async def do_call(self, ctx, spec):
        try:
            return await ctx.call(f"p{spec[1]}", spec[1])
        except CallFailed as error:
            return f"failed {error.code}"

    async def do_step(self, ctx, spec):
        return await ctx.step(step_value, spec[1])

    async def do_sleep(self, ctx, spec):
        return await ctx.sleep(5)

    async def do_now(self, ctx, spec):
        await asyncio.sleep(0)
        ctx.now()  # its value is not observed: a crash before the next commit makes a new one
        return "now"

    async def do_seq(self, ctx, spec):
        return [await self.node(ctx, each) for each in spec[2]]

    async def do_gather(self, ctx, spec):
        return await asyncio.gather(*(self.node(ctx, each) for each in spec[2]))

    async def do_group(self, ctx, spec):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.node(ctx, each)) for each in spec[2]]
        return [task.result() for task in tasks]

    def rows(self, ctx, spec):
        return [ctx.call(f"r{each[1]}") if n % 3 else ctx.sleep(n + 1) for n, each in enumerate(spec[2], 1)]

    async def do_rows(self, ctx, spec):
        found = await ctx.gather(*self.rows(ctx, spec), return_exceptions=len(spec[2]) % 2 == 0)
        return [str(each) for each in found]

    async def do_first(self, ctx, spec):
        return await ctx.first(*self.rows(ctx, spec), cancel_rest=len(spec[1]) % 2 == 0)

    async def do_quorum(self, ctx, spec):
        return await ctx.quorum((len(spec[2]) + 1) // 2, *self.rows(ctx, spec))

    async def do_mixed(self, ctx, spec):
        works = [*self.rows(ctx, spec), ctx.step(step_value, f"m{spec[1]}"), self.node(ctx, spec[2][0])]
        return await ctx.quorum(2, *works, cancel_rest=len(spec[1]) % 2 == 0)

    async def do_completed(self, ctx, spec):
        branches = [self.node(ctx, child) for child in spec[2]]
        return [self.see(f"{spec[1]}c", await each) for each in asyncio.as_completed(branches)]

    async def do_wait(self, ctx, spec):
        names = {asyncio.create_task(self.node(ctx, each)): each[1] for each in spec[2]}
        order, pending = [], set(names)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            order.append(self.see(f"{spec[1]}w", sorted(names[task] for task in done)))
        return [order, [task.result() for task in names]]

    async def do_timeout(self, ctx, spec):
        try:
            async with asyncio.timeout(1000):
                return [await self.node(ctx, each) for each in spec[2]]
        except TimeoutError:
            return "timed out"

    async def do_cancel(self, ctx, spec):
        task = asyncio.create_task(self.node(ctx, (spec[2][0][0], f"{spec[1]}x", spec[2][0][2])))
        found = await self.node(ctx, ("call", f"{spec[1]}y", []))
        task.cancel()
        done, _ = await asyncio.wait({task})
        return [found, [each.cancelled() for each in done]]

    async def do_locked(self, ctx, spec):
        lock = asyncio.Semaphore(1)

        async def inside(child):
            async with lock:
                return await self.node(ctx, child)

        return await asyncio.gather(*(inside(each) for each in spec[2]))

    async def do_shield(self, ctx, spec):
        inner = [asyncio.create_task(self.node(ctx, each)) for each in spec[2]]
        try:
            async with asyncio.timeout(1000):
                await asyncio.shield(inner[0])
        except TimeoutError:
            self.see(spec[1], "shielded")
        return [await each for each in inner]


def can_fail(spec: Any) -> bool:
    """Groups over rows raise when peers fail; the handler as a whole lets that through."""
    return spec[0] in ("rows", "first", "quorum", "mixed") or any(map(can_fail, spec[2]))


# --- a random world ---


class World:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        spec = make_spec(self.rng, self.rng.randint(1, 3), "")
        self.program = Program(spec)
        self.desk = Desk(self.program.handler)
        self.failure_rate = 0.0 if can_fail(spec) else 0.2
        self.crash_rate = self.rng.choice([0.0, 0.1, 0.3])
        self.live_rate = self.rng.choice([0.0, 0.3, 0.8])
        self.crashes = 0
        self.longest: list[Any] = []

    def answer(self) -> None:
        """One peer answers, or one timer rings."""
        rows = self.desk.rows
        keys = [key for key, call in rows.open_calls.items() if call.kind is not Kind.SEND]
        if not keys:
            return
        key = self.rng.choice(keys)
        is_call = rows.open_calls[key].kind is Kind.CALL
        if is_call and self.rng.random() < self.failure_rate:
            self.desk.fail(key)
        else:
            self.desk.ok(key, f"v{key}")

    def crash(self) -> None:
        self.crashes += 1
        self.desk.rows.epoch += 1  # another replica takes the task over

    def on_commit(self, _changes: Any) -> None:
        if self.rng.random() < self.live_rate:
            self.answer()
        if self.rng.random() < self.crash_rate / 2:
            self.crash()

    def after_commit(self, _changes: Any, _committed: Any) -> None:
        if self.rng.random() < self.crash_rate / 2:
            self.crash()
            self.desk.run.abandon()
        elif self.rng.random() < self.live_rate:
            self.answer()

    async def peers(self) -> None:
        """Replies that land while a run is live: told to it at once, or left for it to find at its next commit."""
        while True:
            for _ in range(self.rng.randint(1, 30)):
                await asyncio.sleep(0)
            port, rows = self.desk.port, self.desk.rows
            if rows.is_parked:
                continue
            if self.rng.random() < self.live_rate or not self.desk.parks:
                self.answer()
            if self.rng.random() < 0.7 and port.epoch == rows.epoch:
                self.desk.run.deliver(port.news())

    async def run(self) -> Any:
        while True:
            self.desk.parks = self.rng.random() < 0.8
            run = self.desk.begin()
            self.desk.port.before_commit = self.desk.port.during_commit = self.on_commit
            self.desk.port.after_commit = self.after_commit
            around = asyncio.create_task(self.peers())
            try:
                outcome = await asyncio.wait_for(run.execute(), 20)
            finally:
                around.cancel()
                await asyncio.wait({around})
            self.check_trace()
            if isinstance(outcome, Finished):
                return outcome.value
            assert outcome in (Parked(), Abandoned()), outcome
            while self.desk.rows.is_parked and not self.desk.rows.is_met():
                assert self.desk.rows.waited(), "parked, and nothing can wake it"
                self.answer()

    def check_trace(self) -> None:
        """What this run observed must begin with what the runs before it observed, or be the beginning of that."""
        trace, before = self.program.trace, self.longest
        common = min(len(trace), len(before))
        assert trace[:common] == before[:common]
        if len(trace) > len(before):
            self.longest = trace


@pytest.mark.parametrize("batch", range(BATCHES))
async def test_random_handlers_in_a_random_world(batch):
    for seed in range(batch * SEEDS, (batch + 1) * SEEDS):
        EXECUTED.clear()
        world = World(seed)
        try:
            value = await world.run()
            rows = world.desk.rows
            sent = Counter(call.key for call in rows.sent)
            assert all(count == 1 for count in sent.values())
            steps = [each for each in rows.recorded.values() if each.kind is Kind.STEP and each.state is CallState.OK]
            assert all(EXECUTED[label] <= 1 + world.crashes for label in EXECUTED)

            # The whole journal once more: the same value, the same observations, no effect.
            EXECUTED.clear()
            commits = len(rows.commits)
            world.desk.parks = True
            again = await world.desk.once()
            assert isinstance(again, Finished)
            assert again.value == value
            assert world.program.trace == world.longest
            assert len(rows.sent) == sum(sent.values())
            assert all(f"s{label}" not in {str(each.value) for each in steps} for label in EXECUTED)
            assert len(rows.commits) == commits
        except BaseException as error:
            error.add_note(f"seed {seed}: {world.program.spec}")
            raise
