"""Time on a stage: durable waits, retries, and what sleeps in RAM."""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from coatcheck.broker.port import Message
from coatcheck.errors import UsageError
from coatcheck.testing import Stage, Stuck
from coatcheck.testing.virtual_time import Time
from coatcheck.worker import App, CallFailed, Context, Retry, TaskFailed

BASE_S = 0.3
"""A reading of the loop's clock from which seven times a tenth do not make seven tenths."""

app = App("clock")
tries: list[str] = []
gate: dict[str, asyncio.Event] = {}
pipe: list[Any] = []


@pytest.fixture(autouse=True)
def _fresh():
    tries.clear()
    gate.clear()
    pipe.clear()


@app.task
async def nap(ctx: Context, days: int) -> list[str]:
    begun = ctx.now()
    await ctx.sleep(timedelta(days=days))
    return [begun.isoformat(), ctx.now().isoformat()]


@app.task(retry=Retry(attempts=3, backoff=60.0))
async def stubborn(ctx: Context, _: None) -> str:
    tries.append(str(ctx.attempt))
    if ctx.attempt < 3:
        raise ConnectionError("not yet")
    return "at last"


@app.task
async def insist(ctx: Context, _: None) -> str:
    return await ctx.call("search", retry=Retry(attempts=3, backoff=30.0), timeout=10)


def flaky() -> int:
    tries.append("flaky")
    if len(tries) < 4:
        raise ConnectionError("not yet")
    return len(tries)


@app.task
async def step_again(ctx: Context, _: None) -> int:
    return await ctx.step(flaky, retry=Retry(attempts=5, backoff=20.0))


async def doze() -> str:
    await asyncio.sleep(30)
    return "awake"


@app.task
async def doze_off(ctx: Context, _: None) -> str:
    return await ctx.step(doze)


@app.task
async def race(ctx: Context, _: None) -> list:
    order = []

    async def wait(name: str, seconds: float) -> None:
        await ctx.sleep(seconds)
        order.append([name, ctx.now().isoformat()[11:19]])

    await asyncio.gather(wait("slow", 7200), wait("quick", 60), wait("middle", 3600))
    return order


@app.task
async def twice_at_once(ctx: Context, _: None) -> list[str]:
    async def wait(seconds: float) -> str:
        await ctx.sleep(seconds)
        return ctx.now().isoformat()[17:26]

    return list(await asyncio.gather(wait(1.0), wait(1.005)))


@app.task
async def limited(ctx: Context, _: None) -> str:
    try:
        async with asyncio.timeout(600):
            return await ctx.call("search", timeout=86_400)
    except TimeoutError:
        return "too late"


@app.task
async def behind_a_lock(ctx: Context, _: None) -> list:
    lock = asyncio.Lock()

    async def one(n: int) -> int:
        async with lock:
            return await ctx.call("search", n)

    return list(await asyncio.gather(one(1), one(2)))


@app.task
async def hold(ctx: Context, _: None) -> str:
    await gate["open"].wait()
    return "through"


async def read_slowly() -> str:
    reader, writer = pipe
    writer.write(b"well?\n")
    line = await reader.readline()
    writer.close()
    return line.decode()


@app.task
async def read(ctx: Context, _: None) -> str:
    return await ctx.step(read_slowly)


def think() -> str:
    time.sleep(0.05)
    return "thought"


@app.task
async def in_thread(ctx: Context, _: None) -> list:
    return await ctx.gather(ctx.step(doze), ctx.step(think))


def double(value: int) -> int:
    return 2 * value


@app.task
async def asleep_for_hours(ctx: Context, _: None) -> str:
    tries.append("begun")
    await ctx.step(double, 1)  # from here on there is a row, and a lease
    await asyncio.sleep(7200)
    return "awake"


async def submit(stage: Stage, task: str, body=None):
    await stage.run(app)
    return await stage.submit("clock", body, task=task)


async def test_sleep_of_days_takes_no_time(coatcheck):
    ticket = await submit(coatcheck, "nap", 3)

    await coatcheck.advance(days=2, hours=23)
    assert ticket.state == "parked"
    assert ticket.waits_for == ["@sleep"]
    await coatcheck.advance(hours=1)

    assert await ticket.result() == ["2030-01-01T00:00:00+00:00", "2030-01-04T00:00:00+00:00"]
    assert coatcheck.now == datetime(2030, 1, 4, tzinfo=UTC)


async def test_result_with_a_timeout_lets_time_pass_as_far_as_needed(coatcheck):
    ticket = await submit(coatcheck, "nap", 3)

    await ticket.result(timeout=timedelta(days=30))

    assert coatcheck.now == datetime(2030, 1, 4, tzinfo=UTC)


async def test_result_that_takes_longer_than_its_timeout(coatcheck):
    ticket = await submit(coatcheck, "nap", 3)

    with pytest.raises(TimeoutError, match=r"advance\(days=2\)"):
        await ticket.result(timeout=86_400)


async def test_the_clock_can_be_set_before_anything_runs(coatcheck):
    coatcheck.now = datetime(2031, 5, 1, tzinfo=UTC)
    ticket = await submit(coatcheck, "nap", 1)

    assert (await ticket.result(timeout=86_400))[0] == "2031-05-01T00:00:00+00:00"
    with pytest.raises(UsageError, match="before the first app runs"):
        coatcheck.now = datetime(2032, 1, 1, tzinfo=UTC)
    with pytest.raises(UsageError, match="time zone"):
        Stage(now=datetime(2031, 1, 1))  # noqa: DTZ001


async def test_events_happen_in_the_order_of_their_times(coatcheck):
    ticket = await submit(coatcheck, "race")

    await coatcheck.advance(days=1)

    assert await ticket.result() == [["quick", "00:01:00"], ["middle", "01:00:00"], ["slow", "02:00:00"]]


async def test_due_times_a_moment_apart_are_two(coatcheck):
    ticket = await submit(coatcheck, "twice_at_once")

    await coatcheck.advance(seconds=2)

    assert await ticket.result() == ["01+00:00", "01.005000"]


async def test_moments_add_up(coatcheck, monkeypatch):
    begin = Time.start_at
    monkeypatch.setattr(Time, "start_at", lambda time, _: begin(time, BASE_S))
    coatcheck.peer("search").after(seconds=0.7).replies("x")
    ticket = await submit(coatcheck, "limited")
    moments = BASE_S
    for _ in range(7):
        moments += 0.1
        await coatcheck.advance(seconds=0.1)

    assert moments < BASE_S + 0.7, "a sum that floats get wrong"
    assert await ticket.result() == "x"


async def test_task_is_retried_when_its_time_has_come(coatcheck):
    ticket = await submit(coatcheck, "stubborn")
    assert ticket.state == "retrying"
    with pytest.raises(Stuck, match=r"attempt 2 failed \(not yet\), and it tries again .*advance\(minutes=1\)"):
        await ticket.result()

    await coatcheck.advance(seconds=59)
    assert tries == ["1"]
    await coatcheck.advance(seconds=61)

    assert tries == ["1", "2", "3"]
    assert await ticket.result() == "at last"


async def test_retried_call_is_asked_again_later(coatcheck):
    coatcheck.peer("search").fails("busy").then.never().then.replies("x")
    ticket = await submit(coatcheck, "insist")

    await coatcheck.advance(seconds=30)
    assert len(coatcheck.peer("search").calls) == 2
    await coatcheck.advance(seconds=10)  # its timeout
    await coatcheck.advance(seconds=30)

    assert await ticket.result() == "x"
    assert len({asked.key for asked in coatcheck.peer("search").calls}) == 1


async def test_back_off_of_a_step_is_slept_out_by_itself(coatcheck):
    ticket = await submit(coatcheck, "step_again")

    assert await ticket.result() == 4
    assert coatcheck.now == datetime(2030, 1, 1, 0, 1, tzinfo=UTC)


async def test_sleep_inside_a_step_is_slept_out_by_itself(coatcheck):
    ticket = await submit(coatcheck, "doze_off")

    assert ticket.is_done
    assert await ticket.result() == "awake"


async def test_timeout_block_of_a_handler_is_in_the_stages_time(coatcheck):
    coatcheck.peer("search").never()
    ticket = await submit(coatcheck, "limited")

    await coatcheck.advance(minutes=9)
    assert ticket.state == "parked"
    await coatcheck.advance(minutes=1)

    assert await ticket.result() == "too late"


async def test_branch_behind_a_lock_does_not_keep_the_task_in_ram(coatcheck):
    coatcheck.peer("search").never()
    ticket = await submit(coatcheck, "behind_a_lock")

    assert ticket.state == "parked"
    assert coatcheck.peer("search").asked == [1]


async def test_run_held_by_the_test_itself_is_at_rest(coatcheck, monkeypatch):
    monkeypatch.setattr("coatcheck.testing.stage_clock.OUTSIDE_S", 3600.0)  # nothing outside is to be waited for
    gate["open"] = asyncio.Event()
    ticket = await submit(coatcheck, "hold")

    with pytest.raises(Stuck, match=r"kept in RAM(.|\n)*await gate\[\"open\"\]\.wait\(\)"):
        await ticket.result()
    gate["open"].set()

    assert await ticket.result() == "through"
    assert coatcheck.now < datetime(2030, 1, 1, 0, 0, 1, tzinfo=UTC)


async def test_step_that_reads_a_socket_is_waited_for(coatcheck):
    async def serve(reader, writer):
        await reader.readline()
        await asyncio.sleep(0.05)  # long after everything on the stage has come to rest
        writer.write(b"hello\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    pipe.extend(await asyncio.open_connection(*server.sockets[0].getsockname()))
    async with server:
        ticket = await submit(coatcheck, "read")

        assert await ticket.result() == "hello\n"
    assert coatcheck.now == datetime(2030, 1, 1, tzinfo=UTC)


async def test_time_waits_for_a_step_in_a_thread(coatcheck):
    ticket = await submit(coatcheck, "in_thread")

    assert await ticket.result() == ["awake", "thought"]
    assert [entry.key for entry in ticket.journal] == ["think", "doze"]


async def test_long_sleep_in_ram_keeps_its_lease_while_time_passes(coatcheck):
    ticket = await submit(coatcheck, "asleep_for_hours")
    assert not ticket.is_done
    with pytest.raises(Stuck, match=r"await asyncio\.sleep\(7200\)"):
        await ticket.result()

    await coatcheck.advance(hours=2)

    assert await ticket.result() == "awake"
    assert tries == ["begun"]


async def test_finished_task_is_forgotten_after_the_dedup_window(coatcheck):
    await coatcheck.run(app)
    first = await coatcheck.submit("clock", 1, task="nap", identity="same")
    await coatcheck.advance(days=1)
    again = await coatcheck.submit("clock", 1, task="nap", identity="same")
    assert await again.result() == await first.result()

    await coatcheck.advance(days=2)
    anew = await coatcheck.submit("clock", 1, task="nap", identity="same")

    assert anew.state == "parked"


async def test_the_loop_of_the_test_keeps_its_own_time(coatcheck):
    loop = asyncio.get_running_loop()
    await submit(coatcheck, "nap", 3)
    before_s = loop.time()

    async with asyncio.timeout(60):
        await coatcheck.advance(days=2)
        await asyncio.sleep(0.001)

    assert loop.time() - before_s < 86_400


async def test_call_that_waits_long_is_sent_once(coatcheck, monkeypatch):
    taken: list[Message] = []
    peer = coatcheck.peer("search")
    monkeypatch.setattr(peer, "on_message", taken.append)
    await submit(coatcheck, "limited")

    await coatcheck.advance(minutes=9)

    assert len(taken) == 1


async def test_time_does_not_run_backwards(coatcheck):
    with pytest.raises(UsageError, match="one direction"):
        await coatcheck.advance(seconds=-1)


async def test_call_without_a_timeout_has_the_apps(coatcheck):
    asker = App("patient", call_timeout=120)

    @asker.task
    async def ask(ctx: Context, _: None) -> str:
        try:
            return await ctx.call("search")
        except CallFailed as error:
            return error.code

    coatcheck.peer("search").never()
    await coatcheck.run(asker)
    ticket = await coatcheck.submit("patient")

    await coatcheck.advance(seconds=119)
    assert not ticket.is_done
    await coatcheck.advance(seconds=1)

    assert await ticket.result() == "timed_out"


async def test_failed_task_raises_with_the_handlers_own_traceback(coatcheck):
    failing = App("failing")

    @failing.task
    async def fail(ctx: Context, _: None) -> None:
        raise ValueError("so it goes")

    await coatcheck.run(failing)
    ticket = await coatcheck.submit("failing")

    with pytest.raises(TaskFailed, match="so it goes") as caught:
        await ticket.result()

    assert caught.value.type == "ValueError"
    assert 'raise ValueError("so it goes")' in caught.value.__notes__[0]
