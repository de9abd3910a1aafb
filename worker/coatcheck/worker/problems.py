"""Failures as documents: RFC 9457 problems, and the codes Coatcheck itself gives them.

A problem says what went wrong to the requester; it is sent and stored. A traceback says where, to the owner of the
code; it is stored with the task and never sent. Neither holds a local variable.
"""

from __future__ import annotations

import asyncio
import traceback
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import UUID

from coatcheck.errors import (
    CallTimedOut,
    InvalidArguments,
    JournalMismatch,
    MalformedMessage,
    PermanentError,
    TaskCancelled,
    TransientError,
    Unauthorized,
    UnknownHandler,
    UsageError,
    WorkFailed,
)
from coatcheck.store.blobs import CorruptBlob
from coatcheck.worker.redaction import redacted_ends, redacted_start

__all__ = ["CODES", "Code", "CodeInfo", "describe_codes", "problem", "problem_of", "traceback_of"]

_LONGEST_DETAIL = 2_000
_LONGEST_NAME = 200
_LONGEST_TRACEBACK = 16_000


class Code(StrEnum):
    """Every `code` a problem of ours can carry. A peer may send others; they pass through."""

    CALL_TOO_LARGE = "call_too_large"
    CANCELLED = "cancelled"
    CHECKPOINT_TOO_LARGE = "checkpoint_too_large"
    CRASHED_REPEATEDLY = "crashed_repeatedly"
    DAMAGED_VALUE = "damaged_value"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    HANDLER_FAILED = "handler_failed"
    HISTORY_TOO_LARGE = "history_too_large"
    IDENTITY_CONFLICT = "identity_conflict"
    INVALID_ARGUMENTS = "invalid_arguments"
    JOURNAL_MISMATCH = "journal_mismatch"
    MALFORMED_MESSAGE = "malformed_message"
    NO_ROUTE = "no_route"
    PEER_ERROR = "peer_error"
    PROGRAM_ERROR = "program_error"
    REJECTED_BY_STORE = "rejected_by_store"
    RESULT_TOO_LARGE = "result_too_large"
    STEP_CANCELLED = "step_cancelled"
    STEP_FAILED = "step_failed"
    TIMED_OUT = "timed_out"
    TOO_MANY_CALLS = "too_many_calls"
    TOO_MANY_REQUESTERS = "too_many_requesters"
    UNAUTHORIZED = "unauthorized"
    UNAVAILABLE = "unavailable"
    UNEXPECTED_REPLY = "unexpected_reply"
    UNKNOWN_HANDLER = "unknown_handler"


@dataclass(frozen=True, slots=True)
class CodeInfo:
    """What a code stands for. `status` is the HTTP status nearest to it; `fix` is whose turn it is."""

    title: str
    status: int
    is_retryable: bool
    fix: str


CODES = MappingProxyType(
    {
        Code.CALL_TOO_LARGE: CodeInfo(
            "The body of a call is over the size limit",
            500,
            False,
            "Keep large values elsewhere and pass references, or raise COATCHECK_MAX_BODY.",
        ),
        Code.CANCELLED: CodeInfo("The task was cancelled", 499, False, "Nothing, unless the cancel was a mistake."),
        Code.CHECKPOINT_TOO_LARGE: CodeInfo(
            "A checkpoint is over its size limit",
            500,
            False,
            "Keep large values elsewhere and pass references, or raise COATCHECK_CHECKPOINT_REFUSE.",
        ),
        Code.CRASHED_REPEATEDLY: CodeInfo(
            "The task ended its worker process too often",
            500,
            False,
            "Look for memory or native crashes in the handler; the limit is COATCHECK_MAX_PICKUPS.",
        ),
        Code.DAMAGED_VALUE: CodeInfo(
            "A stored value cannot be read",
            500,
            False,
            "Restore the row that `detail` names from a backup, or cancel the task; until then it is held.",
        ),
        Code.DEADLINE_EXCEEDED: CodeInfo(
            "The requester had stopped waiting when its request was read",
            504,
            False,
            "Look why requests wait so long, or allow them more time.",
        ),
        Code.HANDLER_FAILED: CodeInfo(
            "The handler raised an exception", 500, True, "Read `exception` and `detail`; the task keeps the traceback."
        ),
        Code.HISTORY_TOO_LARGE: CodeInfo(
            "The replies and step results of a task are over the size limit",
            500,
            False,
            "Keep large values elsewhere and pass references, or raise COATCHECK_MAX_HISTORY.",
        ),
        Code.IDENTITY_CONFLICT: CodeInfo(
            "The same identity came with another body, or from another caller",
            409,
            False,
            "Give every distinct request its own `cc-id`.",
        ),
        Code.INVALID_ARGUMENTS: CodeInfo(
            "The body does not fit the handler's parameters", 422, False, "Send what `detail` asks for."
        ),
        Code.JOURNAL_MISMATCH: CodeInfo(
            "The code does not fit what the task has recorded",
            500,
            False,
            "Deploy code that fits, or cancel the task; until then it is held.",
        ),
        Code.MALFORMED_MESSAGE: CodeInfo(
            "The message breaks the wire contract", 400, False, "Read its reason in the dead-letter queue."
        ),
        Code.NO_ROUTE: CodeInfo(
            "The queue of the peer does not exist", 502, True, "Start the peer, or correct the name of the call."
        ),
        Code.PEER_ERROR: CodeInfo("The peer answered with an error", 502, True, "Read `detail`; the peer knows more."),
        Code.PROGRAM_ERROR: CodeInfo(
            "The handler breaks a rule of Coatcheck", 500, False, "Correct the handler as `detail` says."
        ),
        Code.REJECTED_BY_STORE: CodeInfo(
            "Postgres refused what was to be recorded", 500, False, "Correct the value `detail` names; a NUL, perhaps."
        ),
        Code.RESULT_TOO_LARGE: CodeInfo(
            "The result is over the size limit",
            500,
            False,
            "Keep large values elsewhere and return references, or raise COATCHECK_MAX_BODY.",
        ),
        Code.STEP_CANCELLED: CodeInfo("The handler cut the step off", 500, False, "Nothing: the handler decided so."),
        Code.STEP_FAILED: CodeInfo("A step raised an exception", 500, True, "Read `exception` and `detail`."),
        Code.TIMED_OUT: CodeInfo(
            "The peer did not answer in time", 504, True, "Look at the peer, or allow the call more time."
        ),
        Code.TOO_MANY_CALLS: CodeInfo(
            "The task has too many open calls", 500, False, "Work in portions, or raise COATCHECK_MAX_FAN_OUT."
        ),
        Code.TOO_MANY_REQUESTERS: CodeInfo(
            "As many requesters as may wait for one task do so",
            429,
            True,
            "Ask again when the task has ended, or fetch its result by `task_id`.",
        ),
        Code.UNAUTHORIZED: CodeInfo(
            "The service does not accept the caller", 401, False, "Send a valid token in the header `authorization`."
        ),
        Code.UNAVAILABLE: CodeInfo("The broker or the store is away", 503, True, "Try again; see `coatcheck doctor`."),
        Code.UNEXPECTED_REPLY: CodeInfo(
            "The reply does not fit `returns`", 502, False, "Correct the peer, or the `returns` of the call."
        ),
        Code.UNKNOWN_HANDLER: CodeInfo(
            "The service has no handler of that name",
            404,
            False,
            "Correct the message's `type`, or deploy the code that has the handler.",
        ),
    }
)


def problem(
    code: str,
    title: str | None = None,
    *,
    detail: str | None = None,
    status: int | None = None,
    retryable: bool | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """Build a problem document. For a code of ours title, status and retryable come from `CODES` unless given.

    A code that is not ours has the type `about:blank` and is its own title; extras that are None are left out.
    """
    known = CODES.get(Code(code)) if code in _OUR_CODES else None
    document: dict[str, Any] = {
        "type": f"urn:coatcheck:problem:{code}" if known else "about:blank",
        "title": title or (known.title if known else code.replace("_", " ").capitalize()),
        "status": status or (known.status if known else 500),
        "detail": detail,
        "code": str(code),
        "retryable": retryable if retryable is not None else (known.is_retryable if known else True),
        **extra,
    }
    return {name: value for name, value in document.items() if value is not None}


def cancelled_problem(task_id: UUID, reason: str | None) -> dict[str, Any]:
    """Build the answer of a task that was cancelled, the same wherever it is made."""
    return problem("cancelled", detail=reason or "cancelled on request", task_id=str(task_id))


def problem_of(
    exc: BaseException,
    task_id: UUID | None = None,
    attempt: int | None = None,
    *,
    code: Code | None = None,
    retryable: bool | None = None,
) -> dict[str, Any]:
    """Build the document for an exception that ended a task (or, with a `code`, a step).

    `retryable` is the policy's word if it has one; else a failure of a peer keeps the peer's word, and the rest
    follows the code. The text of the exception is cut, and passwords in its URLs are hidden.
    """
    code = code or _code_of(exc)
    if retryable is None:
        retryable = _is_retryable(exc, code)
    return problem(
        code,
        detail=_text_of(exc) or type(exc).__name__,
        retryable=retryable,
        exception=type(exc).__name__,
        cause=_cause_of(exc),
        task_id=None if task_id is None else str(task_id),
        attempt=attempt,
    )


def traceback_of(exc: BaseException) -> str:
    """Return the traceback as text: causes and groups included, frames of Coatcheck left out, no local values.

    If nothing but our frames is there, they stay, for then the fault is ours. Long texts lose their middle.
    """
    captured = traceback.TracebackException.from_exception(exc, capture_locals=False, compact=True)
    _trim(captured)
    return _encodable(redacted_ends("".join(captured.format()), _LONGEST_TRACEBACK))


def describe_codes() -> str:
    """Return the table of `docs/errors.md`."""
    lines = ["| code | status | retryable | meaning | what to do |", "|---|---|---|---|---|"]
    for code, info in sorted(CODES.items()):
        word = "yes" if info.is_retryable else "no"
        lines.append(f"| `{code}` | {info.status} | {word} | {info.title} | {info.fix} |")
    return "\n".join(lines) + "\n"


_OUR_CODES = frozenset(str(code) for code in Code)

# The first match decides, so the narrow types stand first.
_CODE_BY_TYPE: tuple[tuple[type[BaseException], Code], ...] = (
    (InvalidArguments, Code.INVALID_ARGUMENTS),
    (UnknownHandler, Code.UNKNOWN_HANDLER),
    (JournalMismatch, Code.JOURNAL_MISMATCH),
    (UsageError, Code.PROGRAM_ERROR),
    (CorruptBlob, Code.DAMAGED_VALUE),
    (MalformedMessage, Code.MALFORMED_MESSAGE),
    (Unauthorized, Code.UNAUTHORIZED),
    (TransientError, Code.UNAVAILABLE),
    (TaskCancelled, Code.HANDLER_FAILED),  # a task this one asked for; its own fate is not "cancelled"
    (asyncio.CancelledError, Code.CANCELLED),
)


def _code_of(exc: BaseException) -> Code:
    return next((code for kind, code in _CODE_BY_TYPE if isinstance(exc, kind)), Code.HANDLER_FAILED)


def _is_retryable(exc: BaseException, code: Code) -> bool:
    if isinstance(exc, WorkFailed):
        return exc.is_retryable
    if isinstance(exc, UsageError | PermanentError):
        return False
    return CODES[code].is_retryable


def _cause_of(exc: BaseException) -> dict[str, str] | None:
    """Name the peer's or step's own failure when the handler let it through: its code and class, no more."""
    if not isinstance(exc, WorkFailed):
        return None
    code = exc.code or (str(Code.TIMED_OUT) if isinstance(exc, CallTimedOut) else "")
    found = {"code": code, "exception": exc.type}
    return {name: redacted_start(text, _LONGEST_NAME) for name, text in found.items() if text} or None


def _text_of(exc: BaseException) -> str:
    try:
        text = str(exc)
    except Exception:  # noqa: BLE001 - user code: a failing __str__ must not replace the failure it describes
        return f"({type(exc).__name__} has no text: its __str__ raises)"
    return _encodable(redacted_start(text, _LONGEST_DETAIL))


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _trim(captured: traceback.TracebackException) -> None:
    foreign = [frame for frame in captured.stack if not frame.filename.startswith(_OUR_FILES)]
    if foreign:
        captured.stack[:] = foreign
    members = getattr(captured, "exceptions", None) or ()
    for inner in (captured.__cause__, captured.__context__, *members):
        if inner is not None:
            _trim(inner)


def _our_directories() -> tuple[str, ...]:
    """Return the directories of this package's source roots: one when installed, three in a checkout."""
    import coatcheck

    return tuple(f"{Path(each).resolve()}/" for each in coatcheck.__path__)


_OUR_FILES = _our_directories()
