"""No payload and no secret in logs, errors, dead letters' headers or `repr`s, at the lowest level too."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiormq
import pamqp.frame
import pytest
from aiormq.abc import ChannelFrame
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader
from rich.pretty import pretty_repr
from tests.cli.kit import Cli
from tests.flow.harness import Asked, Process, Rig
from tests.flow.test_bad_input import dead_letters
from tests.security.leaky import LOCAL, MARK

from coatcheck.broker import Message, Outgoing, connect
from coatcheck.errors import BrokerUnavailable, InvalidSettings
from coatcheck.store import Store, Task, TaskState
from coatcheck.store.rows import Birth, Caller, TaskId
from coatcheck.worker import Settings
from coatcheck.worker.engine.run_port import Finished
from coatcheck.worker.executor import TaskEnd

SECRET = "hUnTeR2-9b"
OUTCOMES = {
    "everything": None,
    "fails": "handler_failed",
    "step_fails": "handler_failed",
    "call_fails": "handler_failed",
    "wrong_reply": "handler_failed",
    "unsendable": "program_error",
    "bad_timer": "program_error",
    "orders": "invalid_arguments",
    "two": "invalid_arguments",
}


@pytest.fixture
async def leaky(rig: Rig) -> Process:
    """The service of leaky.py as a process that logs at debug level; its peer sends marks back."""
    peer = await rig.peer()
    peer.answer = answer
    service = rig.names.new()
    started = await rig.worker_process(
        "tests.security.leaky:app",
        name=service,
        COATCHECK_LOG_LEVEL="debug",
        COATCHECK_STORE=rig.settings.store.replace("@", f":{SECRET}@"),
        COATCHECK_TEST_SERVICE=service,
        COATCHECK_TEST_PEER=peer.queue,
    )
    await rig.sweeper_process(COATCHECK_LOG_LEVEL="debug")
    return started


async def answer(asked: Asked) -> None:
    if asked.message.reply_to is None:
        return
    await asked.progress(1, 2)
    if isinstance(asked.body, dict):
        await asked.reply({"answer": MARK})
    elif isinstance(asked.body, list):
        await asked.reply(MARK)
    else:
        await asked.fail(f"refused: {MARK}", code="peer_says_no", more={"value": MARK})


def printed(rig: Rig) -> str:
    return "\n".join(line for process in rig.processes for line in process.output)


async def test_worker_writes_no_payload_and_no_secret_into_its_log(rig: Rig, leaky: Process):
    await run_every_handler(rig, leaky)
    await bury_bad_messages(rig, leaky)
    await bury_unreadable_properties(rig, leaky)
    leaky.terminate()
    assert await leaky.wait() == 0
    await leaky.logged("worker_stopped")

    text = printed(rig)
    for event in ("task_parked", "task_resumed", "task_failed", "attempt_failed", "request_refused", "swept"):
        assert f'"event":"{event}"' in text
    assert MARK not in text
    assert SECRET not in text
    assert LOCAL not in text


async def run_every_handler(rig: Rig, leaky: Process) -> None:
    """Each way to succeed and to fail. Requesters and rows get the texts of exceptions; nobody gets variables."""
    requester, service = await rig.requester(), leaky.name
    bodies: dict[str, Any] = dict.fromkeys(OUTCOMES, MARK)
    bodies |= {"orders": {"number": MARK}, "two": {MARK: 1, "first": MARK}}
    asked = {
        name: await requester.send(service, body, type=name, headers={"authorization": f"Bearer good-{SECRET}"})
        for name, body in bodies.items()
    }
    replies = {name: await requester.reply(correlation_id) for name, correlation_id in asked.items()}
    refused = await requester.send(service, MARK, headers={"authorization": f"Bearer bad-{SECRET}"})
    unauthorized = await requester.reply(refused)

    codes = {name: None if name == "everything" else reply["code"] for name, reply in replies.items()}
    assert codes == OUTCOMES
    assert replies["everything"] == {"answer": {"answer": MARK}, MARK: MARK}
    assert unauthorized["code"] == "unauthorized"
    failed = {task.handler: task for task in await rig.task(TaskState.FAILED, 6)}
    assert f"RuntimeError: cannot do {MARK}" in (failed["fails"].traceback or "")  # the handler's own words
    assert 'raise RuntimeError(f"cannot do {value}")' in (failed["fails"].traceback or "")
    stored = "".join(task.traceback or "" for task in failed.values()) + json.dumps([replies, unauthorized])
    assert LOCAL not in stored
    assert SECRET not in stored
    # Where the code stands is for those who read the row; whoever asked is not told.
    assert "leaky.py" in (failed["unsendable"].traceback or "")
    assert "leaky.py" in (failed["bad_timer"].traceback or "")
    assert ".py" not in json.dumps([replies, unauthorized])


async def bury_bad_messages(rig: Rig, leaky: Process) -> None:
    """A dead letter has the body as it came, and nothing of it in its headers; a token it has lost."""
    requester, service = await rig.requester(), leaky.name
    marked = f'"{MARK}'.encode()
    token = {"authorization": f"Bearer {SECRET}"}
    bad: list[dict[str, Any]] = [
        {"raw": marked, "content_type": "application/json"},
        {"raw": b"\xff" + marked, "content_type": "text/plain"},
        {"raw": b"\xc0\x69" + MARK.encode(), "content_type": "application/cbor"},  # a date, it says
        {"raw": marked, "content_encoding": "gzip"},
        {"raw": marked * 200_000},
        {"raw": b"[" * 100 + marked + b'"' + b"]" * 100},
        {"raw": marked, "headers": {"cc-deadline": "soon"}},
    ]
    for each in bad:
        headers = each.pop("headers", {}) | token
        await requester.send(service, None, **({"reply_to": None, "headers": headers} | each))
    await requester.send(f"{service}.replies", MARK, headers=token)
    letters = await dead_letters(rig, f"{service}.dead", len(bad) + 1)

    assert all(MARK.encode() in letter.body for letter in letters)
    headers = json.dumps([dict(letter.headers) for letter in letters], default=str)
    assert MARK not in headers
    assert SECRET not in headers
    await leaky.logged("message_buried", count=len(letters))


async def bury_unreadable_properties(rig: Rig, leaky: Process) -> None:
    """Text that is not UTF-8: the driver's own complaint would quote all of it."""
    connection = await aiormq.connect(rig.settings.broker)
    channel = await connection.channel()
    properties = Basic.Properties(headers={"authorization": f"Bearer {SECRET}"}, correlation_id=f"{MARK}@@")
    frames = (
        Basic.Publish(routing_key=leaky.name),
        ContentHeader(body_size=1, properties=properties),
        ContentBody(b"x"),
    )
    payload = b"".join(pamqp.frame.marshal(frame, channel.number) for frame in frames)
    await connection.write_queue.put(ChannelFrame(payload=payload.replace(b"@@", b"\xff\xfe"), should_close=False))
    [letter] = await dead_letters(rig, f"{leaky.name}.dead", 1)
    await connection.close()

    assert letter.headers["cc-reason"] == "bad_properties"
    assert letter.headers["cc-broken"] == "UnicodeDecodeError"
    await leaky.logged("message_properties_undecodable")


# --- addresses ---


async def test_password_of_a_broker_that_refuses_us_is_nowhere(rig: Rig):
    url = rig.settings.broker.replace("guest:guest", f"guest:{SECRET}")
    process = await rig.process("worker", "tests.security.leaky:app", COATCHECK_BROKER=url, COATCHECK_LOG_LEVEL="debug")

    assert await process.wait() == 1
    assert "broker_connect_failed" in printed(rig)
    assert SECRET not in printed(rig)


UNREADABLE = [
    ("--broker", f"amqp://user:{SECRET}@127.0.0.1:1/"),
    ("--broker", f"amqp://user:a/{SECRET}@host/"),
    ("--broker", f"amqp:user:{SECRET}@host"),
    ("--broker", f"user:{SECRET}@host:5672"),
    ("--broker", f"amqp://user:{SECRET}@host:port/"),
    ("--store", f"postgresql://user:{SECRET}@127.0.0.1:1/db"),
    ("--store", f"postgresql://user@127.0.0.1:1/db?password={SECRET}"),
    ("--store", f"postgresql://user:a@{SECRET}@host/db"),
    ("--store", f"postgresql://user:{SECRET}@host:port/db"),
    ("--store", f"user:{SECRET}@host:5432/db"),
]


@pytest.mark.parametrize(("option", "url"), UNREADABLE)
def test_password_is_in_no_error_of_the_command_line(option: str, url: str, monkeypatch: pytest.MonkeyPatch):
    for module in ("dead", "doctor"):
        monkeypatch.setattr(f"coatcheck.cli.{module}.CONNECT_BUDGET", timedelta(seconds=0.1))
    command = ["ps"] if option == "--store" else ["dead", "ls", "research"]

    result = Cli({})(*command, option, url)
    told = Cli({})("doctor", option, url, "--json")

    assert result.exit_code in {1, 2}
    assert result.output.strip()
    assert SECRET not in result.output + told.output


async def test_password_is_in_no_exception_of_the_library():
    url = f"postgresql://user@127.0.0.1:1/db?password={SECRET}"
    store = Store(url, pool_size=1)
    with pytest.raises(Exception) as caught:  # noqa: PT011
        await store.ping()
    assert SECRET not in f"{caught.value!r} {store.place}"
    await store.close()

    with pytest.raises(BrokerUnavailable) as away:
        async with connect(f"amqp://user:{SECRET}@127.0.0.1:1/", connect_budget=0.1):
            pass
    assert SECRET not in repr(away.value)

    settings = Settings(broker=f"amqp://user:{SECRET}@host/", store=url)
    assert SECRET not in f"{settings!r} {settings.describe()}"
    for bad in (f"user:{SECRET}@host", f"http://user:{SECRET}@host"):
        with pytest.raises(InvalidSettings) as complaint:
            Settings(broker=bad)
        assert SECRET not in str(complaint.value)


# --- what a value looks like ---


def test_values_do_not_show_what_they_carry():
    message = Message(MARK.encode(), headers={"authorization": f"Bearer {SECRET}"}, correlation_id="1")
    birth = Birth(TaskId(None), "s", None, "1", MARK.encode(), b"", caller=Caller("alice", {"claim": MARK}))  # type: ignore[arg-type]

    values = [message, Outgoing("q", message), birth, TaskEnd(TaskState.DONE, MARK.encode()), Finished(MARK)]
    shown = " ".join(f"{value!r} {pretty_repr(value)}" for value in values)

    assert MARK not in shown
    assert SECRET not in shown
    assert "alice" in shown


def test_page_says_what_a_row_shows():
    task = Task(*[f"<{name}>" for name in Task.__struct_fields__])  # type: ignore[arg-type]
    fields = {name for name in Task.__struct_fields__ if f"<{name}>" not in repr(task)}

    assert fields == {"request", "value", "traceback"}
    assert "never values of variables" in Path("docs/security.md").read_text()
