"""Killing a handler at each of its checkpoints: who passes, who is found out, and how a death is a death."""

import asyncio
import gc
import os
import random
import subprocess
import sys
import threading
from datetime import datetime
from itertools import count
from pathlib import Path

import pytest

from coatcheck import points
from coatcheck.errors import UsageError
from coatcheck.testing import CrashesDiffer, NotFaked, Stage, crash_at_every_checkpoint
from coatcheck.worker import App, CallFailed, Context, Retry

ROOT = Path(__file__).parents[2]

app = App("shop")
seen: list[str] = []
numbers = count()


@pytest.fixture(autouse=True)
def _fresh():
    seen.clear()


def price(item: str) -> float:
    return random.random()  # a step may well be different each time: it is recorded


async def charge(amount: float) -> str:
    return f"charged {amount}"


@app.task
async def order(ctx: Context, item: str) -> dict:
    amount = await ctx.step(price, item)
    offers = await ctx.gather(*(ctx.call("stock", [item, n], timeout=60) for n in range(3)))
    await ctx.sleep(86_400)
    await ctx.send("audit", item)
    receipt = await ctx.step(charge, amount)
    return {"receipt": receipt, "offers": offers, "at": ctx.now(), "luck": ctx.random(), "id": ctx.uuid("order")}


@app.task
async def draws(ctx: Context, _: None) -> float:
    number = random.random()
    await ctx.call("stock")
    return number


@app.task
async def counts(ctx: Context, _: None) -> int:
    number = next(numbers)
    await ctx.call("stock")
    return number


@app.task
async def reads_the_clock(ctx: Context, _: None) -> str:
    await ctx.call("stock")
    return datetime.now().isoformat()  # noqa: DTZ005


@app.task
async def forgets_to_record(ctx: Context, _: None) -> str:
    token = await make_token()  # not a step
    return await ctx.call("stock", token)


async def make_token() -> str:
    return f"token-{next(numbers)}"


@app.task
async def remembers_its_runs(ctx: Context, _: None) -> list[str]:
    seen.append("run")
    await ctx.call("stock", timeout=60)
    runs = len(seen)
    seen.clear()
    return ["as many runs as without a crash"] if runs == 2 else [f"{runs} runs"]


@app.task
async def asks_by_runs(ctx: Context, _: None) -> str:
    """Only a crash between the commit and the reply makes its first run two."""
    seen.append("run")
    first = await ctx.call("stock", "same")
    if len(seen) > 2:
        await ctx.call("stock", "another")
    seen.clear()
    return first


@app.task(retry=Retry(attempts=3, backoff=30.0))
async def fails_twice(ctx: Context, _: None) -> str:
    reply = await ctx.call("stock", ctx.attempt, key=f"try-{ctx.attempt}")
    if ctx.attempt < 3:
        raise ConnectionError("again")
    return reply


@app.task
async def fails(ctx: Context, _: None) -> str:
    await ctx.call("stock")
    raise ValueError("always so")


@app.task
async def first_wins(ctx: Context, _: None) -> str:
    return await ctx.first(*(ctx.call("stock", n, key=f"offer-{n}") for n in range(8)))


@app.task
async def never_ends(ctx: Context, _: None) -> None:
    await asyncio.Event().wait()


@app.task
async def cleans_up(ctx: Context, _: None) -> str:
    try:
        return await ctx.call("stock", timeout=60)
    finally:
        seen.append("finally")


@app.task
async def plain(ctx: Context, n: int) -> int:
    return n + 1


def check(task: str, body=None, **options):
    return crash_at_every_checkpoint(app, body, task=task, **({"peers": {"stock": lambda body: body}} | options))


def test_good_handler_passes_and_the_report_tells_of_its_steps():
    def set_up(stage: Stage) -> None:
        stage.peer("stock").after(seconds=5).replies(lambda body: body[1])
        stage.peer("audit")

    report = check("order", "chair", peers=set_up)

    assert report.result["offers"] == [0, 1, 2]
    assert report.result["at"] == "2030-01-02T00:00:05Z"
    assert report.checkpoints == 6
    assert dict(report.steps) == {"price": 1, "charge": 1}
    assert dict(report.repeated) == {"price": 2, "charge": 2}
    assert {crash.point for crash in report.crashes} == {
        *("before_first_row", "after_first_row", "before_record", "after_record", "before_park", "after_park"),
        *("before_finish", "after_finish", "before_ack"),
    }
    assert f"6 checkpoints, killed {len(report.crashes)} times, the same end every time" in str(report)
    assert "steps that ran again, cut off before they were recorded: price (2 times), charge (2 times)" in str(report)


@pytest.mark.parametrize("task", ["draws", "counts", "reads_the_clock"])
def test_result_that_is_not_the_same_each_time_is_found(task):
    with pytest.raises(CrashesDiffer, match="without any crash, the second time: another end") as caught:
        check(task)

    assert "belongs in `ctx.step`" in str(caught.value)
    (difference,) = caught.value.report.differences
    assert difference.expected != difference.found


def test_step_that_is_not_recorded_is_found():
    with pytest.raises(CrashesDiffer, match=r"does not fit its own journal(.|\n)*recorded: call 'stock'"):
        check("forgets_to_record")


def test_result_that_differs_only_after_a_crash_is_found():
    with pytest.raises(CrashesDiffer, match=r"killed at before_park:1 \(a task is about to be put down\)") as caught:
        check("remembers_its_runs")

    assert "3 runs" in str(caught.value)
    assert all(difference.crash is not None for difference in caught.value.report.differences)


def test_peer_that_is_asked_something_else_after_a_crash_is_found():
    with pytest.raises(CrashesDiffer, match="peer 'stock' was asked something else") as caught:
        check("asks_by_runs")

    assert "another" in str(caught.value)


def test_what_may_differ_can_be_left_out():
    def without_a_number(result: float) -> str:
        return type(result).__name__

    report = check("draws", compare=without_a_number)

    assert len(report.crashes) == 6


def test_retries_of_a_task_are_checkpoints_too():
    report = check("fails_twice")

    assert report.result == 3
    assert {"before_retry", "after_retry"} <= {crash.point for crash in report.crashes}


def test_task_that_fails_must_fail_the_same_way():
    report = check("fails")

    assert report.result is None
    assert len(report.crashes) == 6


def test_race_has_the_winner_it_had_without_a_crash():
    assert check("first_wins").result == 0


def test_failing_peers_and_other_apps():
    helper = App("stock")

    @helper.task
    async def look(ctx: Context, n: int) -> int:
        try:
            return await ctx.call("shelf", n)
        except CallFailed:
            return -1

    def set_up(stage: Stage) -> None:
        stage.peer("shelf").fails("empty")

    assert check("first_wins", peers=set_up, apps=[helper]).result == -1


def test_task_that_never_waits():
    report = check("plain", 1, peers=None)

    assert (report.result, report.checkpoints) == (2, 1)
    assert [crash.point for crash in report.crashes] == ["before_finish", "after_finish", "before_ack"]


def test_task_that_does_not_end_even_without_a_crash_is_refused():
    with pytest.raises(UsageError, match=r"does not come to an end(.|\n)*kept in RAM"):
        check("never_ends")


def test_peer_nobody_faked_is_named():
    with pytest.raises(NotFaked, match="peer\\('stock'\\)"):
        check("fails", peers=None)


async def test_it_can_be_called_where_a_loop_runs():
    thread = threading.current_thread()

    report = check("plain", 1)

    assert report.result == 2
    assert thread is threading.current_thread()


def test_points_are_disarmed_afterwards():
    check("plain", 1)

    assert points._on_reach is None


def test_dead_replicas_say_nothing_when_the_interpreter_ends():
    script = """if True:
        import logging
        from tests.testing.test_crashes import check
        # On a busy machine a step of the loop may be slow, and debug mode says so.
        logging.getLogger("asyncio").addFilter(lambda record: " took " not in record.getMessage())
        check("cleans_up")
    """
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", script]
    path = os.pathsep.join(str(ROOT / each) for each in (".", "worker", "broker", "store"))

    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=100, check=False
    )

    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_death_runs_no_cleanup():
    report = check("cleans_up", peers={"stock": lambda body: gc.collect() and "collected"})
    gc.collect()

    # A play cleans up once when the task is put down and once when the handler ends. A replica that dies before it puts
    # the task down, or just after it has committed that, does not; whoever takes over runs what is left.
    cleanups = {"before_park": 2, "after_park": 1, "before_ack": 2 + 2, "before_finish": 3, "after_finish": 2}
    assert len(report.crashes) == 6
    assert len(seen) == 2 * 2 + sum(cleanups.values())
