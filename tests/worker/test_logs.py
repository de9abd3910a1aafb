from __future__ import annotations

import io
import json
import logging
import warnings
from datetime import datetime, timedelta

import pytest
import structlog

from coatcheck.broker.bodies import Body
from coatcheck.store.kinds import Kind
from coatcheck.worker import logs
from coatcheck.worker.engine.keys import Wanted
from coatcheck.worker.engine.work import CallWork
from coatcheck.worker.settings import LogFormat, LogLevel


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _logging_as_it_was():
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    levels = {name: logging.getLogger(name).level for name in logs.QUIET_LOGGERS}
    yield
    root.handlers, root.level = handlers, level
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)
    logging.captureWarnings(False)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines(stream: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_off_a_terminal_each_line_is_json_with_utc_time_and_bound_ids():
    stream = io.StringIO()
    logs.configure(stream=stream)

    with structlog.contextvars.bound_contextvars(task_id="t1", attempt=2):
        structlog.get_logger().info("reply_claimed", parked_s=3.2)
    structlog.get_logger().info("worker_started")

    first, second = lines(stream)
    stamp = datetime.fromisoformat(first.pop("timestamp"))
    assert stamp.utcoffset() == timedelta(0)
    assert first == {"event": "reply_claimed", "level": "info", "task_id": "t1", "attempt": 2, "parked_s": 3.2}
    assert "task_id" not in second


def test_on_a_terminal_lines_are_for_people():
    stream = Terminal()
    logs.configure(stream=stream)

    structlog.get_logger().info("worker_started", service="research")

    assert "worker_started" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


def test_format_and_level_can_be_chosen():
    stream = Terminal()
    logs.configure(LogFormat.JSON, LogLevel.WARNING, stream)

    structlog.get_logger().info("unheard")
    structlog.get_logger().warning("heard")

    assert [line["event"] for line in lines(stream)] == ["heard"]


def call(body: object) -> CallWork:
    """What `ctx.call("pay", body)` gives a handler."""
    wanted = Wanted("pay", kind=Kind.CALL, name="pay", digest=b"")
    hour = timedelta(hours=1)
    work = CallWork(None, wanted, peer="pay", body=body, handler=None, idle=None, hard=hour, retry=None, returns=None)  # type: ignore[arg-type]
    work.begin()
    return work


def loop() -> list[object]:
    held: list[object] = ["hunter2"]
    held.append(held)
    return held


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"broker": "amqp://u:hunter2@h/"}, {"broker": "amqp://u:***@h/"}),
        (
            {"nested": {"url": "amqp://u:hunter2@h/", "token": "hunter2"}},
            {"nested": {"url": "amqp://u:***@h/", "token": "***"}},
        ),
        ({"password": "hunter2"}, {"password": "***"}),
        ({"raw": b"hunter2"}, {"raw": "<7 bytes>"}),
        ({"body": {"card": "hunter2"}}, {"body": "<withheld dict>"}),
        ({"payload": "hunter2"}, {"payload": "<withheld str>"}),
        ({"error": OSError("amqp://u:hunter2@h/")}, {"error": "OSError('amqp://u:***@h/')"}),
        ({"urls": ["amqp://u:hunter2@h/", b"hunter2"]}, {"urls": ["amqp://u:***@h/", "<7 bytes>"]}),
        ({"reply": Body.of("hunter2")}, {"reply": "Body(json, 9 bytes)"}),
        ({"works": (call("hunter2"),)}, {"works": ["<ctx.call('pay') key='pay'>"]}),
        ({"loop": loop(), "n": 1}, {"loop": "<list>", "n": 1}),
        ({"thing": 1 + 2j}, {"thing": "(1+2j)"}),
        ({"odd": "\ud800"}, {"odd": "'\\ud800'"}),
    ],
)
def test_payloads_and_secrets_stay_out(given, expected):
    stream = io.StringIO()
    logs.configure(stream=stream)

    structlog.get_logger().info("told", **given)

    (line,) = lines(stream)
    assert {name: line[name] for name in expected} == expected
    assert "hunter2" not in stream.getvalue()


@pytest.mark.parametrize("log_format", LogFormat)
def test_traceback_shows_no_local_values_and_no_passwords(log_format):
    stream = io.StringIO()
    logs.configure(log_format, stream=stream)

    try:
        password = "".join(["hun", "ter2"])
        raise ValueError(f"amqp://u:{password}@h/")
    except ValueError:
        structlog.get_logger().exception("handler_failed")

    assert "ValueError" in stream.getvalue()
    assert "amqp://u:***@h/" in stream.getvalue()
    assert "hunter2" not in stream.getvalue()


def test_libraries_are_heard_from_warning_on_in_the_same_form():
    stream = io.StringIO()
    logs.configure(stream=stream)

    with structlog.contextvars.bound_contextvars(task_id="t1"):
        for name in logs.QUIET_LOGGERS:
            logging.getLogger(name).info("chatter")
            logging.getLogger(f"{name}.inner").warning("cannot reach %s", "amqp://u:hunter2@h/")
    logging.getLogger("of_the_user").info("hello")

    found = lines(stream)
    assert [line["logger"] for line in found] == [*(f"{name}.inner" for name in logs.QUIET_LOGGERS), "of_the_user"]
    assert found[0]["event"] == "cannot reach amqp://u:***@h/"
    assert (found[0]["level"], found[0]["task_id"]) == ("warning", "t1")
    assert "timestamp" in found[0]


def test_python_warnings_are_logged():
    stream = io.StringIO()
    logs.configure(stream=stream)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("the variable COATCHECK_X has no effect", UserWarning, stacklevel=1)

    assert "COATCHECK_X has no effect" in lines(stream)[0]["event"]


def test_configuring_again_replaces_what_was_there():
    first, second = io.StringIO(), io.StringIO()
    log = structlog.get_logger()
    logs.configure(stream=first)
    log.info("one")

    logs.configure(stream=second)
    log.info("two")
    logging.getLogger("x").warning("three")

    assert [line["event"] for line in lines(first)] == ["one"]
    assert [line["event"] for line in lines(second)] == ["two", "three"]
