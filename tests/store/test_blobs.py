"""Values at rest: what goes in comes out, and damage is told from values."""

import random
import zlib
from dataclasses import dataclass
from typing import Any

import msgspec
import pydantic
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.store import Codec, CorruptBlob, decode, encode
from coatcheck.store.blobs import (
    COMPRESS_ABOVE_BYTES,
    MAX_UNPACKED_BYTES,
    SHRINK_ABOVE_BYTES,
    canonical,
    pack,
    shrink,
    unpack,
    unpacked_size,
)

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_values_come_back_equal(value):
    assert decode(encode(value)) == value


@given(st.binary())
def test_bytes_come_back_equal(value):
    assert decode(encode(value)) == value


@given(st.sampled_from(Codec), st.binary(max_size=3 * COMPRESS_ABOVE_BYTES))
def test_packed_bodies_come_back_with_their_codec(codec, body):
    assert unpack(pack(codec, body)) == (codec, body)


def test_large_value_is_stored_smaller_and_comes_back():
    value = ["the same words"] * 10_000

    blob = encode(value)

    assert len(blob) < 2_000
    assert decode(blob) == value


def test_body_that_does_not_shrink_is_stored_as_it_is():
    body = random.Random(1).randbytes(3 * COMPRESS_ABOVE_BYTES)

    assert body in pack(Codec.BYTES, body)


@given(st.sampled_from(Codec), st.binary(max_size=3 * SHRINK_ABOVE_BYTES))
def test_shrunk_blob_reads_as_before(codec, body):
    shrunk = shrink(pack(codec, body))

    assert unpack(shrunk) == (codec, body)
    assert unpacked_size(shrunk) == len(body)


def test_blob_is_shrunk_once_and_only_when_that_makes_it_smaller():
    words, noise, large = b"the same words " * 60, random.Random(1).randbytes(1000), b"w" * (COMPRESS_ABOVE_BYTES + 1)
    blobs = [pack(Codec.BYTES, body) for body in (words, noise, large, b"few words")]

    shrunk = [shrink(blob) for blob in blobs]

    assert len(shrunk[0]) < len(words) / 10
    assert shrunk[1:] == blobs[1:]
    assert [shrink(blob) for blob in shrunk] == shrunk


@given(PLAIN, st.data())
def test_any_flipped_bit_is_noticed(value, data):
    blob = bytearray(encode(value))
    blob[data.draw(st.integers(0, len(blob) - 1))] ^= 1 << data.draw(st.integers(0, 7))

    with pytest.raises(CorruptBlob):
        decode(bytes(blob))


@given(PLAIN, st.data())
def test_blob_that_was_cut_off_is_noticed(value, data):
    blob = encode(value)

    with pytest.raises(CorruptBlob):
        decode(blob[: data.draw(st.integers(0, len(blob) - 1))])


def _sealed(kinds: bytes, body: bytes) -> bytes:
    return kinds + zlib.crc32(body, zlib.crc32(kinds)).to_bytes(4, "big") + body


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (bytes((2, 1, 0, 0)), "format version 2"),
        (bytes((1, 99, 0, 0)), "unknown codec 99"),
        (bytes((1, 1, 9, 0)), "unknown compression 9"),
        (bytes((1, 1, 0, 7)), "key 7"),
    ],
)
def test_blob_of_a_newer_release_says_what_is_missing(kinds, words):
    with pytest.raises(CorruptBlob, match=words):
        decode(_sealed(kinds, b"1"))


def test_damaged_compressed_body_does_no_harm_to_the_next():
    blob = pack(Codec.BYTES, b"the same words " * 1000)
    damaged = _sealed(blob[:4], blob[8:-9] + b"\0" * 9)

    with pytest.raises(CorruptBlob, match="cannot decompress"):
        unpack(damaged)

    assert unpack(blob) == (Codec.BYTES, b"the same words " * 1000)


def test_compression_bomb_is_refused_before_it_unpacks():
    bomb = zstandard.ZstdCompressor().compress(b"\0" * (MAX_UNPACKED_BYTES + 1))
    assert len(bomb) < 10_000

    with pytest.raises(CorruptBlob, match="over the limit"):
        unpack(_sealed(bytes((1, Codec.BYTES, 1, 0)), bomb))


def test_compressed_body_that_hides_its_size_is_refused():
    compressor = zstandard.ZstdCompressor(write_content_size=False)

    with pytest.raises(CorruptBlob):
        unpack(_sealed(bytes((1, Codec.BYTES, 1, 0)), compressor.compress(b"\0" * 100)))


def test_body_that_is_no_frame_is_refused():
    with pytest.raises(CorruptBlob, match="decompress"):
        unpack(_sealed(bytes((1, Codec.BYTES, 1, 0)), b"no frame"))


@dataclass
class Found:
    title: str
    score: float = 0.0


class Struct(msgspec.Struct):
    title: str


class Model(pydantic.BaseModel):
    title: str
    tags: list[str] = []


@pytest.mark.parametrize("value", [Found("a", 1.5), Struct("a"), Model(title="a", tags=["b"])])
def test_typed_values_come_back_as_their_type(value):
    assert decode(encode(value), type(value)) == value


def test_models_inside_other_values_come_back():
    value = {"found": [Model(title="a")]}

    assert decode(encode(value), dict[str, list[Model]]) == value


def test_value_that_does_not_fit_its_type_is_told_from_damage():
    with pytest.raises(msgspec.ValidationError):
        decode(encode({"title": 1}), Found)


def test_what_json_cannot_hold_is_refused_with_advice():
    with pytest.raises(TypeError, match="use builtins, dataclasses"):
        encode(object())


@pytest.mark.parametrize(
    ("codec", "body"), [(Codec.MSGPACK, msgspec.msgpack.encode({"a": 1})), (Codec.CBOR, b"\xa1\x61a\x01")]
)
def test_other_codecs_are_read(codec, body):
    assert decode(pack(codec, body)) == {"a": 1}


def test_text_is_read_as_text():
    assert decode(pack(Codec.TEXT, "grüße".encode())) == "grüße"


def _reordered(value: Any) -> Any:
    match value:
        case dict():
            return {key: _reordered(value[key]) for key in reversed(list(value))}
        case list():
            return [_reordered(item) for item in value]
        case _:
            return value


@given(PLAIN)
def test_canonical_bytes_do_not_depend_on_the_order_of_keys(value):
    assert canonical(value) == canonical(_reordered(value))


@given(PLAIN, PLAIN)
def test_canonical_bytes_of_different_values_differ(one, other):
    if canonical(one) == canonical(other):
        assert one == other


@given(st.binary())
def test_canonical_bytes_of_bytes_are_never_those_of_json(value):
    assert canonical(value) == b"b" + value
