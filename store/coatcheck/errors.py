"""Every error Coatcheck raises, in one tree. The branch says who acts next.

CoatcheckError
├── TransientError            the broker redelivers; the next attempt may pass
│   ├── BrokerUnavailable
│   └── StoreUnavailable      (Collision, LockTimeout, StoreNotReady: the text says what to do)
├── PermanentError            an operator looks in the dead-letter queue
│   ├── MalformedMessage
│   │   └── OversizedMessage
│   ├── CheckpointRefused
│   ├── Rejected
│   └── Unauthorized          (raised by an app's `identify`: the requester is told)
├── UsageError                the programmer fixes it, before the first message
│   ├── InvalidSettings
│   ├── NobodyThere           (no such service, or no server: it may not have been started yet)
│   ├── EmbeddedUnavailable   (the Postgres we run ourselves does not start: the text says why)
│   ├── UnknownHandler
│   ├── InvalidArguments
│   └── JournalMismatch
└── WorkFailed                what a handler awaited did not succeed; the handler decides
    ├── StepFailed
    ├── CallFailed
    │   └── CallTimedOut
    └── TaskFailed            (client side: the task that was asked for ended without a result)
        └── TaskCancelled
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class CoatcheckError(Exception):
    """The root of the tree."""


class TransientError(CoatcheckError):
    """Trying again later may pass; nothing was lost."""


class BrokerUnavailable(TransientError):
    """The broker cannot be reached, or did not confirm in time."""


class StoreUnavailable(TransientError):
    """Postgres cannot be reached, or gave up on a transaction. `is_in_doubt`: the commit may have happened anyway."""

    is_in_doubt = False


class PermanentError(CoatcheckError):
    """The same input will fail the same way for ever."""

    code = "permanent"


class MalformedMessage(PermanentError):
    """A message that breaks the wire contract. `code` is the reason put on its dead letter."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class OversizedMessage(MalformedMessage):
    """A message larger than the limit; it is never decoded."""


class CheckpointRefused(PermanentError):
    """A commit larger than its limit, in bytes or in open calls. `code` is the problem its task ends with."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class Rejected(PermanentError):
    """Postgres refused the values of one write; the same write will be refused again."""

    code = "rejected_by_store"


class Unauthorized(PermanentError):
    """The app does not accept this caller. The text is sent to the requester, so it must not quote the token."""

    code = "unauthorized"


class UsageError(CoatcheckError):
    """A mistake in the program or its settings."""


class InvalidSettings(UsageError):
    """An invalid setting: the text names the field, the value and the limit."""


class NobodyThere(UsageError):
    """The target does not exist: no such service on this broker, no server at this place."""


class EmbeddedUnavailable(UsageError):
    """The embedded Postgres cannot run here. The text says why, and what to do."""


class UnknownHandler(UsageError):
    """A request for a handler this code does not have."""


class InvalidArguments(UsageError):
    """A request body that does not fit its handler's parameters."""


class JournalMismatch(UsageError):
    """What the code asks for does not fit what the journal recorded; the task is held."""


class WorkFailed(CoatcheckError):
    """Something a handler awaited ended without a result.

    `problem` is the RFC 9457 document that describes it, as recorded; `type` is the remote or
    original exception's name where there is one, `code` its machine-readable reason.
    """

    def __init__(self, message: str, *, problem: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.problem: Mapping[str, Any] = problem or {}

    @property
    def code(self) -> str:
        return str(self.problem.get("code", ""))

    @property
    def type(self) -> str:
        return str(self.problem.get("exception", ""))

    @property
    def is_retryable(self) -> bool:
        return bool(self.problem.get("retryable", True))


class StepFailed(WorkFailed):
    """A step raised; the failure is recorded and is the same on every replay."""


class CallFailed(WorkFailed):
    """A peer answered with an error, or could not be reached."""


class CallTimedOut(CallFailed):
    """A peer did not answer before the call was due."""


class TaskFailed(WorkFailed):
    """The task that was submitted ended without a result."""


class TaskCancelled(TaskFailed):
    """The task that was submitted was cancelled."""
