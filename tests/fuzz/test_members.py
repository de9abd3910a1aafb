"""Sets and dicts of a handler's own types: numbers, UUIDs and tuples of them have hashes that a sender can choose."""

import dataclasses
import random
import time
from collections.abc import Callable
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import pydantic
import pytest

from coatcheck.broker.bodies import parse_body
from coatcheck.errors import InvalidArguments
from coatcheck.worker.binding import Binding

COUNT = 12_000
MOST_S = 0.6
"""Reading takes a tenth of it; building a set of so many members with one hash took from 1.2 to 11 seconds."""
MODULUS = (1 << 61) - 1
"""Python hashes a number to its rest from the division by this."""
COLLIDING = [MODULUS * number for number in range(1, COUNT + 1)]
SCATTERED = [random.Random(at).getrandbits(64) for at in range(COUNT)]


@dataclasses.dataclass
class Basket:
    articles: set[int]


class Point(msgspec.Struct, frozen=True):
    x: int


class Model(pydantic.BaseModel):
    articles: set[int]


def _tuples_of_one_hash(count: int) -> list[tuple[int, ...]]:
    """Eight numbers have one hash, so all tuples of five of them have."""
    return [tuple(1 + ((at >> shift) & 7) * MODULUS for shift in (0, 3, 6, 9, 12)) for at in range(count)]


async def take_set(ctx: object, them: set[int]) -> None: ...
async def take_bare_set(ctx: object, them: set) -> None: ...
async def take_dict(ctx: object, them: dict[int, int]) -> None: ...
async def take_named(ctx: object, them: frozenset[int], count: int = 1) -> None: ...
async def take_nested(ctx: object, them: list[set[int]]) -> None: ...
async def take_either(ctx: object, them: set[int | str]) -> None: ...
async def take_ids(ctx: object, them: set[UUID]) -> None: ...
async def take_ids_as_keys(ctx: object, them: dict[UUID, int]) -> None: ...
async def take_decimals(ctx: object, them: set[Decimal]) -> None: ...
async def take_tuples(ctx: object, them: set[tuple[int, ...]]) -> None: ...
async def take_structs(ctx: object, them: set[Point]) -> None: ...
async def take_dataclass(ctx: object, them: Basket) -> None: ...
async def take_others(ctx: object, **them: set[int]) -> None: ...
async def take_model(ctx: object, them: Model) -> None: ...


def _ids(numbers: list[int]) -> list[str]:
    return [str(UUID(int=number)) for number in numbers]


SHAPES: dict[str, tuple[Any, Callable[[list[int]], Any]]] = {
    "a set": (take_set, list),
    "a bare set": (take_bare_set, list),
    "keys": (take_dict, lambda them: {str(each): 1 for each in them}),
    "a set by name": (take_named, lambda them: {"them": them}),
    "a set in a list": (take_nested, lambda them: [them]),
    "a set of two types": (take_either, list),
    "UUIDs": (take_ids, _ids),
    "UUIDs as keys": (take_ids_as_keys, lambda them: dict.fromkeys(_ids(them), 1)),
    "decimals": (take_decimals, lambda them: [str(each) for each in them]),
    "structs": (take_structs, lambda them: [{"x": each} for each in them]),
    "a dataclass": (take_dataclass, lambda them: {"articles": them}),
    "a set by any name": (take_others, lambda them: {"them": them}),
    "a pydantic model": (take_model, lambda them: {"articles": them}),
}


def bind(handler: Any, value: Any) -> float:
    """Bind a body of JSON; give the time of the thread that it took."""
    body = parse_body(msgspec.json.encode(value), "application/json")
    binding = Binding.of(handler)
    started_s = time.thread_time()
    try:
        binding.bind(body)
    finally:
        taken_s = time.thread_time() - started_s
        assert taken_s < MOST_S
    return taken_s


@pytest.mark.parametrize("shape", SHAPES)
def test_members_of_one_hash_are_refused_in_a_moment(shape: str) -> None:
    handler, made = SHAPES[shape]

    with pytest.raises(InvalidArguments, match="hash"):
        bind(handler, made(COLLIDING))


def test_tuples_of_one_hash_are_refused_in_a_moment() -> None:
    with pytest.raises(InvalidArguments, match="hash"):
        bind(take_tuples, _tuples_of_one_hash(COUNT // 2))


@pytest.mark.parametrize("shape", SHAPES)
def test_as_many_honest_members_are_taken(shape: str) -> None:
    handler, made = SHAPES[shape]

    bind(handler, made(SCATTERED))


def test_one_member_many_times_is_taken() -> None:
    bind(take_set, [7] * COUNT)
    bind(take_tuples, [(1, 2)] * COUNT)


def test_set_that_ends_with_a_mistake_is_refused_in_a_moment() -> None:
    """The decoder builds the set up to the mistake."""
    with pytest.raises(InvalidArguments, match="hash"):
        bind(take_set, [*COLLIDING, "x"])


def test_set_under_a_name_that_comes_twice_is_refused_in_a_moment() -> None:
    """The decoder builds both sets, and keeps the second."""
    raw = b'{"them":' + msgspec.json.encode(COLLIDING) + b',"them":[]}'

    with pytest.raises(InvalidArguments, match="hash"):
        bind(take_named, msgspec.Raw(raw))


@pytest.mark.parametrize("form", ["msgpack", "cbor"])
def test_members_of_other_formats_are_looked_at_too(form: str) -> None:
    cbor2 = pytest.importorskip("cbor2")
    numbers = [1 + MODULUS * number for number in range(7)]
    raw = {"msgpack": msgspec.msgpack.encode, "cbor": cbor2.dumps}[form](
        [[numbers[at // 7**place % 7] for place in range(5)] for at in range(COUNT)]
    )
    binding = Binding.of(take_tuples)
    body = parse_body(raw, f"application/{form}")

    started_s = time.thread_time()
    with pytest.raises(InvalidArguments, match="hash"):
        binding.bind(body)
    assert time.thread_time() - started_s < MOST_S
