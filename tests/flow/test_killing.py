"""Replicas are killed with -9: nothing is lost, nothing is answered twice."""

import asyncio
import itertools
import random
from pathlib import Path

import pytest
from tests.flow.harness import Asked, Process, Rig, until

from coatcheck.store import TaskState

APP = "tests.flow.flows:app"


class Fleet:
    """Replicas of `flows` that know their own names."""

    def __init__(self, rig: Rig, peer: str) -> None:
        self.rig = rig
        self.service = rig.names.new("flows")
        self._peer = peer

    def _environment(self, name: str) -> dict[str, str]:
        return {"FLOW_SERVICE": self.service, "FLOW_PEER": self._peer, "FLOW_REPLICA": name}

    async def start(self, name: str, **environment: str) -> Process:
        return await self.rig.worker_process(APP, name=name, **self._environment(name), **environment)

    async def start_unseen(self, name: str, **environment: str) -> Process:
        """Start a replica that may not live to say so."""
        return await self.rig.process("worker", APP, name=name, **self._environment(name), **environment)

    async def start_crashing(self, point: str) -> Process:
        return await self.start("crasher", COATCHECK_CRASH=point)


async def test_replica_that_put_the_task_down_is_killed_and_another_finishes_it(rig: Rig) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    fleet = Fleet(rig, peer.queue)
    replicas = {name: await fleet.start(name) for name in ("w1", "w2", "w3")}

    asked_for = await requester.send(fleet.service, "owls", type="fan")
    questions = await peer.asked(4)
    (task,) = await rig.task(TaskState.PARKED)
    began = (await rig.store.task_lines(task.task_id))[0].value
    assert began is not None
    holder = next(name for name in replicas if name.encode() in began)
    replicas[holder].kill()
    await replicas[holder].wait()
    for question in questions:
        await question.reply(question.body)
    result = await requester.reply(asked_for)

    assert result["found"] == ["owls-0", "owls-1", "owls-2", "owls-3"]
    assert result["began"] == holder
    assert result["ended"] != holder
    await rig.task(TaskState.DONE)
    assert len(requester.finals(asked_for)) == 1
    assert set(peer.seen.values()) == {1}


@pytest.mark.parametrize("point", ["before_park", "after_park", "message_confirmed:2"])
async def test_crash_around_the_checkpoint_sends_every_call_and_ends_once(rig: Rig, point: str) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    fleet = Fleet(rig, peer.queue)
    crasher = await fleet.start_crashing(point)

    asked_for = await requester.send(fleet.service, "owls", type="fan")
    assert await crasher.wait() == 137
    await fleet.start("heir")
    bodies: set[str] = set()
    while bodies != {f"owls-{number}" for number in range(4)}:
        (question,) = await peer.asked()
        if question.body not in bodies:
            await question.reply(question.body)
        bodies.add(question.body)
    result = await requester.reply(asked_for)

    assert result["found"] == [f"owls-{number}" for number in range(4)]
    assert result["ended"] == "heir"
    assert len(requester.finals(asked_for)) == 1


async def test_crash_after_the_final_commit_still_sends_the_reply(rig: Rig) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    fleet = Fleet(rig, peer.queue)
    crasher = await fleet.start_crashing("after_finish")

    asked_for = await requester.send(fleet.service, "owls", type="once")
    (question,) = await peer.asked()
    await question.reply("hoo")
    assert await crasher.wait() == 137
    (task,) = await rig.task(TaskState.DONE)
    await fleet.start("heir")

    assert await requester.reply(asked_for) == "hoo"
    assert task.epoch == 2
    assert len(requester.finals(asked_for)) == 1


async def test_crash_in_a_resumed_handler_is_taken_over_by_the_redelivered_reply(rig: Rig) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    fleet = Fleet(rig, peer.queue)
    first = await fleet.start("first")

    asked_for = await requester.send(fleet.service, "owls", type="once")
    (question,) = await peer.asked()
    await rig.task(TaskState.PARKED)
    first.kill()
    await first.wait()
    crasher = await fleet.start_crashing("before_run")
    await question.reply("hoo")
    assert await crasher.wait() == 137
    await fleet.start("heir")

    assert await requester.reply(asked_for) == "hoo"
    (task,) = await rig.task(TaskState.DONE)
    assert task.epoch == 3


async def test_step_that_was_cut_off_runs_again_elsewhere(rig: Rig, tmp_path: Path) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    fleet = Fleet(rig, peer.queue)
    ledger = tmp_path / "ledger"
    victim = await fleet.start("victim")

    asked_for = await requester.send(fleet.service, str(ledger), type="slow_step")
    await until(ledger.exists, what="the step began")
    victim.kill()
    await victim.wait()
    await fleet.start("heir", FLOW_STEP_S="0")

    assert await requester.reply(asked_for) == "heir"
    assert ledger.read_text().split() == ["victim", "heir"]


async def test_task_that_kills_its_worker_is_stopped_and_its_neighbours_live(rig: Rig, tmp_path: Path) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    fleet = Fleet(rig, peer.queue)
    ledger = tmp_path / "ledger"
    limit = 4

    first = await fleet.start("victim", COATCHECK_MAX_PICKUPS=str(limit))

    async def keep_alive(replica: Process) -> None:
        """Whoever runs replicas starts them again."""
        while True:
            await replica.process.wait()
            replica = await fleet.start_unseen("victim", COATCHECK_MAX_PICKUPS=str(limit))

    supervisor = asyncio.create_task(keep_alive(first))
    deadly = await requester.send(fleet.service, str(ledger), type="killer")
    problem = await requester.reply(deadly, within_s=60)
    harmless = await requester.send(fleet.service, "owls", type="once")
    (question,) = await peer.asked(within_s=60)
    await question.reply("hoo")

    assert problem["code"] == "crashed_repeatedly"
    assert await requester.reply(harmless) == "hoo"
    assert len(ledger.read_text().split()) == limit
    supervisor.cancel()


async def test_failed_attempts_are_repeated_after_a_durable_delay(rig: Rig, tmp_path: Path) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    fleet = Fleet(rig, peer.queue)
    ledger = tmp_path / "ledger"
    await fleet.start("w1")
    await fleet.start("w2")
    await rig.sweeper_process()

    result = await requester.reply(await requester.send(fleet.service, str(ledger), type="flaky"))

    assert result == 3
    assert ledger.read_text().split() == ["noted"]


async def test_sigterm_drains_and_exits_cleanly_while_tasks_wait(rig: Rig) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    fleet = Fleet(rig, peer.queue)
    first = await fleet.start("first")

    asked_for = await requester.send(fleet.service, "owls", type="once")
    (question,) = await peer.asked()
    await rig.task(TaskState.PARKED)
    first.terminate()
    assert await first.wait() == 0
    await fleet.start("second")
    await question.reply("hoo")

    assert await requester.reply(asked_for) == "hoo"


async def test_sigterm_lets_a_run_that_outlives_the_grace_time_go_back(rig: Rig, tmp_path: Path) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    fleet = Fleet(rig, peer.queue)
    ledger = tmp_path / "ledger"
    first = await fleet.start("first", COATCHECK_GRACE="0.5")

    asked_for = await requester.send(fleet.service, str(ledger), type="slow_step")
    await until(ledger.exists, what="the step began")
    first.terminate()
    assert await first.wait() == 0
    await fleet.start("second", FLOW_STEP_S="0")

    assert await requester.reply(asked_for) == "second"


async def test_thousands_of_parked_tasks_hold_no_memory(rig: Rig) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    fleet = Fleet(rig, peer.queue)
    replica = await fleet.start("w1")

    async def park(count: int) -> None:
        """Fifty at a time, so that the worker always has about as much in hand."""
        for _ in range(count // 50):
            await asyncio.gather(*(requester.send(fleet.service, "owls", type="once") for _ in range(50)))
            await peer.asked(50)

    await park(1000)  # whatever a worker warms up by, it has now
    before = _resident_kib(replica)
    await park(3000)
    await rig.task(TaskState.PARKED, 4000)
    after = _resident_kib(replica)

    assert len(await rig.store.list_tasks(states=[TaskState.PARKED], limit=5000)) == 4000
    # A suspended handler with its request and calls takes some 20 KiB: three thousand of them would be 60 MiB. The
    # heap itself may be some 10 MiB larger than it was after a moment in which much was under way.
    assert after - before < 24 * 1024, f"grew from {before} to {after} KiB"


def _resident_kib(replica: Process) -> int:
    status = Path(f"/proc/{replica.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


async def test_replicas_and_sweeper_killed_at_random_lose_nothing(rig: Rig) -> None:
    """Every second or so somebody dies and is started again, while tasks come in, wait and are answered, some twice."""
    peer, requester, dice = await rig.peer(), await rig.requester(), random.Random()
    fleet, count, pending = Fleet(rig, peer.queue), 200, set[asyncio.Task[None]]()

    async def answer(asked: Asked) -> None:
        async def later() -> None:
            await asyncio.sleep(dice.random())
            await asked.reply(asked.body, times=2 if dice.random() < 0.1 else 1)

        pending.add(asyncio.create_task(later()))

    async def start(number: int) -> Process:
        if number == 0:
            return await rig.process("sweeper", name="sweeper")
        return await fleet.start_unseen(f"w{number}", COATCHECK_LEASE="5", COATCHECK_MAX_PICKUPS="50")

    async def kill_at_random(fleet_now: list[Process]) -> int:
        for kills in itertools.count(1):
            await asyncio.sleep(0.5 + dice.random())
            number = dice.randrange(len(fleet_now))
            fleet_now[number].kill()
            await fleet_now[number].wait()
            fleet_now[number] = await start(number)
            if len([each for each in sent if requester.finals(each)]) == count:
                return kills
        raise AssertionError("it counts for ever")

    peer.answer = answer
    sent: list[str] = []
    first = await fleet.start("w1")
    killing = asyncio.create_task(kill_at_random([await start(0), first, await start(2), await start(3)]))
    for number in range(count):
        sent.append(await requester.send(fleet.service, f"t{number}", type="fan"))
        await asyncio.sleep(0.02)
    async with asyncio.timeout(90):
        kills = await killing
    results = [await requester.reply(each) for each in sent]

    assert [result["found"] for result in results] == [[f"t{n}-{k}" for k in range(4)] for n in range(count)]
    assert kills >= 3
    assert await rig.store.count_tasks() == {TaskState.DONE: count}
    assert await rig.store.without_waker() == []
