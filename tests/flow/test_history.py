"""What a task's history says after real processes and real servers have had their way with it."""

from datetime import timedelta
from uuid import UUID

from tests.flow.harness import Rig
from tests.flow.test_killing import Fleet

from coatcheck.store import TaskState, chain, decode, encode
from coatcheck.store.rows import CancelAsk, Chain, HistoryLevel


async def told(rig: Rig, task_id: UUID) -> list[tuple[str, str, int]]:
    """Kind, replica and epoch of each entry, in a chain that holds."""
    entries = await rig.store.read_history(task_id)
    assert chain.first_bad(task_id, entries) is None
    return [(one.kind, one.replica, one.epoch) for one in entries]


async def test_history_tells_the_story_of_a_task(rig: Rig) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    fleet = Fleet(rig, peer.queue)
    await fleet.start("only")
    await rig.sweeper()

    asked_for = await requester.send(fleet.service, "owls", type="story")
    for question in await peer.asked(2):
        await question.reply(question.body)
    assert await requester.reply(asked_for) == ["owls-0", "owls-1"]
    (task,) = await rig.task(TaskState.DONE)

    kinds = [kind for kind, _, _ in await told(rig, task.task_id)]
    story = ("accepted", "opened", "parked", "claimed", "resumed", "user:decision", "retried", "resumed", "finished")
    places = [kinds.index(kind) for kind in story[:-2]]
    assert places == sorted(places)
    assert kinds[-1] == "finished"
    assert (kinds.count("recorded"), kinds.count("claimed"), kinds.count("user:decision")) == (1, 3, 1)
    decision = (await rig.store.read_history(task.task_id))[kinds.index("user:decision")]
    assert decision.data is not None
    assert decode(decision.data) == {"choice": "go on", "began": "only"}


async def test_history_says_which_replica_took_over_from_one_that_was_killed(rig: Rig) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    fleet = Fleet(rig, peer.queue)
    first = await fleet.start("first", COATCHECK_HISTORY="full")

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

    story = await told(rig, task.task_id)
    kinds = [kind for kind, _, _ in story]
    assert kinds == ["accepted", "opened", "parked", "claimed", "resumed", "taken_over", "finished"]
    assert [epoch for _, _, epoch in story] == [1, 1, 1, 1, 2, 3, 3]
    assert story[-1][1] == story[-2][1] != story[-3][1]


async def test_off_keeps_no_history_of_any_task(rig: Rig) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    fleet = Fleet(rig, peer.queue)
    await fleet.start("only", COATCHECK_HISTORY="off")

    answered, given_up = [await requester.send(fleet.service, topic, type="once") for topic in ("owls", "bats")]
    questions = {asked.body: asked for asked in await peer.asked(2)}
    tasks = {task.correlation_id: task for task in await rig.task(TaskState.PARKED, count=2)}
    await rig.store.cancel(CancelAsk(fleet.service, tasks[given_up].task_id, lambda _: encode({}), timedelta(days=1)))
    await questions["owls"].reply("hoo")
    assert await requester.reply(answered) == "hoo"

    (done,), (cancelled,) = await rig.task(TaskState.DONE), await rig.task(TaskState.CANCELLED)
    assert (done.chain, cancelled.chain) == (Chain(HistoryLevel.OFF), Chain(HistoryLevel.OFF))
    assert await (await rig.sql()).fetchval("SELECT count(*) FROM coatcheck.history") == 0
