"""Bodies: from bytes of unknown origin to values, under caps, and back.

A body is checked once, on arrival: size before anything else, nesting before building objects, then one decode. The
bytes are kept as they came, because the store keeps bytes (`jsonb` would refuse `\\u0000`), and because a digest must
not depend on how we would have written them. Nothing here executes what it reads: pickle is just bytes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, TypeVar, overload

import msgspec

from coatcheck.errors import InvalidSettings, MalformedMessage, OversizedMessage

T = TypeVar("T")

_UNSET: Any = object()


class BodyFormat(StrEnum):
    """The five ways a body is read, whatever its content type is called."""

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
        if self.max_depth > 400:
            raise InvalidSettings(
                f"max_depth is {self.max_depth}; it must be at most 400, or decoding exhausts the stack"
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
        """
        value, self._value = self._value, _UNSET
        if value is _UNSET:
            value = _decode(self.raw, self.content_type)
        if type is Any:
            return value
        try:
            return msgspec.convert(value, type, strict=True, str_keys=self.content_type is BodyFormat.JSON)
        except msgspec.ValidationError as exc:
            raise MalformedMessage("does_not_fit", str(exc)) from exc

    @property
    def digest(self) -> bytes:
        """SHA-256 over format and bytes: equal for equal requests, whatever the sender called the content type."""
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
    `unsupported_charset`, `unsupported_content_type`); nothing else, whatever the bytes.
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
    return Body(form, raw, _decode_checked(raw, form, limits))


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
    charset = re.search(r"charset\s*=\s*\"?([^\s\";]+)", parameters)
    if charset and charset[1] not in _UTF8_CHARSETS:
        raise MalformedMessage("unsupported_charset", f"charset {charset[1][:64]!r}; send UTF-8")
    return form


def _sniff(raw: bytes, limits: Limits) -> Body:
    """Read a body without content type: JSON, else UTF-8 text, else bytes. RabbitMQ's tutorial sends such bodies."""
    try:
        return Body(_JSON, raw, _decode_checked(raw, _JSON, limits))
    except MalformedMessage as exc:
        if exc.code == "too_deep" and not _is_undecodable(raw):
            raise
    try:
        return Body(BodyFormat.TEXT, raw, raw.decode())
    except UnicodeDecodeError:
        return Body(BodyFormat.BYTES, raw, raw)


def _is_undecodable(raw: bytes) -> bool:
    """Tell text that merely has many brackets from JSON that is too deep."""
    try:
        _decode(raw, BodyFormat.JSON)
    except MalformedMessage as exc:
        return exc.code == "undecodable"
    return False


def _decode_checked(raw: bytes, form: BodyFormat, limits: Limits) -> Any:
    if form is _JSON:
        if _is_json_deeper_than(raw, limits.max_depth):
            raise MalformedMessage("too_deep", f"nested deeper than {limits.max_depth}")
        return _decode(raw, form)
    value = _decode(raw, form)
    if form is BodyFormat.MSGPACK or form is BodyFormat.CBOR:
        _check_tree(value, limits.max_depth, max_nodes=len(raw))
    return value


def _decode(raw: bytes, form: BodyFormat) -> Any:
    try:
        return _DECODERS[form](raw)
    except RecursionError as exc:
        raise MalformedMessage("too_deep", "nested deeper than the decoder can follow") from exc
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


def _decode_cbor(raw: bytes) -> Any:
    """Read CBOR without what lets a short message take minutes: long numbers, shared values, keys whose hashes collide.

    Keys must be text or bytes, for hashes of numbers can be chosen; those of texts are salted.
    """
    cbor2 = _cbor()
    try:
        return cbor2.loads(raw, semantic_decoders=_CBOR_TAGS, strict_hashable_types=True)
    except cbor2.CBORDecodeError as exc:  # its subclasses are not all ValueErrors
        # Its own text names the kind of value; what caused it may quote the value, unless it is ours.
        raise ValueError(str(exc.__cause__ if isinstance(exc.__cause__, _Refusal) else exc)) from exc


class _Refusal(ValueError):
    """What CBOR can say and we do not read."""


def _refuse_tag(_value: Any, _is_immutable: bool) -> Any:
    raise _Refusal("shared references, patterns and mails are not read; send plain values")


def _decode_bignum(digits: Any, _is_immutable: bool) -> int:
    """Read a large number as far as JSON may go. Fractions and decimals of longer ones take the CPU for minutes."""
    if not isinstance(digits, bytes) or len(digits) > _MAX_BIGNUM_BYTES:
        raise _Refusal(f"a number of more than {_MAX_BIGNUM_BYTES} bytes")
    return int.from_bytes(digits, "big")


_MAX_BIGNUM_BYTES = 1785  # 4,299 digits; Python refuses to print more than 4,300
_CBOR_TAGS = {
    2: _decode_bignum,
    3: lambda digits, is_immutable: -1 - _decode_bignum(digits, is_immutable),
    # string references, shared values, regular expressions, MIME messages
    **dict.fromkeys((25, 28, 29, 35, 36, 256), _refuse_tag),
}


_DECODERS: dict[BodyFormat, Callable[[bytes], Any]] = {
    BodyFormat.JSON: msgspec.json.Decoder().decode,
    BodyFormat.MSGPACK: msgspec.msgpack.Decoder().decode,
    BodyFormat.CBOR: _decode_cbor,
    BodyFormat.TEXT: bytes.decode,
    BodyFormat.BYTES: bytes,
}


def _cbor() -> Any:
    try:
        import cbor2
    except ImportError as exc:
        raise MalformedMessage("unsupported_content_type", "CBOR needs `pip install coatcheck[cbor]`") from exc
    return cbor2


_JSON_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SQUARE = bytes.maketrans(b"{}", b"[]")


def _is_json_deeper_than(raw: bytes, depth: int) -> bool:
    """Tell whether brackets outside strings nest deeper than `depth`, at the speed of `bytes.replace`.

    Each pass removes the innermost pairs, so what is left after `depth` passes is too deep. Unbalanced input is left
    to the decoder, which refuses it: it only gets here if it has many brackets, and then its depth is unknown, so we
    say too deep.
    """
    if raw.find(b"[", 1) < 0 and raw.find(b"{", 1) < 0:  # it is flat; seen in a fifth of the time that counting takes
        return False
    if raw.count(b"[") + raw.count(b"{") <= depth:
        return False
    brackets = _JSON_STRING.sub(b"", raw).translate(_SQUARE, _NOT_BRACKETS)
    for _ in range(depth):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _check_tree(value: Any, max_depth: int, *, max_nodes: int) -> None:
    """Walk a value level by level.

    CBOR can share and loop: more nodes than bytes were not sent, they were multiplied.
    """
    level = [value] if isinstance(value, dict | list | tuple | set | frozenset) else []
    count = 0
    for _ in range(max_depth):
        if not level:
            return
        below: list[Any] = []
        for node in level:
            children = [*node.keys(), *node.values()] if isinstance(node, dict) else node
            count += len(children)
            below.extend(it for it in children if isinstance(it, dict | list | tuple | set | frozenset))
        if count > max_nodes:
            raise MalformedMessage("undecodable", "shared references multiply its size")
        level = below
    if level:
        raise MalformedMessage("too_deep", f"nested deeper than {max_depth}")
