"""When to try again, and how long to wait first: the policy of a task, a step or a call.

A policy decides only. The delay of a task or a call is a row (a retry time or a timer), so it outlives the process; the
delay of a step is slept in RAM.
"""

from __future__ import annotations

import math
import random as _random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta

from coatcheck.errors import InvalidSettings, PermanentError, StepFailed, UsageError, WorkFailed

__all__ = ["Backoff", "Retry"]

_LONGEST_S = timedelta(days=3650).total_seconds()


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays that grow by `factor` from `initial` to `maximum`, each shortened by up to `jitter` of itself.

    Jitter only ever shortens, so `maximum` is a promise. Raises InvalidSettings at construction.
    """

    initial: timedelta = timedelta(seconds=1)
    factor: float = 2.0
    maximum: timedelta = timedelta(minutes=5)
    jitter: float = 0.1

    def __post_init__(self) -> None:
        _check_duration("Backoff.initial", self.initial)
        _check_duration("Backoff.maximum", self.maximum)
        _check_number("Backoff.factor", self.factor, low=1.0, high=math.inf)
        _check_number("Backoff.jitter", self.jitter, low=0.0, high=1.0)
        if self.maximum < self.initial:
            raise InvalidSettings(
                f"Backoff.maximum={self.maximum} is shorter than Backoff.initial={self.initial}; raise `maximum`"
            )

    def delay(self, attempt: int, *, random: Callable[[], float] = _random.random) -> timedelta:
        """Return the wait after failed attempt number `attempt` (the first is 1). `random` yields [0, 1)."""
        if attempt < 1:
            raise ValueError(f"attempts are counted from 1, got {attempt}")
        full_s = min(_power_s(self.initial.total_seconds(), self.factor, attempt - 1), self.maximum.total_seconds())
        return timedelta(seconds=full_s * (1.0 - self.jitter * random()))


@dataclass(frozen=True, slots=True)
class Retry:
    """Up to `attempts` tries in all, with `backoff` in between, unless the error is not worth repeating.

    `backoff` as a number of seconds or a timedelta is that very delay each time. `non_retryable` takes exception
    types, and names: of an exception class, of a remote exception (`error.type`) or of a problem (`error.code`).
    Raises InvalidSettings at construction.
    """

    attempts: int = 3
    backoff: float | timedelta | Backoff = field(default_factory=Backoff)
    non_retryable: tuple[type[BaseException] | str, ...] = ()

    def __post_init__(self) -> None:
        if not _is_count(self.attempts):
            raise InvalidSettings(f"Retry.attempts={self.attempts!r} must be a whole number, at least 1")
        _as_backoff(self.backoff)
        if not isinstance(self.non_retryable, tuple):
            raise InvalidSettings(
                f"Retry.non_retryable={self.non_retryable!r} must be a tuple, such as (ValueError, 'invalid_arguments')"
            )
        for item in self.non_retryable:
            if not _is_error_type(item) and not (isinstance(item, str) and item):
                raise InvalidSettings(f"Retry.non_retryable holds {item!r}: give exception types, or their names")

    def delay(self, attempt: int, *, random: Callable[[], float] = _random.random) -> timedelta:
        """Return the wait between attempt number `attempt`, which failed, and the next one."""
        return _as_backoff(self.backoff).delay(attempt, random=random)

    def next_delay(
        self, error: BaseException, attempt: int, *, random: Callable[[], float] = _random.random
    ) -> timedelta | None:
        """Return how long to wait before trying again, or None: attempts used up, or `error` is not worth repeating."""
        if attempt >= self.attempts or not self.is_retryable(error):
            return None
        return self.delay(attempt, random=random)

    def is_retryable(self, error: BaseException) -> bool:
        """Tell whether repeating the work may help after `error`.

        Of a group, one error that is ruled out (by `non_retryable`, or a mistake in the program) rules out the whole;
        a peer's own "not retryable" does not, as long as another member may pass: `ctx.first` needs only one.
        """
        errors = tuple(_leaves(error))
        if any(self._is_ruled_out(each) for each in errors):
            return False
        return any(each.is_retryable if isinstance(each, WorkFailed) else True for each in errors)

    def _is_ruled_out(self, error: BaseException) -> bool:
        # A put-down, a cancellation or an exit is no failure of the work, so there is nothing to repeat.
        if not isinstance(error, Exception) or isinstance(error, UsageError | PermanentError):
            return True
        if any(_matches(error, item) for item in self.non_retryable):
            return True
        cause = error.__cause__ if isinstance(error, StepFailed) else None
        return cause is not None and self._is_ruled_out(cause)


def _matches(error: BaseException, item: type[BaseException] | str) -> bool:
    """A recorded failure has lost its class, so types are compared by name too: replay decides as the first run did."""
    if isinstance(item, str):
        names = {cls.__name__ for cls in type(error).__mro__}
        return item in names or (isinstance(error, WorkFailed) and item in (error.type, error.code))
    return isinstance(error, item) or (isinstance(error, WorkFailed) and error.type == item.__name__)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _leaves(member)
    else:
        yield error


def _as_backoff(value: float | timedelta | Backoff) -> Backoff:
    if isinstance(value, Backoff):
        return value
    if not isinstance(value, timedelta):
        _check_number("Retry.backoff", value, low=0.0, high=_LONGEST_S)
        value = timedelta(seconds=value)
    _check_duration("Retry.backoff", value)
    return Backoff(initial=value, factor=1.0, maximum=value, jitter=0.0)


def _power_s(initial_s: float, factor: float, exponent: int) -> float:
    try:
        return initial_s * factor**exponent
    except OverflowError:
        return math.inf if initial_s else 0.0


def _check_duration(name: str, value: object) -> None:
    if not isinstance(value, timedelta):
        raise InvalidSettings(f"{name}={value!r} must be a timedelta, such as timedelta(seconds=5)")
    if value < timedelta(0):
        raise InvalidSettings(f"{name}={value} must not be negative")


def _check_number(name: str, value: object, *, low: float, high: float) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
        return
    limit = f"at least {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
    raise InvalidSettings(f"{name}={value!r} must be a number, {limit}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_error_type(item: object) -> bool:
    return isinstance(item, type) and issubclass(item, BaseException)
