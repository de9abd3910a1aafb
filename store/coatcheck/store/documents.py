"""JSON documents in rows (progress, headers, claims, addresses), as both stores write and read them."""

from __future__ import annotations

from typing import Any

import msgspec


def from_json(value: Any) -> Any:
    """jsonb arrives as text through plain statements."""
    return msgspec.json.decode(value) if isinstance(value, str | bytes) else value


def to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
