"""The body that `coatcheck dev` suggests: it fits the handler it is for."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal, NotRequired, TypedDict
from uuid import UUID

import msgspec
import pydantic
import pytest

from coatcheck.broker.bodies import Body
from coatcheck.cli.dev_sources import describe, example_of
from coatcheck.worker import App


class Size(enum.StrEnum):
    SMALL = "s"
    LARGE = "l"


@dataclass
class Address:
    street: str
    lines: list[str]
    zip: int | None = None


class Order(msgspec.Struct):
    item: str
    to: Address
    size: Size
    parent: Order | None = None


class Hat(TypedDict):
    brim: float
    band: NotRequired[str]


class Coat(pydantic.BaseModel):
    length: int = pydantic.Field(gt=3)
    by: Address
    colour: Literal["red", "blue"] = "red"


TYPES = [
    *(str, int, float, bool, bytes, dict, list, Any, None, Decimal, datetime, timedelta, UUID),
    *(list[int], dict[str, int], tuple[int, str], set[str], str | None, int | str, Literal["a", "b"]),
    *(Size, Address, Order, Hat, Coat, list[Order], list[Coat], Annotated[int, msgspec.Meta(ge=10, multiple_of=4)]),
    *(Annotated[str, msgspec.Meta(min_length=3)], Annotated[float, msgspec.Meta(lt=0)]),
]


@pytest.mark.parametrize("wanted", TYPES, ids=str)
def test_example_fits_a_handler_of_any_type(wanted: Any):
    app = App("shop")

    @app.task
    async def one(ctx, it: wanted): ...

    @app.task
    async def two(ctx, it: wanted, other: str, more: int = 1): ...

    for handler in app.handlers.values():
        handler.binding.bind(Body.of(json.loads(example_of(handler))))


def test_example_shows_what_is_required_and_nothing_else():
    app = App("shop")

    @app.task
    async def order(ctx, it: Order): ...

    found = json.loads(example_of(app.handlers["order"]))

    assert found.pop("size") in list(Size)
    assert found == {"item": "…", "to": {"street": "…", "lines": ["…"]}}


def test_handler_that_has_to_be_named_is_named():
    app = App("shop")

    @app.task
    async def quote(ctx, item: str): ...

    @app.task
    async def buy(ctx): ...

    offer = describe("shop:app", app)

    assert (offer.task, offer.example) == ("buy", "")
