"""W3C Trace Context: the `traceparent` that travels from a request through its calls and back.

Ids of our own are derived, not drawn, wherever a run may be replayed: a trace that starts here has its task's id, and
a call's span comes from its call id. So a call that is sent twice shows up as one span.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from uuid import UUID

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[ -~]*)?", re.ASCII)
_LONGEST = 512
_SAMPLED = 0x01
_SPANS = blake2b(digest_size=8, person=b"cc-span")
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
def parse(traceparent: str | None) -> TraceParent | None:
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
    if trace_id == "0" * 32 or span_id == "0" * 16:
        return None
    return TraceParent(trace_id=trace_id, span_id=span_id, flags=int(flags, 16) & _KNOWN_FLAGS)


def child(traceparent: str | None, *, call_id: UUID | None = None, task_id: UUID | None = None) -> str:
    """Return the header for one hop further: the same trace, a new span.

    Without a valid parent a new trace begins, named after `task_id` if there is one. With a `call_id` the span is
    derived from it, so repeating gives the same header.
    """
    span_id = secrets.token_hex(8) if call_id is None else _derived_span(call_id)
    parent = parse(traceparent)
    if parent is not None:
        return f"00-{parent.trace_id}-{span_id}-{parent.flags:02x}"
    trace_id = task_id.hex if task_id is not None and task_id.int else secrets.token_hex(16)
    return f"00-{trace_id}-{span_id}-{_SAMPLED:02x}"


def trace_id_of(traceparent: str | None) -> str | None:
    """Return the trace id, for logs, or None when there is no valid trace."""
    parent = parse(traceparent)
    return None if parent is None else parent.trace_id


def _derived_span(call_id: UUID) -> str:
    # Hashed, because a call id is the secret that lets a peer answer and spans end up in many trace viewers.
    hashed = _SPANS.copy()
    hashed.update(call_id.bytes)
    digest = hashed.hexdigest()
    return digest if digest != "0" * 16 else "0" * 15 + "1"
