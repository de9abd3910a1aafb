from __future__ import annotations

import asyncio
import re
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest

from coatcheck.errors import (
    BrokerUnavailable,
    CallFailed,
    CallTimedOut,
    InvalidArguments,
    InvalidSettings,
    JournalMismatch,
    MalformedMessage,
    StoreUnavailable,
    TaskCancelled,
    UnknownHandler,
)
from coatcheck.worker import retry
from coatcheck.worker.problems import CODES, Code, describe_codes, problem, problem_of, traceback_of

DOCS = Path(__file__).parents[2] / "docs" / "errors.md"


def test_code_of_ours_brings_title_status_and_retryable():
    assert problem("no_route", detail="queue `search` does not exist", peer="search", region=None) == {
        "type": "urn:coatcheck:problem:no_route",
        "title": "The queue of the peer does not exist",
        "status": 502,
        "detail": "queue `search` does not exist",
        "code": "no_route",
        "retryable": True,
        "peer": "search",
    }


def test_given_members_win():
    document = problem(Code.NO_ROUTE, "Gone", status=404, retryable=False)

    assert (document["title"], document["status"], document["retryable"]) == ("Gone", 404, False)
    assert type(document["code"]) is str


def test_code_of_others_is_about_blank_and_its_own_title():
    assert problem("card_declined", status=402) == {
        "type": "about:blank",
        "title": "Card declined",
        "status": 402,
        "code": "card_declined",
        "retryable": True,
    }


@pytest.mark.parametrize(
    ("error", "code", "retryable"),
    [
        (ValueError("x"), Code.HANDLER_FAILED, True),
        (InvalidArguments("x"), Code.INVALID_ARGUMENTS, False),
        (UnknownHandler("x"), Code.UNKNOWN_HANDLER, False),
        (JournalMismatch("x"), Code.JOURNAL_MISMATCH, False),
        (InvalidSettings("x"), Code.PROGRAM_ERROR, False),
        (MalformedMessage("bad", "x"), Code.MALFORMED_MESSAGE, False),
        (StoreUnavailable("x"), Code.UNAVAILABLE, True),
        (BrokerUnavailable("x"), Code.UNAVAILABLE, True),
        (asyncio.CancelledError(), Code.CANCELLED, False),
        (TaskCancelled("x"), Code.HANDLER_FAILED, True),
        (CallFailed("x", problem={"retryable": False}), Code.HANDLER_FAILED, False),
        (CallTimedOut("x"), Code.HANDLER_FAILED, True),
        (ExceptionGroup("x", [ValueError()]), Code.HANDLER_FAILED, True),
    ],
)
def test_problem_of_an_exception(error, code, retryable):
    task_id = uuid4()

    document = problem_of(error, task_id, 2)

    assert document["code"] == code
    assert document["status"] == CODES[code].status
    assert document["retryable"] is retryable
    assert document["exception"] == type(error).__name__
    assert (document["task_id"], document["attempt"]) == (str(task_id), 2)
    assert document["detail"]
    assert msgspec.json.decode(msgspec.json.encode(document)) == document


def test_policy_has_the_last_word_on_retryable():
    assert problem_of(ValueError("x"), retryable=False)["retryable"] is False


def test_step_has_its_own_code():
    document = problem_of(KeyError("x"), code=Code.STEP_FAILED)

    assert (document["code"], document["exception"]) == ("step_failed", "KeyError")
    assert "task_id" not in document


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            CallFailed("x", problem={"code": "busy", "exception": "Busy", "detail": "d"}),
            {"code": "busy", "exception": "Busy"},
        ),
        (CallTimedOut("x"), {"code": "timed_out"}),
        (CallFailed("x"), None),
        (ValueError("x"), None),
    ],
)
def test_failure_let_through_is_named_as_the_cause(error, cause):
    assert problem_of(error).get("cause") == cause


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (ValueError(), "ValueError"),
        (ValueError("cannot reach amqp://u:hunter2@h/"), "cannot reach amqp://u:***@h/"),
        (ValueError("\ud800"), "\\ud800"),
        (ValueError("x" * 5000), "x" * 2000 + "…"),
        (Unprintable(), "(Unprintable has no text: its __str__ raises)"),
    ],
)
def test_detail_is_short_printable_and_without_passwords(error, detail):
    assert problem_of(error)["detail"] == detail


# --- tracebacks ---


def _caught(function) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any will do
        function()
    return caught.value


def _through_our_code() -> None:
    def random() -> float:
        secret = "s3cret"
        raise ValueError(f"{len(secret)} letters")

    retry.Retry().delay(1, random=random)


def test_traceback_keeps_the_users_frames_and_drops_ours():
    text = traceback_of(_caught(_through_our_code))

    assert "in _through_our_code" in text
    assert "in random" in text
    assert "retry.py" not in text
    assert text.endswith("ValueError: 6 letters\n")


def test_traceback_of_a_fault_of_ours_keeps_our_frames():
    error = _caught(lambda: retry.Retry().delay(0))
    frames = error.__traceback__
    while frames is not None and not frames.tb_frame.f_code.co_filename.endswith("retry.py"):
        frames = frames.tb_next
    error.__traceback__ = frames  # as if nobody had called us

    assert "retry.py" in traceback_of(error)


def test_traceback_shows_causes_and_groups_and_no_local_values():
    def fail() -> None:
        password = "hunter2"
        try:
            dict[int, int]()[len(password)]
        except KeyError as error:
            raise ExceptionGroup("both", [ValueError("first"), _caught(_through_our_code)]) from error

    text = traceback_of(_caught(fail))

    for part in ("KeyError: 7", "ExceptionGroup: both", "ValueError: first", "6 letters"):
        assert part in text
    assert "retry.py" not in text
    assert "password = '" not in text


def test_long_traceback_loses_its_middle_and_passwords():
    text = traceback_of(ValueError("amqp://u:hunter2@h/ " + "x" * 50_000 + " the end"))

    assert len(text) < 17_000
    assert "hunter2" not in text
    assert "left out" in text
    assert text.endswith("the end\n")


# --- documentation ---


def test_every_code_is_described():
    assert set(CODES) == set(Code)
    assert all(400 <= info.status < 600 for info in CODES.values())


def test_documented_table_is_the_one_in_the_code():
    found = re.search(r"<!-- codes:.*?-->\n(.*)<!-- /codes -->", DOCS.read_text(encoding="utf-8"), re.DOTALL)

    assert found is not None
    assert found[1] == describe_codes()
