from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.errors import (
    CallFailed,
    CallTimedOut,
    InvalidArguments,
    InvalidSettings,
    JournalMismatch,
    MalformedMessage,
    StepFailed,
    StoreUnavailable,
)
from coatcheck.worker.retry import Backoff, Retry


def _never() -> float:
    return 0.0


def _failed(cause: BaseException | None = None, **problem: object) -> StepFailed:
    error = StepFailed("the step failed", problem=problem)
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("attempt", "expected_s"), [(1, 1), (2, 2), (3, 4), (4, 8), (9, 256), (10, 300), (11, 300), (100_000, 300)]
)
def test_default_delay_doubles_up_to_five_minutes(attempt, expected_s):
    assert Retry().delay(attempt, random=_never) == timedelta(seconds=expected_s)


@pytest.mark.parametrize("backoff", [5, 5.0, timedelta(seconds=5)])
def test_plain_backoff_is_that_very_delay_each_time(backoff):
    policy = Retry(backoff=backoff)

    assert [policy.delay(attempt) for attempt in (1, 2, 50)] == [timedelta(seconds=5)] * 3


@given(
    attempt=st.integers(1, 5000),
    factor=st.floats(1, 1000),
    jitter=st.floats(0, 1),
    initial_s=st.floats(0, 600),
    more_s=st.floats(0, 600),
    drawn=st.floats(0, 1, exclude_max=True),
)
def test_delay_stays_between_jittered_and_maximum(*, attempt, factor, jitter, initial_s, more_s, drawn):
    initial, maximum = timedelta(seconds=initial_s), timedelta(seconds=initial_s + more_s)
    backoff = Backoff(initial=initial, factor=factor, maximum=maximum, jitter=jitter)

    delay = backoff.delay(attempt, random=lambda: drawn)

    rounding = timedelta(microseconds=1)
    assert initial * (1 - jitter) - rounding <= delay <= maximum + rounding
    assert backoff.delay(attempt + 1, random=lambda: drawn) >= delay - rounding


def test_attempts_are_counted_from_one():
    with pytest.raises(ValueError, match="from 1"):
        Retry().delay(0)


@pytest.mark.parametrize(
    ("kind", "fields", "text"),
    [
        (Retry, {"attempts": 0}, r"Retry\.attempts=0 .*at least 1"),
        (Retry, {"attempts": True}, r"Retry\.attempts=True"),
        (Retry, {"attempts": 2.5}, r"Retry\.attempts=2\.5"),
        (Retry, {"backoff": -1}, r"Retry\.backoff=-1"),
        (Retry, {"backoff": float("nan")}, r"Retry\.backoff=nan"),
        (Retry, {"backoff": float("inf")}, r"Retry\.backoff=inf"),
        (Retry, {"backoff": True}, r"Retry\.backoff=True"),
        (Retry, {"backoff": timedelta(seconds=-1)}, r"Retry\.backoff=.*negative"),
        (Retry, {"backoff": "5"}, r"Retry\.backoff='5'"),
        (Retry, {"non_retryable": ValueError}, "must be a tuple"),
        (Retry, {"non_retryable": (int,)}, "exception types"),
        (Retry, {"non_retryable": ("",)}, "exception types"),
        (Backoff, {"initial": 5}, r"Backoff\.initial=5 must be a timedelta"),
        (Backoff, {"initial": timedelta(minutes=10)}, r"Backoff\.maximum=0:05:00 is shorter"),
        (Backoff, {"factor": 0.5}, r"Backoff\.factor=0\.5 .*at least 1"),
        (Backoff, {"jitter": 1.5}, r"Backoff\.jitter=1\.5 .*between 0 and 1"),
    ],
)
def test_bad_policy_is_refused_with_field_value_and_limit(kind, fields, text):
    with pytest.raises(InvalidSettings, match=text):
        kind(**fields)


GROUP = ExceptionGroup("none", [CallFailed("no", problem={"retryable": False}), CallTimedOut("late")])


@pytest.mark.parametrize(
    ("non_retryable", "error", "expected"),
    [
        ((), ValueError("x"), True),
        ((), StoreUnavailable("x"), True),
        ((), CallTimedOut("x"), True),
        ((), CallFailed("x", problem={"retryable": False}), False),
        ((), CallFailed("x", problem={"retryable": True}), True),
        ((), JournalMismatch("x"), False),
        ((), InvalidArguments("x"), False),
        ((), MalformedMessage("bad", "x"), False),
        ((), asyncio.CancelledError(), False),
        ((), KeyboardInterrupt(), False),
        ((LookupError,), KeyError("x"), False),
        ((LookupError,), ValueError("x"), True),
        (("LookupError",), KeyError("x"), False),
        (("KeyError",), LookupError("x"), True),
        ((ValueError,), _failed(ValueError("x")), False),
        ((ValueError,), _failed(KeyError("x")), True),
        ((ValueError,), _failed(exception="ValueError"), False),
        (("ValueError",), _failed(exception="ValueError"), False),
        ((), _failed(JournalMismatch("x")), False),
        (("card_declined",), CallFailed("x", problem={"code": "card_declined"}), False),
        (("card_declined",), CallFailed("x", problem={"code": "busy"}), True),
        ((CallTimedOut,), CallTimedOut("x"), False),
        ((CallTimedOut,), CallFailed("x"), True),
        ((), GROUP, True),
        ((CallTimedOut,), GROUP, False),
        ((), ExceptionGroup("all", [CallFailed("no", problem={"retryable": False})]), False),
        ((), ExceptionGroup("one", [ValueError(), ExceptionGroup("in", [InvalidArguments("x")])]), False),
    ],
)
def test_is_retryable(non_retryable, error, expected):
    assert Retry(non_retryable=non_retryable).is_retryable(error) is expected


@pytest.mark.parametrize(
    ("attempt", "error", "expected"),
    [
        (1, ValueError(), timedelta(seconds=2)),
        (2, ValueError(), timedelta(seconds=2)),
        (3, ValueError(), None),
        (1, InvalidArguments("x"), None),
    ],
)
def test_next_delay_is_none_when_there_is_no_next_attempt(attempt, error, expected):
    assert Retry(attempts=3, backoff=2).next_delay(error, attempt) == expected
