"""Headers of the wire contract: their names, which of them pass, and careful reading of a stranger's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from coatcheck.broker.bodies import Limits
from coatcheck.errors import MalformedMessage, OversizedMessage

if TYPE_CHECKING:  # the port uses the names of headers
    from coatcheck.broker.port import HeaderValue, Message

VERSION = 1

KIND = "cc-kind"
IDENTITY = "cc-id"
KEY = "cc-key"
TASK = "cc-task"
DEADLINE = "cc-deadline"
KEEP = "cc-keep"
EPOCH = "cc-epoch"
CONTRACT = "cc-version"
BROKEN = "cc-broken"
"""Set by an adapter on a message whose properties could not be read; the text says why."""

REASON = "cc-reason"
DETAIL = "cc-detail"
QUEUE = "cc-queue"
DEAD_AT = "cc-dead-at"
SIZE = "cc-size"
"""Set by an adapter on a message whose body was over its limit and came without its end: the size it was sent with."""
DEAD_HEADERS = frozenset({REASON, DETAIL, QUEUE, DEAD_AT, SIZE})

KEPT_OF_OVERSIZED = 4096
"""So many bytes of a body over the limit are kept: enough for a person to see what it was."""

AUTHORIZATION = "authorization"
"""The requester's token, `Bearer …`. It is shown to the app's `identify` and goes no further."""

# Printable ASCII, as the standard has it: Postgres refuses a NUL, and terminals obey other control characters.
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[ -~]*)?")
_TRACESTATE = re.compile(r"[ -~]{1,512}")
_MAX_PROPERTY = 255
_MAX_DETAIL = 500
_MAX_TOKEN = 16 * 1024
MAY_PASS = frozenset(
    {
        KIND,
        IDENTITY,
        KEY,
        TASK,
        DEADLINE,
        KEEP,
        EPOCH,
        CONTRACT,
        BROKEN,
        *DEAD_HEADERS,
        AUTHORIZATION,
        "traceparent",
        "tracestate",
    }
)


def may_pass(header: str) -> bool:
    """Tell whether a header is ours to read and to send. Adapters strip all others, both ways."""
    return header in MAY_PASS


def may_arrive(header: str, *, is_dead: bool) -> bool:
    """Tell whether a header is read off a queue.

    A reason is believed of a dead letter only: on anything else it is the sender's own, and would outlive it to tell a
    redrive where to go. So is `cc-size`. A token is never read off a dead letter.
    """
    return header in arriving(is_dead=is_dead)


def arriving(*, is_dead: bool) -> frozenset[str]:
    """All headers that are read off a queue."""
    return _OF_THE_DEAD if is_dead else _OF_THE_LIVING


_OF_THE_DEAD = MAY_PASS - {AUTHORIZATION}
_OF_THE_LIVING = MAY_PASS - DEAD_HEADERS


class Head:
    """Typed, capped access to a stranger's properties and headers. Empty counts as absent."""

    __slots__ = ("limits", "message")

    def __init__(self, message: Message, limits: Limits) -> None:
        self.message = message
        self.limits = limits
        if message.headers:
            self._check_contract(message.headers)

    def _check_contract(self, headers: Mapping[str, HeaderValue]) -> None:
        broken = headers.get(BROKEN)
        if broken is not None:
            raise MalformedMessage("bad_properties", str(broken)[:_MAX_DETAIL] or "said to be broken")
        size = headers.get(SIZE)
        if size is not None:
            raise OversizedMessage("oversized", f"body of {str(size)[:20]} bytes; the limit is {self.limits.max_body}")
        version = headers.get(CONTRACT)
        if version is not None and (isinstance(version, bool) or str(version) != str(VERSION)):
            raise MalformedMessage("wrong_version", f"{CONTRACT} {str(version)[:64]!r}; this is version {VERSION}")

    def find_property(self, name: str) -> str | None:
        value: str | None = getattr(self.message, name)
        if value and "\0" in value:  # Postgres refuses it in any text
            raise MalformedMessage("bad_property", f"{name} contains a NUL character")
        if value and len(value) > _MAX_PROPERTY // 4 and len(value.encode()) > _MAX_PROPERTY:
            raise MalformedMessage("bad_property", f"{name} is over {_MAX_PROPERTY} bytes; AMQP takes no more")
        return value or None

    def find_text(self, name: str) -> str | None:
        value = self.message.headers.get(name)
        if value is None or value == "":
            return None
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)  # a peer may well count its ids
        if not isinstance(value, str):
            raise MalformedMessage("bad_header", f"{name} is a {type(value).__name__}; it must be text")
        if len(value) > self.limits.max_header:
            raise MalformedMessage(
                "bad_header", f"{name} has {len(value)} characters; the limit is {self.limits.max_header}"
            )
        if "\0" in value:
            raise MalformedMessage("bad_header", f"{name} contains a NUL character")
        return value

    def get_text(self, name: str) -> str:
        value = self.find_text(name)
        if value is None:
            raise MalformedMessage("bad_header", f"{name} is missing")
        return value

    def get_int(self, name: str) -> int:
        value = self.get_text(name)
        if not re.fullmatch(r"[0-9]{1,18}", value):
            raise MalformedMessage("bad_header", f"{name} is {value[:64]!r}; it must be a whole number")
        return int(value)

    def find_flag(self, name: str) -> bool:
        value = self.message.headers.get(name)
        return value is True or (value is not None and str(value).lower() in {"1", "true"})

    def find_instant(self, name: str) -> datetime | None:
        value = self.message.headers.get(name)
        if value is None:
            return None
        try:
            instant = value if isinstance(value, datetime) else _parse_instant(self.find_text(name))
            if instant is None or instant.tzinfo is UTC:
                return instant
            return (instant if instant.tzinfo else instant.replace(tzinfo=UTC)).astimezone(UTC)
        except (ValueError, OverflowError):
            raise MalformedMessage("bad_header", f"{name} is {str(value)[:64]!r}; it must be ISO-8601, UTC") from None

    def find_token(self) -> str | None:
        """Give the bearer token, if there is one. The complaint about a bad one does not quote it."""
        value = self.message.headers.get(AUTHORIZATION)
        if value is None or value == "":
            return None
        if not isinstance(value, str):
            raise MalformedMessage("bad_header", f"{AUTHORIZATION} is a {type(value).__name__}; it must be text")
        if len(value) > _MAX_TOKEN:
            raise MalformedMessage(
                "bad_header", f"{AUTHORIZATION} has {len(value)} characters; the limit is {_MAX_TOKEN}"
            )
        scheme, _, token = value.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise MalformedMessage("bad_header", f"{AUTHORIZATION} must be `Bearer` and a token")
        return token.strip()

    def find_traceparent(self) -> str | None:
        """Give the W3C trace context, if it is one. A broken one is ignored, as the standard asks."""
        value = self.message.headers.get("traceparent")
        return value if isinstance(value, str) and len(value) <= 128 and _TRACEPARENT.fullmatch(value) else None

    def find_tracestate(self) -> str | None:
        value = self.message.headers.get("tracestate")
        if not isinstance(value, str) or not _TRACESTATE.fullmatch(value):
            return None
        return value if self.find_traceparent() else None


def _parse_instant(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
