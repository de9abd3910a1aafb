"""Ids of tasks, calls and traces.

Ids of tasks and calls are of the type that Postgres's driver has for them: made, printed and compared in C.

A call's id is unguessable, and in the order of time. A peer that knows it may answer the call: 74 bits are random.
The first 48 say when it was made (UUID version 7): new rows then lie side by side in the index, and neither the writes
nor the cache a call needs grow with the table.

The position in a trace is the `traceparent` of W3C Trace Context, which travels from a request through its calls and
back. Ids of our own are derived, not drawn, wherever a run may be replayed: a trace that starts here has its task's id,
and a call's span comes from its call id. So a call that is sent twice shows up as one span.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b, sha1
from uuid import UUID

from asyncpg.pgproto import pgproto

from coatcheck.store.rows import CallId

__all__ = ["TraceParent", "child_traceparent", "derived_id", "new_call_id", "new_id", "parse_id", "parse_traceparent",
           "trace_id_of"]  # fmt: skip

_made: Callable[[str | bytes], UUID] = pgproto.UUID
_call_id_made: Callable[[bytes], CallId] = pgproto.UUID
_VERSION_AND_VARIANT = 0xF << 76 | 0x3 << 62
_VERSION_7 = 0x7 << 76 | 0x2 << 62
_RANDOM = (1 << 80) - 1 & ~_VERSION_AND_VARIANT


def new_call_id() -> CallId:
    """An id that is new, and cannot be guessed."""
    now_ms = time.time_ns() // 1_000_000
    bits = now_ms << 80 | int.from_bytes(os.urandom(16), "big") & _RANDOM | _VERSION_7
    return _call_id_made(bits.to_bytes(16, "big"))


def new_id() -> UUID:
    """A random id."""
    return _uuid(int.from_bytes(os.urandom(16), "big"), version=4)


def derived_id(namespace: UUID, name: str) -> UUID:
    """The id that `uuid.uuid5` derives, the same each time."""
    digest = sha1(namespace.bytes + name.encode(), usedforsecurity=False).digest()
    return _uuid(int.from_bytes(digest[:16], "big"), version=5)


def parse_id(text: str) -> UUID:
    """Read an id. Raises ValueError for what is none."""
    return _made(text)


def _uuid(bits: int, *, version: int) -> UUID:
    return _made((bits & ~_VERSION_AND_VARIANT | version << 76 | 0x2 << 62).to_bytes(16, "big"))


# --- traces ---

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[ -~]*)?", re.ASCII)
_LONGEST = 512
_SAMPLED = 0x01
_SPANS = blake2b(digest_size=8, person=b"cc-span")
_NO_SPAN = "0" * 16
_KNOWN_FLAGS = 0x03  # sampled, and level 2's random-trace-id


@dataclass(frozen=True, slots=True)
class TraceParent:
    """A valid position in a trace: which trace, which span is the parent, and the flags we know."""

    trace_id: str
    span_id: str
    flags: int = _SAMPLED

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


@lru_cache(maxsize=1024)  # each is asked for by every call of its task, and by its logs
def parse_traceparent(traceparent: str | None) -> TraceParent | None:
    """Return the position a header names, or None when it is absent or breaks the standard.

    A higher version is read as far as version 00 goes, as the standard asks.
    """
    if traceparent is None or len(traceparent) > _LONGEST:
        return None
    found = _FORM.fullmatch(traceparent.strip(" \t"))
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest is not None):
        return None
    if trace_id == "0" * 32 or span_id == _NO_SPAN:
        return None
    return TraceParent(trace_id=trace_id, span_id=span_id, flags=int(flags, 16) & _KNOWN_FLAGS)


def child_traceparent(traceparent: str | None, *, call_id: UUID | None = None, task_id: UUID | None = None) -> str:
    """Return the header for one hop further: the same trace, a new span.

    Without a valid parent a new trace begins, named after `task_id` if there is one. With a `call_id` the span is
    derived from it, so repeating gives the same header.
    """
    if call_id is None:
        span_id = secrets.token_hex(8)
    else:
        # Hashed, because a call id is the secret that lets a peer answer and spans end up in many trace viewers.
        hashed = _SPANS.copy()
        hashed.update(call_id.bytes)
        span_id = hashed.hexdigest()
        if span_id == _NO_SPAN:
            span_id = "0" * 15 + "1"
    parent = parse_traceparent(traceparent)
    if parent is not None:
        return f"00-{parent.trace_id}-{span_id}-{parent.flags:02x}"
    trace_id = task_id.hex if task_id is not None and task_id.int else secrets.token_hex(16)
    return f"00-{trace_id}-{span_id}-{_SAMPLED:02x}"


def trace_id_of(traceparent: str | None) -> str | None:
    """Return the trace id, for logs, or None when there is no valid trace."""
    parent = parse_traceparent(traceparent)
    return None if parent is None else parent.trace_id
