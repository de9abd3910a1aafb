"""Stored and travelling bodies, read for people: never an exception, whatever the bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coatcheck.broker.bodies import Body, parse_body
from coatcheck.broker.port import Message
from coatcheck.cli.output import pretty
from coatcheck.errors import CoatcheckError
from coatcheck.store.blobs import decode
from coatcheck.worker.messages import to_body


@dataclass(frozen=True, slots=True)
class Payload:
    """A body and how it was read. `error` says why it could not be."""

    format: str
    size: int
    value: Any = None
    error: str | None = None

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"format": self.format, "bytes": self.size, "value": self.value}
        return found | ({"error": self.error} if self.error else {})

    def as_text(self, limit: int | None = None) -> str:
        if self.error:
            return f"({self.size} bytes that cannot be read: {self.error})"
        if isinstance(self.value, bytes):
            shown = self.value[: limit or self.size]
            return f"{self.size} bytes: {shown.hex(' ')}{' …' if len(shown) < self.size else ''}"
        return pretty(self.value, limit)


def read_blob(blob: bytes) -> Payload:
    """Read a stored value."""
    try:
        return _read(to_body(blob))
    except CoatcheckError as error:
        return Payload("unknown", len(blob), error=str(error))


def read_message(message: Message) -> Payload:
    """Read a message's body, within the limits everything from outside has."""
    try:
        body = parse_body(message.body, message.content_type, content_encoding=message.content_encoding)
        return _read(body)
    except CoatcheckError as error:
        return Payload("unknown", len(message.body), error=str(error))


def read_problem(blob: bytes | None) -> Mapping[str, Any] | None:
    """Read a stored failure; one that is not a document becomes one."""
    if blob is None:
        return None
    try:
        found = decode(blob)
    except (CoatcheckError, ValueError, RecursionError) as error:
        return {"code": "damaged_value", "detail": str(error)}
    return found if isinstance(found, dict) else {"code": "unknown", "detail": str(found)}


def _read(body: Body) -> Payload:
    return Payload(body.content_type.value, len(body.raw), body.decode())
