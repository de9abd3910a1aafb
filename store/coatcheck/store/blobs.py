"""Values at rest: self-describing blobs.

A blob is an 8-byte head (format version, codec, compression, key id, CRC-32 of these four and of the body) and a body.
The head says how to read the body, so settings may change while old rows live on. Never pickle: reading a blob runs no
code.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar

import msgspec
import zstandard

from coatcheck.decoding import Refused, decode_cbor, decode_msgpack
from coatcheck.errors import CoatcheckError

T = TypeVar("T")

_HEAD = struct.Struct(">4sI")
_VERSION = 1
_PLAIN_KEY = 0

COMPRESS_ABOVE_BYTES = 4096
SHRINK_ABOVE_BYTES = 512
"""The same for what is kept longest and rewritten most often: a request stands in its task's row until retention."""
MAX_UNPACKED_BYTES = 64 * 1024 * 1024


class Codec(IntEnum):
    JSON = 1
    MSGPACK = 2
    CBOR = 3
    TEXT = 4
    BYTES = 5


class Compression(IntEnum):
    NONE = 0
    ZSTD = 1


class CorruptBlob(CoatcheckError):
    """A stored value that cannot be read: damaged, cut off, or written by a newer release. No handler ever sees it: its
    task is held, and the bytes stay as they are.
    """


class _Zstd(threading.local):
    """What zstd works with takes ten times as long to make as to use, and only one thread at a time may use it."""

    def __init__(self) -> None:
        self.fast = zstandard.ZstdCompressor(level=1)
        self.thorough = zstandard.ZstdCompressor(level=3)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()

# The first four bytes of every head we write, and of all we read, with where their checksum begins. Looked up, because
# making a bytes object, or naming an enum's member, takes a good part of a checksum's time, and each value of a task
# passes here several times.
_AS_IT_IS = {codec: bytes((_VERSION, codec, Compression.NONE, _PLAIN_KEY)) for codec in Codec}
_COMPRESSED = {codec: bytes((_VERSION, codec, Compression.ZSTD, _PLAIN_KEY)) for codec in Codec}
_KNOWN_KINDS = {
    kinds: (codec, zlib.crc32(kinds), table is _COMPRESSED)
    for table in (_AS_IT_IS, _COMPRESSED)
    for codec, kinds in table.items()
}
_UNKNOWN_KINDS = (None, 0, False)


def pack(codec: Codec, body: bytes) -> bytes:
    """Wrap a body that is already encoded; large ones are compressed when that makes them smaller."""
    if len(body) > COMPRESS_ABOVE_BYTES:
        smaller = _zstd.thorough.compress(body)
        if len(smaller) < len(body):
            return _sealed(_COMPRESSED[codec], smaller)
    return _sealed(_AS_IT_IS[codec], body)


def shrink(blob: bytes) -> bytes:
    """Compress what `pack` has left as it was, from a smaller size on. It reads as before."""
    codec, _, is_compressed = _KNOWN_KINDS.get(blob[:4], _UNKNOWN_KINDS)
    if len(blob) <= SHRINK_ABOVE_BYTES or codec is None or is_compressed:
        return blob
    smaller = _sealed(_COMPRESSED[codec], _zstd.fast.compress(blob[_HEAD.size :]))
    return smaller if len(smaller) < len(blob) else blob


def _sealed(kinds: bytes, body: bytes) -> bytes:
    _, begun, _ = _KNOWN_KINDS[kinds]
    return _HEAD.pack(kinds, zlib.crc32(body, begun)) + body


def unpack(blob: bytes) -> tuple[Codec, bytes]:
    """Give codec and encoded body back. Raises CorruptBlob, saying what is wrong."""
    if len(blob) < _HEAD.size:
        raise CorruptBlob(f"a blob of {len(blob)} bytes is shorter than its {_HEAD.size}-byte head")
    kinds, checksum = _HEAD.unpack_from(blob)
    body = blob[_HEAD.size :]
    codec, begun, is_compressed = _KNOWN_KINDS.get(kinds, _UNKNOWN_KINDS)
    if codec is None or zlib.crc32(body, begun) != checksum:
        raise CorruptBlob(_complaint(kinds, body, checksum))
    return codec, _decompress(body) if is_compressed else body


def is_damaged(blob: bytes) -> bool:
    """Whether `unpack` would raise CorruptBlob."""
    try:
        unpack(blob)
    except CorruptBlob:
        return True
    return False


def _complaint(kinds: bytes, body: bytes, checksum: int) -> str:
    """Say why a blob cannot be read."""
    version, codec, compression, key_id = kinds
    if version != _VERSION:
        return f"blob format version {version} is unknown here (known: {_VERSION}); upgrade this replica"
    if zlib.crc32(body, zlib.crc32(kinds)) != checksum:
        return f"checksum of a {len(body)}-byte body does not match; the row was damaged"
    if key_id != _PLAIN_KEY:
        return f"the blob is encrypted with key {key_id}, and this replica has no keys"
    if compression not in tuple(Compression):
        return f"unknown compression {compression}; upgrade this replica"
    return f"unknown codec {codec}; upgrade this replica"


_LONGEST_FRAME_HEAD = 18


def unpacked_size(blob: bytes) -> int:
    """The length of a body, by what its head says and without unpacking it. A damaged one counts as it is stored."""
    if len(blob) < _HEAD.size or blob[2] != Compression.ZSTD:
        return max(0, len(blob) - _HEAD.size)
    try:
        return zstandard.frame_content_size(blob[_HEAD.size : _HEAD.size + _LONGEST_FRAME_HEAD])
    except zstandard.ZstdError:
        return len(blob)


def _decompress(body: bytes) -> bytes:
    try:
        size = zstandard.frame_content_size(body)
    except zstandard.ZstdError as error:
        raise CorruptBlob(f"cannot decompress: {error}") from error
    if not 0 <= size <= MAX_UNPACKED_BYTES:
        raise CorruptBlob(f"a body that unpacks to {size} bytes is over the limit of {MAX_UNPACKED_BYTES}")
    try:
        return _zstd.decompressor.decompress(body, max_output_size=size)
    except zstandard.ZstdError as error:
        raise CorruptBlob(f"cannot decompress: {error}") from error


def encode(value: Any) -> bytes:
    """Turn a value into a blob: bytes as they are, all else JSON. Raises TypeError for what JSON cannot hold."""
    if isinstance(value, _BYTES):
        return pack(Codec.BYTES, bytes(value))
    return pack(Codec.JSON, _JSON.encode(value))


def decode(blob: bytes, type: Any = Any) -> Any:  # noqa: A002 - the word users know from msgspec
    """Read a blob back as `type`. Raises CorruptBlob, or msgspec.ValidationError when it does not fit the type."""
    codec, body = unpack(blob)
    try:
        return decode_body(codec, body, type)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, EOFError) as error:
        # Every body was read once before it was stored. The error's own text may quote the value.
        raise CorruptBlob(f"the {len(body)}-byte body is not valid {codec.name}; the row was damaged") from error


def decode_body(codec: Codec, body: bytes, type: Any = Any) -> Any:  # noqa: A002
    match codec:
        case Codec.JSON:
            return _decode_json(body) if type is Any else msgspec.json.decode(body, type=type, dec_hook=decode_foreign)
        case Codec.MSGPACK | Codec.CBOR:
            value = _carefully(decode_msgpack if codec is Codec.MSGPACK else decode_cbor, body)
            return msgspec.convert(value, type, dec_hook=decode_foreign, str_keys=True)
        case Codec.TEXT:
            return msgspec.convert(body.decode(), type, dec_hook=decode_foreign)
        case Codec.BYTES:
            return body


def _carefully(read: Callable[[bytes], T], body: bytes) -> T:
    """Read a body that a stranger wrote as carefully as on its arrival: an older release may have let it in."""
    try:
        return read(body)
    except Refused as error:
        raise CorruptBlob(f"a stored value that is not read: {error}") from error


def canonical(value: Any) -> bytes:
    """Encode so that equal values give equal bytes in any order of their keys; for digests."""
    if isinstance(value, _BYTES):
        return b"b" + bytes(value)
    return _CANONICAL_JSON.encode(value)


def _encode_foreign(value: Any) -> Any:
    """Let pydantic models be stored without depending on pydantic."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if hasattr(value, "why_not_stored"):
        raise TypeError(f"cannot store {value.why_not_stored}")
    raise TypeError(
        f"cannot store a {type(value).__module__}.{type(value).__qualname__}: use builtins, dataclasses, "
        "msgspec structs or pydantic models"
    )


def decode_foreign(wanted: Any, value: Any) -> Any:
    """The msgspec hook that builds pydantic models."""
    if hasattr(wanted, "model_validate"):
        return wanted.model_validate(value)
    raise TypeError(
        f"do not know how to build {wanted!r}; use builtins, dataclasses, msgspec structs or pydantic models"
    )


_BYTES = (bytes, bytearray, memoryview)
_JSON = msgspec.json.Encoder(enc_hook=_encode_foreign)
_CANONICAL_JSON = msgspec.json.Encoder(enc_hook=_encode_foreign, order="deterministic")
_decode_json = msgspec.json.Decoder().decode
