"""Readers for bytes from outside: linear in their size, or refused before a value is built.

Three things let a short message take minutes: nesting, numbers, and keys whose hashes collide. Python salts the hashes
of texts and bytes, but not those of numbers. So a key is a text or bytes, in every format. JSON has no other keys.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import msgspec

DEEPEST = 400
"""No setting allows more nesting, or decoding exhausts the stack."""


class Refused(ValueError):
    """Bytes that are not read. The text says why, and quotes no value."""


class TooDeep(Refused):
    """Bytes that nest deeper than allowed."""

    def __init__(self, depth: int) -> None:
        super().__init__(f"nested deeper than {depth}")


# --- JSON ---


_NOT_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"'))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # one level down, one level up: 1 and -1 as signed bytes


MOST_EXTREMES = 1000
"""So many numbers near the ends of a float's range, such as 1e308, are read in one body. Each takes 12 µs."""
_FEW_BYTES = 32 * 1024  # too few for extremes to matter
_EXTREME = re.compile(rb"[eE][+-]?0*[23]\d\d")


def decode_json(raw: bytes, depth: int = DEEPEST) -> Any:
    """Read JSON. Raises TooDeep, Refused, msgspec.DecodeError or RecursionError."""
    check_json_depth(raw, depth)
    if len(raw) > _FEW_BYTES and next(itertools.islice(_EXTREME.finditer(raw), MOST_EXTREMES, None), None):
        raise Refused(f"more than {MOST_EXTREMES:,} numbers with exponents of 200 and beyond")
    return decode_any_json(raw)


decode_any_json = msgspec.json.Decoder().decode


def check_json_depth(raw: bytes, depth: int) -> None:
    """Raise TooDeep if brackets outside strings nest deeper than `depth`.

    Each operation passes over the bytes once. In bytes that are not JSON, the count may be wrong after the first
    mistake, but the decoder reads no further than that.
    """
    if raw.find(b"[", 1) < 0 and raw.find(b"{", 1) < 0:  # flat: found in a fifth of the time that counting takes
        return
    if raw.count(b"[") + raw.count(b"{") <= depth:
        return
    if b"\\" in raw:  # an escaped quote does not end a string; the escape may be escaped itself
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside = b"".join(raw.translate(_STEPS, _NOT_STRUCTURE).split(b'"')[::2])
    if max(itertools.accumulate(memoryview(outside).cast("b")), default=0) > depth:
        raise TooDeep(depth)


# --- MessagePack ---


def decode_msgpack(raw: bytes, depth: int = DEEPEST) -> Any:
    """Read MessagePack whose keys are text or bytes. Raises Refused, msgspec.DecodeError or RecursionError."""
    check_msgpack(raw, depth)
    return _decode_msgpack(raw)


def check_msgpack(raw: bytes, depth: int = DEEPEST) -> None:
    """Raise Refused if a key is neither text nor bytes, TooDeep if the value nests deeper than `depth`.

    Bytes that are not MessagePack, or end too early, pass: the decoder refuses them at the same byte.
    """
    try:
        _walk_msgpack(raw, depth)
    except IndexError:
        return


def _walk_msgpack(raw: bytes, depth: int) -> None:
    """Look at the first byte of each value. `left` counts what is missing in the innermost container, keys too."""
    outer: list[tuple[int, bool]] = []
    at, left, is_map = 0, 1, False
    while left or outer:
        if not left:
            left, is_map = outer.pop()
            continue
        left -= 1
        head = raw[at]
        if is_map and left & 1 and head not in _KEY_HEADS:
            raise Refused("a key is neither text nor bytes")
        size = _SIZES[head]
        if size:  # most values end here
            at += size
            continue
        width = _WIDTHS.get(head, 0)
        count = int.from_bytes(raw[at + 1 : at + 1 + width], "big") if width else head & 0x0F
        at += 1 + width
        if head not in _CONTAINER_HEADS:
            at += count + (head in _EXTENSION_HEADS)
            continue
        outer.append((left, is_map))
        if len(outer) > depth:
            raise TooDeep(depth)
        is_map = head in _MAP_HEADS
        left = count * 2 if is_map else count


def _fixed_sizes() -> list[int]:
    """The bytes that a value takes, by its first byte; 0 if that byte does not tell, or begins a container."""
    sizes = [1] * 256
    for head in range(0xA0, 0xC0):  # short texts
        sizes[head] = 1 + (head & 0x1F)
    numbers = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
    extensions = {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
    for head, size in (numbers | extensions).items():
        sizes[head] = 1 + size
    for head in (*_CONTAINER_HEADS, *_WIDTHS):
        sizes[head] = 0
    return sizes


_MAP_HEADS = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))
_CONTAINER_HEADS = frozenset((*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF))
_EXTENSION_HEADS = frozenset((0xC7, 0xC8, 0xC9))
_KEY_HEADS = frozenset((*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB, 0xC4, 0xC5, 0xC6))
_WIDTHS = dict.fromkeys((0xC4, 0xC7, 0xD9), 1)  # the bytes of a length, where the first byte is not enough
_WIDTHS |= dict.fromkeys((0xC5, 0xC8, 0xDA, 0xDC, 0xDE), 2)
_WIDTHS |= dict.fromkeys((0xC6, 0xC9, 0xDB, 0xDD, 0xDF), 4)
_SIZES = _fixed_sizes()
_decode_msgpack = msgspec.msgpack.Decoder().decode


# --- CBOR ---


def decode_cbor(raw: bytes, depth: int = DEEPEST) -> Any:
    """Read CBOR without long numbers, shared values, and keys or members that are neither text nor bytes.

    Raises Refused, ImportError or RecursionError.
    """
    import cbor2

    try:
        value = cbor2.loads(raw, semantic_decoders=_CBOR_TAGS, strict_hashable_types=True)
    except cbor2.CBORDecodeError as exc:  # its subclasses are not all ValueErrors
        # Its own text names the kind of value; its cause may quote the value, unless the cause is ours.
        raise Refused(str(exc.__cause__ if isinstance(exc.__cause__, Refused) else exc)) from exc
    _check_tree(value, depth, max_nodes=len(raw))
    return value


def _refuse_tag(_value: Any, _is_immutable: bool) -> Any:
    raise Refused("shared references, patterns and mails are not read; send plain values")


def _decode_bignum(digits: Any, _is_immutable: bool) -> int:
    """Read a large number up to JSON's limit. Fractions and decimals of longer ones take minutes of CPU."""
    if not isinstance(digits, bytes) or len(digits) > _MAX_BIGNUM_BYTES:
        raise Refused(f"a number of more than {_MAX_BIGNUM_BYTES} bytes")
    return int.from_bytes(digits, "big")


_MAX_BIGNUM_BYTES = 1785  # 4,299 digits; Python refuses to print more than 4,300
_CBOR_TAGS = {
    2: _decode_bignum,
    3: lambda digits, is_immutable: -1 - _decode_bignum(digits, is_immutable),
    # string references, shared values, regular expressions, MIME messages
    **dict.fromkeys((25, 28, 29, 35, 36, 256), _refuse_tag),
}


_HOLDERS = (dict, list, tuple, set, frozenset)


def _check_tree(value: Any, max_depth: int, *, max_nodes: int) -> None:
    """Walk a value level by level.

    CBOR can share and loop: if there are more nodes than bytes, the sender multiplied them by references.
    """
    level = [value] if isinstance(value, _HOLDERS) else []
    count = 0
    for _ in range(max_depth):
        if not level:
            return
        below: list[Any] = []
        for node in level:
            children = [*node.keys(), *node.values()] if isinstance(node, dict) else node
            count += len(children)
            below.extend(it for it in children if isinstance(it, _HOLDERS))
        if count > max_nodes:
            raise Refused("shared references multiply its size")
        level = below
    if level:
        raise TooDeep(max_depth)
