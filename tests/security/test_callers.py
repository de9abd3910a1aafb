"""Who asked is kept with the task as subject and claims, on every replica; the token is kept nowhere."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.docs.pages import block_run_by
from tests.docs.test_snippets import run_block
from tests.flow.harness import PATIENCE_S, Rig, until
from tests.flow.outages import listen, only_task
from tests.flow.test_bad_input import dead_letters

from coatcheck.broker import Message, connect
from coatcheck.broker.bodies import DEFAULT_LIMITS
from coatcheck.cli.dead import read_letters, redrive_letters
from coatcheck.store import TaskState
from coatcheck.worker import App, Caller, Client, Context, TaskFailed, TransientError, Unauthorized
from coatcheck.worker.app import find_caller

TOKEN = "t0ken-of-alice-41c7"
BEARER = {"authorization": f"Bearer {TOKEN}"}


def identify(token: str | None) -> Caller:
    """Tokens are `….NAME`; anything else is refused."""
    if token is None:
        raise Unauthorized("this service wants a token")
    if token == TOKEN:
        return Caller("alice", {"tenant": "north", "roles": ["reader"]})
    if token.startswith("t0ken-of-"):
        return Caller(token.split("-")[2])
    raise KeyError(token)


def waiting(service: str, peer: str, hook: Callable[..., Any] = identify) -> App:
    app = App(service, identify=hook)

    @app.task
    async def who(ctx: Context, topic: str) -> Any:
        await ctx.call(peer, topic)
        return None if ctx.caller is None else [ctx.caller.subject, ctx.caller.claims]

    @app.task
    async def at_once(ctx: Context) -> Any:
        return None if ctx.caller is None else ctx.caller.subject

    return app


async def everything_stored(rig: Rig) -> str:
    sql = await rig.sql()
    found = [
        str(dict(row))
        for table in ("task", "call", "journal")
        for row in await sql.fetch(f"SELECT * FROM coatcheck.{table}")
    ]
    return "\n".join(found)


async def test_caller_is_known_after_a_resume_on_another_replica_and_the_token_is_stored_nowhere(rig: Rig):
    heard = listen(rig)
    peer, requester, service = await rig.peer(), await rig.requester(), rig.names.new()
    first = await rig.replica(waiting(service, peer.queue))
    asked_for = await requester.send(service, "owls", type="who", headers=BEARER)
    [question] = await peer.asked()
    task = await only_task(rig.store, TaskState.PARKED)
    first.stop()
    await rig.replica(waiting(service, peer.queue))
    await question.reply(None)
    answer = await requester.reply(asked_for)

    assert answer == ["alice", {"tenant": "north", "roles": ["reader"]}]
    assert task.caller == Caller("alice", {"tenant": "north", "roles": ["reader"]})
    assert TOKEN not in await everything_stored(rig)
    assert "authorization" not in question.message.headers  # and peers hear nothing of it
    assert not [name for name in question.message.headers if "subject" in name or "caller" in name]
    assert TOKEN not in str(heard._entries)


async def test_without_a_hook_the_token_is_not_read(rig: Rig):
    peer, requester = await rig.peer(), await rig.requester()
    app = App(rig.names.new())

    @app.task
    async def who(ctx: Context, topic: str) -> Any:
        await ctx.call(peer.queue, topic)
        return ctx.caller

    await rig.replica(app)
    asked_for = await requester.send(app.service, "owls", headers={"authorization": "no bearer, not even text" + TOKEN})
    [question] = await peer.asked()
    stored = await everything_stored(rig)
    await question.reply(None)

    assert await requester.reply(asked_for) is None
    assert TOKEN not in stored


async def test_token_is_stored_only_if_the_app_asks_for_it(rig: Rig):
    peer, requester = await rig.peer(), await rig.requester()
    app = waiting(rig.names.new(), peer.queue, lambda token: Caller("alice", {"token": token}))
    await rig.replica(app)
    asked_for = await requester.send(app.service, "owls", type="who", headers=BEARER)
    [question] = await peer.asked()
    await question.reply(None)

    assert await requester.reply(asked_for) == ["alice", {"token": TOKEN}]


REFUSED = {
    "no token": (None, "this service wants a token"),
    "another scheme": ("Basic YWxpY2U6eA==", "authorization must be `Bearer` and a token"),
    "a token the hook stumbles over": ("Bearer unknown-7d", "the caller was not accepted (KeyError)"),
    "no text": (4711, "authorization is a int; it must be text"),
    "too long": ("Bearer " + "x" * 20_000, "authorization has 20007 characters; the limit is 16384"),
}


@pytest.mark.parametrize(("header", "detail"), REFUSED.values(), ids=REFUSED.keys())
async def test_caller_who_is_not_accepted_gets_a_final_reply_and_leaves_no_row(rig: Rig, header: Any, detail: str):
    requester = await rig.requester()
    app = waiting(rig.names.new(), "nobody")
    await rig.replica(app)

    asked_for = await requester.send(app.service, "owls", headers={} if header is None else {"authorization": header})
    problem = await requester.reply(asked_for)

    assert {name: problem[name] for name in ("code", "status", "retryable", "detail")} == {
        "code": "unauthorized", "status": 401, "retryable": False, "detail": detail,
    }  # fmt: skip
    assert await rig.store.list_tasks() == []
    assert await rig.depth(app.names.dead) == 0


async def test_refused_request_that_nobody_can_be_told_of_is_buried_without_its_token(rig: Rig):
    requester = await rig.requester()
    app = waiting(rig.names.new(), "nobody")
    await rig.replica(app)

    await requester.send(app.service, "owls", reply_to=None, headers={"authorization": "Bearer unknown-7d"})
    [letter] = await dead_letters(rig, app.names.dead, 1)

    assert letter.headers["cc-reason"] == "unauthorized"
    assert "unknown-7d" not in json.dumps(dict(letter.headers), default=str)
    assert await rig.store.list_tasks() == []


@pytest.mark.parametrize("state", ["waiting", "ended"])
async def test_same_identity_from_another_caller_is_a_conflict_and_sees_nothing(rig: Rig, state: str):
    peer, requester = await rig.peer(), await rig.requester()
    app = waiting(rig.names.new(), peer.queue)
    await rig.replica(app)
    mine = await requester.send(app.service, "owls", type="who", headers=BEARER | {"cc-id": "order-1"})
    [question] = await peer.asked()
    if state == "ended":
        await question.reply(None)
        await requester.reply(mine)

    mallory = {"authorization": "Bearer t0ken-of-mallory", "cc-id": "order-1"}
    theirs = await requester.send(app.service, "owls", type="who", headers=mallory)
    problem = await requester.reply(theirs)
    if state == "waiting":
        await question.reply(None)
    again = await requester.send(app.service, "owls", type="who", headers=BEARER | {"cc-id": "order-1"})

    assert problem["code"] == "identity_conflict"
    assert "another caller" in problem["detail"]
    assert "alice" not in json.dumps(problem)
    assert (await requester.reply(again))[0] == "alice"  # the same caller, with the same or another token
    assert len(requester.finals(theirs)) == 1


async def test_two_callers_at_once_do_not_share_a_run(rig: Rig):
    """Before there is a row: the second must not become a follower of the first."""
    requester, going = await rig.requester(), asyncio.Event()
    app = App(rig.names.new(), identify=identify)

    @app.task
    async def slow(ctx: Context, topic: str) -> str:
        await going.wait()
        assert ctx.caller is not None
        return ctx.caller.subject

    worker = await rig.replica(app)
    mine = await requester.send(app.service, "owls", headers=BEARER | {"cc-id": "order-1"})
    await until(lambda: metric_running(worker) == 1, what="the first one runs")
    theirs = await requester.send(
        app.service, "owls", headers={"authorization": "Bearer t0ken-of-mallory", "cc-id": "order-1"}
    )
    problem = await requester.reply(theirs)
    going.set()

    assert problem["code"] == "identity_conflict"
    assert await requester.reply(mine) == "alice"


def metric_running(worker: Any) -> float:
    return worker.metrics.registry.get_sample_value("coatcheck_tasks_running") or 0.0


async def test_accepted_request_that_comes_back_stays_accepted_when_its_token_has_expired(rig: Rig):
    """The replica that accepted it loses its connection for good; the next one gets the request again."""
    requester, service = await rig.requester(), rig.names.new()
    began, is_expired = asyncio.Event(), False

    def expiring(token: str | None) -> Caller:
        if is_expired:
            raise Unauthorized("expired")
        return identify(token)

    app = App(service, identify=expiring)
    going = asyncio.Event()

    async def mark() -> None:
        began.set()

    @app.task
    async def slow(ctx: Context, topic: str) -> str:
        await ctx.step(mark, key="mark")  # makes the row
        await going.wait()
        assert ctx.caller is not None
        return ctx.caller.subject

    first = await rig.replica(app, grace=0)
    asked_for = await requester.send(service, "owls", headers=BEARER)
    async with asyncio.timeout(PATIENCE_S):
        await began.wait()
    is_expired = True
    first.stop()  # without grace: its request goes back to the queue
    await rig.replica(app)
    going.set()

    assert await requester.reply(asked_for) == "alice"
    refused = await requester.send(service, "owls", headers=BEARER)
    assert (await requester.reply(refused))["code"] == "unauthorized"


def counting(service: str, peer: str, entered: list[str], *, hook: Callable[..., Any] = identify) -> App:
    """An app whose handler says whom it runs for before it does anything durable."""
    app = App(service, identify=hook)

    @app.task
    async def who(ctx: Context, topic: str) -> str:
        assert ctx.caller is not None
        entered.append(ctx.caller.subject)
        await ctx.call(peer, topic)
        return ctx.caller.subject

    return app


@pytest.mark.parametrize("state", ["running without a row", "parked", "ended"])
async def test_repeat_without_a_token_runs_nothing_and_learns_nothing(rig: Rig, state: str):
    """It has all that a stranger can have learnt: identity, body, and the address of the first."""
    peer, requester, entered = await rig.peer(), await rig.requester(), list[str]()
    app, going = counting(rig.names.new(), peer.queue, entered), asyncio.Event()

    @app.task
    async def slow(ctx: Context, topic: str) -> str:
        entered.append("alice")
        await going.wait()
        return "alice"

    await rig.replica(app)
    known = {"type": "slow" if state == "running without a row" else "who", "correlation_id": "order-1"}
    asked_for = await requester.send(app.service, "owls", headers=BEARER | {"cc-id": "order-1"}, **known)
    await until(lambda: entered, what="the handler runs")
    question = None if known["type"] == "slow" else (await peer.asked())[0]
    if state == "ended" and question is not None:
        await question.reply(None)
        await requester.reply(asked_for)

    run_count, answer_count = len(entered), len(requester.finals(asked_for))

    # The address of the first one, none at all, and one of the stranger's own.
    await requester.send(app.service, "owls", headers={"cc-id": "order-1"}, **known)
    await requester.send(app.service, "owls", headers={"cc-id": "order-1"}, reply_to=None, **known)
    own = await requester.send(app.service, "owls", headers={"cc-id": "order-1"}, **known | {"correlation_id": "mine"})
    refusals = [await requester.reply(own), await requester.reply(asked_for, count=answer_count + 1)]
    [letter] = await dead_letters(rig, app.names.dead, 1)
    assert len(entered) == run_count
    going.set()
    if state == "parked" and question is not None:
        await question.reply(None)
    await until(lambda: len(requester.finals(asked_for)) == 2, what="the answer, beside the refusal of the copy")

    assert [each["code"] for each in refusals] == ["unauthorized"] * 2
    assert letter.headers["cc-reason"] == "unauthorized"
    assert "alice" in [json.loads(each.body) for each in requester.finals(asked_for)]
    assert len(requester.finals(own)) == 1


async def test_new_request_without_a_token_that_came_back_is_refused(rig: Rig):
    """It was never accepted, so its token is looked at as if it were new."""
    requester, tries = await rig.requester(), list[str | None]()

    def unsure(token: str | None) -> Caller:
        tries.append(token)
        if len(tries) == 1:
            raise TransientError("the server with the keys is away")
        return identify(token)

    app = waiting(rig.names.new(), "nobody", unsure)
    await rig.replica(app)

    asked_for = await requester.send(app.service, "owls", type="who", headers={"cc-id": "order-1"})

    assert (await requester.reply(asked_for))["code"] == "unauthorized"
    assert tries == [None, None]
    assert await rig.store.list_tasks() == []


@pytest.mark.parametrize("state", ["running", "parked", "ended"])
async def test_copy_without_a_token_that_came_back_takes_no_run_over(rig: Rig, state: str):
    """The broker says that it came back, for the hook could not tell at first. It does not say who sent it."""
    peer, requester, entered = await rig.peer(), await rig.requester(), list[str]()
    tries, began, going = list[str | None](), asyncio.Event(), asyncio.Event()

    def unsure(token: str | None) -> Caller:
        tries.append(token)
        if token is None and tries.count(None) == 1:
            raise TransientError("the server with the keys is away")
        return identify(token)

    app = counting(rig.names.new(), peer.queue, entered, hook=unsure)

    async def mark() -> None:
        began.set()
        await going.wait()

    @app.task
    async def slow(ctx: Context, topic: str) -> str:
        entered.append("alice")
        await ctx.step(mark, key="mark")  # makes the row
        return "alice"

    first, second = [await rig.replica(app, request_prefetch=1) for _ in range(2)]  # one each: a copy goes to the other
    known = {"type": "slow" if state == "running" else "who", "correlation_id": "order-1"}
    await requester.send(app.service, "owls", headers=BEARER | {"cc-id": "order-1"}, **known)
    question = None if state == "running" else (await peer.asked())[0]
    if question is None:
        async with asyncio.timeout(PATIENCE_S):
            await began.wait()
    elif state == "ended":
        await question.reply(None)
        await requester.reply("order-1")
    entered_before = len(entered)

    await requester.send(app.service, "owls", headers={"cc-id": "order-1"}, **known)
    await until(lambda: tries.count(None) == 2, what="it came back")
    await until(lambda: first.is_idle + second.is_idle == (1 if state == "running" else 2), what="it is settled")

    assert len(entered) == entered_before
    [task] = await rig.store.list_tasks()
    assert state != "running" or (task.epoch, task.pickups) == (1, 1)
    going.set()
    if state == "parked" and question is not None:
        await question.reply(None)
    assert await requester.reply("order-1") == "alice"
    await until(lambda: first.is_idle and second.is_idle, what="all is settled")
    assert {json.loads(each.body) for each in requester.finals("order-1")} == {"alice"}


async def test_hook_that_cannot_tell_now_is_asked_again(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("coatcheck.worker.requests.LONGEST_UNKNOWN_CALLER_PAUSE_S", 0.01)
    requester, tries = await rig.requester(), []

    async def away(token: str | None) -> Caller:
        tries.append(token)
        if len(tries) < 8:  # more often than a surprise is tried
            raise TransientError("the server with the keys is away")
        return identify(token)

    app = waiting(rig.names.new(), "nobody", away)
    await rig.replica(app)

    asked_for = await requester.send(app.service, None, type="at_once", headers=BEARER)

    assert await requester.reply(asked_for) == "alice"
    assert tries == [TOKEN] * 8


async def test_client_says_who_asks(rig: Rig):
    app = waiting(rig.names.new(), "nobody")
    await rig.replica(app)
    async with Client(rig.settings) as client:
        assert await client.call(app.service, task="at_once", token=TOKEN, timeout=20) == "alice"
        ticket = await client.submit(app.service, task="at_once", token="t0ken-of-bob")
        assert await ticket.result(20) == "bob"
        with pytest.raises(TaskFailed) as caught:
            await client.call(app.service, task="at_once", timeout=20)

    assert caught.value.code == "unauthorized"


async def test_redriven_request_has_lost_its_token(rig: Rig):
    requester = await rig.requester()
    app = waiting(rig.names.new(), "nobody")
    await rig.replica(app)
    asked_for = await requester.send(app.service, None, raw=b"{", headers=BEARER)
    assert (await requester.reply(asked_for))["code"] == "malformed_message"
    async with connect(rig.settings.broker) as broker:
        [letter] = await read_letters(broker, app.service, limit=10)
        assert "authorization" not in letter.message.headers
        assert await redrive_letters(broker, [letter]) == [None]


BAD_CALLERS: dict[str, Any] = {
    "not a caller": "alice",
    "no subject": Caller(""),
    "a subject that is no text": Caller(4711),  # type: ignore[arg-type]
    "a long subject": Caller("x" * 256),
    "a NUL in the subject": Caller("a\0b"),
    "a lone surrogate": Caller("\ud800"),
    "claims JSON cannot hold": Caller("alice", {"a": object()}),
    "claims that are no object": Caller("alice", ["a"]),  # type: ignore[arg-type]
    "a NUL in the claims": Caller("alice", {"a": "\0"}),
    "large claims": Caller("alice", {"a": "x" * 16_384}),
}


@pytest.mark.parametrize("caller", BAD_CALLERS.values(), ids=BAD_CALLERS.keys())
async def test_caller_that_no_row_can_hold_is_refused(caller: Any):
    with pytest.raises(Unauthorized, match=r"the caller was not accepted \(UsageError\)"):
        await find_caller(lambda token: caller, Message(headers=BEARER), DEFAULT_LIMITS)


async def test_largest_caller_that_a_row_can_hold_passes():
    caller = Caller("x" * 255, {"a": "x" * (16 * 1024 - len('{"a":""}'))})

    assert await find_caller(lambda token: caller, Message(), DEFAULT_LIMITS) == caller


async def test_the_hook_on_the_page_tells_callers_apart():
    page = run_block(block_run_by("test_the_hook_on_the_page_tells_callers_apart", "python"))
    signature = hmac.new(page.SECRET, b"alice", hashlib.sha256).hexdigest()

    assert page.app.identify(f"alice.{signature}") == Caller("alice", {"may_publish": True})
    for token in (None, "", "alice", f"mallory.{signature}", f"alice.{uuid.uuid4().hex}"):
        with pytest.raises(Unauthorized):
            page.app.identify(token)
    assert set(page.app.handlers) == {"research"}


async def test_claims_are_what_any_replica_will_read_from_the_row() -> None:
    given = Caller("ada", {"exp": datetime(2030, 1, 1, tzinfo=UTC), "roles": ("admin",)})

    found = await find_caller(lambda _: given, Message(), DEFAULT_LIMITS)

    assert found == Caller("ada", {"exp": "2030-01-01T00:00:00Z", "roles": ["admin"]})
