"""Bodies: from bytes of unknown origin to values, under caps, and back.

A body is checked once, on arrival: size before anything else, nesting before building objects, then one decode. The
bytes are kept as they came, because the store keeps bytes (`jsonb` would refuse `\\u0000`), and because a digest must
not depend on how we would have written them. Nothing here executes what it reads: pickle is just bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, TypeVar, overload

import msgspec

from coatcheck.decoding import DEEPEST, TooDeep, decode_any_json, decode_cbor, decode_json, decode_msgpack
from coatcheck.errors import InvalidSettings, MalformedMessage, OversizedMessage

T = TypeVar("T")

_UNSET: Any = object()


class BodyFormat(StrEnum):
    """The five ways a body is read, under all the names of its content type."""

    JSON = "json"
    MSGPACK = "msgpack"
    CBOR = "cbor"
    TEXT = "text"
    BYTES = "bytes"


_JSON = BodyFormat.JSON  # asking an Enum for a member takes longer than comparing with it
CONTENT_TYPES = {
    BodyFormat.JSON: "application/json",
    BodyFormat.MSGPACK: "application/msgpack",
    BodyFormat.CBOR: "application/cbor",
    BodyFormat.TEXT: "text/plain; charset=utf-8",
    BodyFormat.BYTES: "application/octet-stream",
}
_KEPT_BYTES = 4096
"""Values of larger bodies are not kept while they wait: hundreds do at a time."""
_DIGESTS = {form: hashlib.sha256(form.encode() + b"\0") for form in BodyFormat}
PROBLEM = "application/problem+json"

_MSGPACK_TYPES = frozenset({"application/msgpack", "application/x-msgpack", "application/vnd.msgpack"})
_TRIVIAL_ENCODINGS = frozenset({"", "identity", "utf-8", "utf8", "us-ascii", "ascii", "binary", "8bit"})
_UTF8_CHARSETS = frozenset({"utf-8", "utf8", "us-ascii", "ascii"})


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps on what a stranger may send. Checked before the work they bound."""

    max_body: int = 1024 * 1024
    max_depth: int = 64
    max_header: int = 1024
    """Characters in one `cc-…` header; they end up in indexed columns, and an index entry is limited too."""

    def __post_init__(self) -> None:
        for name in ("max_body", "max_depth", "max_header"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InvalidSettings(f"{name} is {value!r}; it must be an int of at least 1")
        if self.max_depth > DEEPEST:
            raise InvalidSettings(
                f"max_depth is {self.max_depth}; it must be at most {DEEPEST}, or decoding exhausts the stack"
            )


DEFAULT_LIMITS = Limits()


class Body(msgspec.Struct):
    """Bytes and how to read them. `content_type` is one of the values of `BodyFormat`; `raw` is as it came."""

    content_type: BodyFormat
    raw: bytes
    _value: Any = _UNSET

    @classmethod
    def of(cls, value: Any, content_type: BodyFormat = BodyFormat.JSON) -> Body:
        """Encode a value. Raises `MalformedMessage` (`unencodable`) for one that the format cannot carry."""
        try:
            return cls(content_type, _encode(value, content_type))
        except (TypeError, ValueError, RecursionError, OverflowError) as exc:
            raise MalformedMessage("unencodable", f"{type(value).__name__} as {content_type}: {exc}") from exc

    @overload
    def decode(self) -> Any: ...

    @overload
    def decode(self, type: type[T]) -> T: ...

    def decode(self, type: Any = Any) -> Any:  # noqa: A002
        """Give the value, or an object of `type`. Raises `MalformedMessage` (`does_not_fit`) if it does not fit.

        The value built on arrival is handed out once; later calls decode afresh, so no two callers share a list.
        That of a large body is built afresh each time, for a value can take 89 times as much memory as its bytes.
        """
        value, self._value = self._value, _UNSET
        if value is _UNSET:
            value = _decode(self.raw, self.content_type)
        if type is Any:
            return value
        try:
            return msgspec.convert(value, type, strict=True, str_keys=True)  # keys are text in every format
        except msgspec.ValidationError as exc:
            raise MalformedMessage("does_not_fit", str(exc)) from exc

    @property
    def digest(self) -> bytes:
        """SHA-256 over format and bytes: equal for equal requests, also if senders call the content type otherwise."""
        hashed = _DIGESTS[self.content_type].copy()
        hashed.update(self.raw)
        return hashed.digest()

    @property
    def mime_type(self) -> str:
        return CONTENT_TYPES[self.content_type]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Body) and (self.content_type, self.raw) == (other.content_type, other.raw)

    def __hash__(self) -> int:
        return hash((self.content_type, self.raw))

    def __repr__(self) -> str:
        return f"Body({self.content_type}, {len(self.raw)} bytes)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("content_type", self.content_type), ("size", len(self.raw))]


def parse_body(
    raw: bytes, content_type: str | None, *, content_encoding: str | None = None, limits: Limits = DEFAULT_LIMITS
) -> Body:
    """Check and decode a body from outside.

    Raises `OversizedMessage` (`oversized`) or `MalformedMessage` (`too_deep`, `undecodable`, `unsupported_encoding`,
    `unsupported_charset`, `unsupported_content_type`); nothing else, for no bytes at all.
    """
    if len(raw) > limits.max_body:
        raise OversizedMessage("oversized", f"body of {len(raw)} bytes; the limit is {limits.max_body}")
    if content_encoding is not None and content_encoding.strip().lower() not in _TRIVIAL_ENCODINGS:
        raise MalformedMessage(
            "unsupported_encoding", f"content_encoding {content_encoding[:64]!r}; send it uncompressed"
        )
    if not content_type:
        return _sniff(raw, limits)
    form = find_format(content_type)
    return _checked(form, raw, _decode(raw, form, limits.max_depth))


def _checked(form: BodyFormat, raw: bytes, value: Any) -> Body:
    return Body(form, raw, value if len(raw) <= _KEPT_BYTES else _UNSET)


@lru_cache(maxsize=256)
def find_format(content_type: str) -> BodyFormat:
    """Say how a content type is read. Raises `MalformedMessage` for text in a charset that is not UTF-8."""
    mime, _, parameters = content_type.lower().partition(";")
    mime = mime.strip()
    if mime in {"application/json", "text/json"} or mime.endswith("+json"):
        form = BodyFormat.JSON
    elif mime in _MSGPACK_TYPES:
        return BodyFormat.MSGPACK
    elif mime == "application/cbor" or mime.endswith("+cbor"):
        return BodyFormat.CBOR
    elif mime.startswith("text/"):
        form = BodyFormat.TEXT
    else:
        return BodyFormat.BYTES
    charset = _find_charset(parameters)
    if charset and charset not in _UTF8_CHARSETS:
        raise MalformedMessage("unsupported_charset", f"charset {charset[:64]!r}; send UTF-8")
    return form


def _find_charset(parameters: str) -> str | None:
    for each in parameters.split(";"):
        name, _, value = each.partition("=")
        if name.strip() == "charset":
            return value.strip(' \t"')
    return None


def _sniff(raw: bytes, limits: Limits) -> Body:
    """Read a body without content type: JSON, else UTF-8 text, else bytes. RabbitMQ's tutorial sends such bodies."""
    try:
        return _checked(_JSON, raw, _decode(raw, _JSON, limits.max_depth))
    except MalformedMessage as exc:
        if exc.code == "too_deep" and not _is_undecodable(raw):
            raise
    try:
        return _checked(BodyFormat.TEXT, raw, raw.decode())
    except UnicodeDecodeError:
        return Body(BodyFormat.BYTES, raw, raw)


def _is_undecodable(raw: bytes) -> bool:
    """Tell text that merely has many brackets from JSON that is too deep."""
    try:
        decode_any_json(raw)
    except RecursionError:
        return False
    except ValueError:
        return True
    return False


def _decode(raw: bytes, form: BodyFormat, max_depth: int = DEEPEST) -> Any:
    try:
        return _DECODERS[form](raw, max_depth)
    except TooDeep as exc:
        raise MalformedMessage("too_deep", str(exc)) from exc
    except RecursionError as exc:
        raise MalformedMessage("too_deep", "nested deeper than the decoder can follow") from exc
    except ImportError as exc:
        raise MalformedMessage("unsupported_content_type", _NEEDS_CBOR) from exc
    except (ValueError, TypeError, OverflowError) as exc:
        raise MalformedMessage("undecodable", f"not {form}: {str(exc)[:200]}") from exc


def _encode(value: Any, form: BodyFormat) -> bytes:
    match form:
        case BodyFormat.JSON:
            return msgspec.json.encode(value)
        case BodyFormat.MSGPACK:
            return msgspec.msgpack.encode(value)
        case BodyFormat.CBOR:
            return _cbor().dumps(value)  # type: ignore[no-any-return]  # an optional module is Any here
        case BodyFormat.TEXT:
            return str(value).encode()
        case BodyFormat.BYTES:
            return bytes(value)


_DECODERS: dict[BodyFormat, Callable[[bytes, int], Any]] = {
    BodyFormat.JSON: decode_json,
    BodyFormat.MSGPACK: decode_msgpack,
    BodyFormat.CBOR: decode_cbor,
    BodyFormat.TEXT: lambda raw, _: raw.decode(),
    BodyFormat.BYTES: lambda raw, _: bytes(raw),
}
_NEEDS_CBOR = "CBOR needs `pip install coatcheck[cbor]`"


def _cbor() -> Any:
    try:
        import cbor2
    except ImportError as exc:
        raise MalformedMessage("unsupported_content_type", _NEEDS_CBOR) from exc
    return cbor2
