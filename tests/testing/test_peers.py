"""What fake peers can answer, and what they remember."""

import pytest

from coatcheck.errors import UsageError
from coatcheck.testing import NotFaked, Stage, Stuck
from coatcheck.worker import App, CallFailed, Context

app = App("asker")


@app.task
async def ask(ctx: Context, questions: list) -> list:
    """Ask one after the other; a failure stands in the list by its code."""
    answers = []
    for question in questions:
        try:
            answers.append(await ctx.call("search", question, timeout=30))
        except CallFailed as error:
            answers.append([error.code, error.is_retryable])
    return answers


@app.task
async def tell(ctx: Context, what: str) -> str:
    await ctx.send("audit", what, task="note")
    return "told"


@app.task
async def follow(ctx: Context, question: str) -> str:
    return await ctx.call("slow", question, timeout=3600, idle_timeout=10)


async def ask_all(stage: Stage, *questions):
    await stage.run(app)
    return await (await stage.submit("asker", list(questions), task="ask")).result()


async def test_fixed_value_is_for_every_call(coatcheck):
    coatcheck.peer("search").replies([1, 2])

    assert await ask_all(coatcheck, "a", "b") == [[1, 2], [1, 2]]
    assert coatcheck.peer("search").asked == ["a", "b"]


async def test_function_gets_the_body(coatcheck):
    coatcheck.peer("search").replies(lambda body: body * 2)

    assert await ask_all(coatcheck, "a", 3) == ["aa", 6]


async def test_several_values_are_one_for_each_call(coatcheck):
    coatcheck.peer("search").replies("x", "y")

    assert await ask_all(coatcheck, "a", "b") == ["x", "y"]


async def test_one_call_more_than_there_are_values_is_an_error_of_the_test(coatcheck):
    coatcheck.peer("search").replies("x", "y")

    with pytest.raises(UsageError, match="asked 3 times and has 2 replies: the last call was 'c'"):
        await ask_all(coatcheck, "a", "b", "c")


async def test_failure_then_success(coatcheck):
    coatcheck.peer("search").fails("quota", "no more today", retryable=False, limit=5).then.replies("x")

    assert await ask_all(coatcheck, "a", "b", "c") == [["quota", False], "x", "x"]


async def test_function_that_raises_call_failed_is_an_error_of_the_peer(coatcheck):
    def answer(body):
        raise CallFailed("no", problem={"code": "odd", "retryable": False})

    coatcheck.peer("search").replies(answer)

    assert await ask_all(coatcheck, "a") == [["odd", False]]


async def test_function_that_breaks_is_an_error_of_the_test(coatcheck):
    coatcheck.peer("search").replies(lambda body: 1 // 0)

    with pytest.raises(ZeroDivisionError) as caught:
        await ask_all(coatcheck, "a")

    assert caught.value.__notes__ == ["while peer('search') answered 'a'"]


async def test_async_function_is_refused(coatcheck):
    async def answer(body): ...

    coatcheck.peer("search").replies(answer)

    with pytest.raises(UsageError, match="async function"):
        await ask_all(coatcheck, "a")


async def test_value_that_no_message_can_carry_is_an_error_of_the_test(coatcheck):
    coatcheck.peer("search").replies(object())

    with pytest.raises(Exception, match="unencodable"):
        await ask_all(coatcheck, "a")


async def test_silence_ends_with_the_timeout(coatcheck):
    coatcheck.peer("search").never()
    await coatcheck.run(app)
    ticket = await coatcheck.submit("asker", ["a"], task="ask")

    await coatcheck.advance(seconds=29.9)
    assert ticket.state == "parked"
    await coatcheck.advance(seconds=0.1)

    assert await ticket.result() == [["timed_out", True]]
    assert coatcheck.peer("search").cancelled == ["a"]


async def test_missing_peer_has_no_route(coatcheck):
    coatcheck.peer("search").missing()

    assert await ask_all(coatcheck, "a") == [["no_route", True]]
    assert coatcheck.peer("search").asked == []


async def test_peer_that_takes_its_time(coatcheck):
    coatcheck.peer("search").after(seconds=20).replies("x")
    await coatcheck.run(app)
    ticket = await coatcheck.submit("asker", ["a"], task="ask")

    await coatcheck.advance(seconds=19)
    assert not ticket.is_done
    await coatcheck.advance(seconds=1)

    assert await ticket.result() == ["x"]


async def test_progress_moves_the_idle_deadline(coatcheck):
    slow = coatcheck.peer("slow")
    slow.after(seconds=8).progress(1, 3).after(seconds=8).progress(2, 3, "soon").after(seconds=8).replies("x")
    await coatcheck.run(app)
    ticket = await coatcheck.submit("asker", "a", task="follow")

    await coatcheck.advance(seconds=23)
    assert ticket.state == "parked"
    await coatcheck.advance(seconds=1)

    assert await ticket.result() == "x"


async def test_progress_that_stops_ends_with_the_idle_deadline(coatcheck):
    coatcheck.peer("slow").after(seconds=8).progress(1, 3)
    await coatcheck.run(app)
    ticket = await coatcheck.submit("asker", "a", task="follow")

    await coatcheck.advance(seconds=17)
    assert ticket.state == "parked"
    await coatcheck.advance(seconds=1)

    assert ticket.state == "failed"
    with pytest.raises(Exception, match="did not answer in time"):
        await ticket.result()


async def test_new_script_holds_for_the_calls_to_come(coatcheck):
    coatcheck.peer("search").replies("x")
    assert await ask_all(coatcheck, "a") == ["x"]

    coatcheck.peer("search").fails("broken")

    ticket = await coatcheck.submit("asker", ["b"], task="ask")
    assert await ticket.result() == [["broken", True]]
    assert coatcheck.peer("search").asked == ["a", "b"]


async def test_message_without_reply_needs_no_script(coatcheck):
    coatcheck.peer("audit")
    await coatcheck.run(app)

    assert await (await coatcheck.submit("asker", "this", task="tell")).result() == "told"

    (sent,) = coatcheck.peer("audit").calls
    assert (sent.body, sent.task) == ("this", "note")


async def test_peer_nobody_faked_is_named(coatcheck):
    await coatcheck.run(app)
    ticket = await coatcheck.submit("asker", ["a"], task="ask")

    for wait in (ticket.result, coatcheck.settle, coatcheck.advance):
        with pytest.raises(NotFaked, match=r"peer\('search'\) was asked 'a', and nothing says what it answers"):
            await wait()


async def test_fake_that_comes_late_answers_what_waits(coatcheck):
    await coatcheck.run(app)
    tickets = [await coatcheck.submit("asker", [n], task="ask") for n in (1, 2)]

    coatcheck.peer("search").replies("x").then.replies("y")

    assert [await ticket.result() for ticket in tickets] == [["x"], ["y"]]


async def test_answer_cannot_go_on_after_its_end(coatcheck):
    with pytest.raises(UsageError, match=r"`\.then`"):
        coatcheck.peer("search").replies(1).replies(2)
    with pytest.raises(UsageError, match="comes after an answer"):
        _ = coatcheck.peer("search").after(seconds=1).then
    with pytest.raises(UsageError, match="needs the value"):
        coatcheck.peer("search").replies()
    with pytest.raises(UsageError, match="one direction"):
        coatcheck.peer("search").after(seconds=-1)


async def test_app_and_fake_of_one_name_are_refused(coatcheck):
    coatcheck.peer("asker")
    with pytest.raises(UsageError, match="run the app, or fake it"):
        await coatcheck.run(app)

    async with Stage() as other:
        await other.run(app)
        with pytest.raises(UsageError, match="is an app that runs on this stage"):
            other.peer("asker")


async def test_what_a_silent_peer_keeps_waiting_says_so(coatcheck):
    coatcheck.peer("search").never()
    await coatcheck.run(app)
    ticket = await coatcheck.submit("asker", ["a"], task="ask")

    with pytest.raises(Stuck, match=r"a reply of peer\('search'\) to 'search', and it was told never to answer"):
        await ticket.result()
