from __future__ import annotations

import contextlib
import functools
import json
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict
from uuid import UUID

import cbor2
import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.errors import InvalidArguments, UsageError
from coatcheck.worker.binding import Binding

if TYPE_CHECKING:
    from somewhere import Context, Hidden  # type: ignore[import-not-found]


@dataclass(frozen=True)
class Body:
    """The least that a binding needs from a message."""

    content_type: str
    raw: bytes

    def decode(self) -> Any:
        return DECODE[self.content_type](self.raw)


DECODE: dict[str, Any] = {
    "json": msgspec.json.decode,
    "msgpack": msgspec.msgpack.decode,
    "cbor": cbor2.loads,
    "text": bytes.decode,
    "bytes": bytes,
}
ENCODE: dict[str, Any] = {"json": msgspec.json.encode, "msgpack": msgspec.msgpack.encode, "cbor": cbor2.dumps}


def as_json(value: Any) -> Body:
    return Body("json", msgspec.json.encode(value))


def bind(function, body: Body):
    return Binding.of(function).bind(body)


def complaint(function, body: Body) -> str:
    with pytest.raises(InvalidArguments) as caught:
        bind(function, body)
    assert caught.value.__cause__ is None  # msgspec's own text may quote the value
    return str(caught.value)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: int = 0


class Order(msgspec.Struct):
    item: str
    count: int = 1


class Options(TypedDict):
    depth: int
    note: NotRequired[str]


class Model(pydantic.BaseModel):
    title: str
    pages: int = 1


class StrictModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    at: datetime


@dataclass
class Shelf:
    models: list[Model] = field(default_factory=list)


class Foreign:
    pass


# --- one parameter: the whole body ---


async def whole(ctx: Context, topic: str): ...


def handler_of(wanted: Any):
    async def handler(ctx, value): ...

    handler.__annotations__["value"] = wanted
    return handler


@pytest.mark.parametrize(
    ("wanted", "sent", "expected"),
    [
        (str, "x", "x"),
        (int, 5, 5),
        (float, 5, 5.0),
        (bool, True, True),
        (list[int], [1, 2], [1, 2]),
        (dict[str, float], {"a": 1}, {"a": 1.0}),
        (dict[int, str], {"1": "a"}, {1: "a"}),
        (set[str], ["a"], {"a"}),
        (tuple[int, str], [1, "a"], (1, "a")),
        (int | None, None, None),
        (int | str, "x", "x"),
        (Any, {"any": [1]}, {"any": [1]}),
        (object, [1], [1]),
        (Literal["a", "b"], "b", "b"),
        (Colour, "blue", Colour.BLUE),
        (datetime, "2024-05-01T00:00:00Z", datetime(2024, 5, 1, tzinfo=UTC)),
        (UUID, "5f0c6a55-7a0e-5c0e-9d3f-0d6f2b1c4a11", UUID("5f0c6a55-7a0e-5c0e-9d3f-0d6f2b1c4a11")),
        (Decimal, "1.50", Decimal("1.50")),
        (Annotated[int, msgspec.Meta(ge=1)], 1, 1),
        (Point, {"x": 1}, Point(1)),
        (Order, {"item": "hat"}, Order("hat")),
        (Options, {"depth": 1}, {"depth": 1}),
        (Model, {"title": "t"}, Model(title="t")),
        (Model | None, None, None),
        (list[Model], [{"title": "t"}], [Model(title="t")]),
        (dict[str, Model | None], {"a": None}, {"a": None}),
        (Shelf, {"models": [{"title": "t"}]}, Shelf([Model(title="t")])),
        (StrictModel, {"at": "2024-05-01T00:00:00Z"}, StrictModel(at=datetime(2024, 5, 1, tzinfo=UTC))),
    ],
)
@pytest.mark.parametrize("content_type", ["json", "msgpack", "cbor"])
def test_only_parameter_takes_the_whole_body_as_its_type(wanted, sent, expected, content_type):
    assert bind(handler_of(wanted), Body(content_type, ENCODE[content_type](sent))) == ((expected,), {})


def test_unannotated_parameter_takes_anything():
    async def handler(ctx, value): ...

    assert bind(handler, as_json({"a": [1, None]})) == (({"a": [1, None]},), {})


@pytest.mark.parametrize(
    ("wanted", "body", "expected"),
    [
        (str, Body("text", b"hello"), "hello"),
        (str, Body("text", b""), ""),
        (str | None, Body("text", b"hello"), "hello"),
        (Any, Body("text", b"hello"), "hello"),
        (Any, Body("json", b""), None),
        (UUID, Body("text", b"5f0c6a55-7a0e-5c0e-9d3f-0d6f2b1c4a11"), UUID("5f0c6a55-7a0e-5c0e-9d3f-0d6f2b1c4a11")),
        (bytes, Body("bytes", b"\xff\x00"), b"\xff\x00"),
        (bytes, Body("bytes", b""), b""),
        (bytes, Body("text", b"hello"), b"hello"),
        (bytes, Body("json", b'{"a": 1}'), b'{"a": 1}'),
        (bytes | None, Body("json", b'"x"'), b'"x"'),
        (Any, Body("bytes", b"\xff"), b"\xff"),
    ],
)
def test_text_and_bytes(wanted, body, expected):
    assert bind(handler_of(wanted), body) == ((expected,), {})


def test_keyword_only_parameter_is_given_by_keyword():
    async def handler(ctx, *, topic: str): ...

    assert bind(handler, as_json("x")) == ((), {"topic": "x"})


@pytest.mark.parametrize("body", [Body("text", b""), Body("json", b""), as_json(None)])
def test_no_body_or_null_means_the_default(body):
    async def handler(ctx, topic: str = "hats"): ...

    assert bind(handler, body) == ((), {})


def test_null_is_a_value_where_the_type_has_it():
    async def handler(ctx, topic: str | None = "hats"): ...

    assert bind(handler, as_json(None)) == ((None,), {})


@pytest.mark.parametrize("encode", ENCODE.values(), ids=ENCODE)
@pytest.mark.parametrize(
    ("wanted", "value"),
    [(str, "x"), (int, 5), (str | None, None), (list[int], [1, 2]), (Colour, Colour.RED), (Literal["a"], "a")],
)
def test_an_object_is_bound_by_name_where_the_type_takes_no_object(wanted, value, encode):
    content_type = next(name for name, each in ENCODE.items() if each is encode)
    plain = msgspec.to_builtins(value)
    by_name = Body(content_type, encode({"value": plain}))

    assert bind(handler_of(wanted), by_name) == ((), {"value": value})
    assert bind(handler_of(wanted), Body(content_type, encode(plain))) == ((value,), {})


@pytest.mark.parametrize("wanted", [dict, dict[str, str], Any, Options, Point, str | dict[str, str]])
def test_an_object_is_the_value_where_the_type_takes_one(wanted):
    body = {"value": "x", "depth": 1, "x": 1} if wanted in (Options, Point) else {"value": "x"}

    (value,), _ = bind(handler_of(wanted), as_json(body))

    assert value == (Point(1) if wanted is Point else {"depth": 1} if wanted is Options else {"value": "x"})


def test_an_object_that_is_bytes_or_text_stays_what_it_is():
    raw = b'{"value": "x"}'

    assert bind(handler_of(bytes), Body("json", raw)) == ((raw,), {})
    assert bind(handler_of(str), Body("text", raw)) == ((raw.decode(),), {})


def test_default_of_an_only_parameter_stands_in_an_object_too():
    async def handler(ctx, topic: str = "hats"): ...

    assert bind(handler, as_json({})) == ((), {"topic": "hats"})


@pytest.mark.parametrize(
    ("wanted", "body", "fields"),
    [
        (Point, {"x": 1, "yy": 2}, {"yy": "y"}),
        (Order, {"item": "hat", "coutn": 3}, {"coutn": "count"}),
        (Options, {"depth": 1, "zzz": 2}, {"zzz": None}),
        (Model, {"title": "x", "page": 3}, {"page": "pages"}),
        (list[Point], [{"x": 1, "yy": 1}, {"x": 2}], {"[].yy": "y"}),
        (dict[str, Point], {"any": {"x": 1, "yy": 1}}, {".*.yy": "y"}),
        (Point | None, {"x": 1, "yy": 1}, {"yy": "y"}),
        (Shelf, {"models": [{"title": "x", "tilte": 1}]}, {"models[].tilte": "title"}),
        (Annotated[Point, msgspec.Meta(description="a")], {"x": 1, "yy": 1}, {"yy": "y"}),
        (Point, {"x": 1}, {}),
        (dict, {"anything": {"goes": 1}}, {}),
        (str, "text", {}),
    ],
)
def test_field_that_no_parameter_reads_is_told_once(wanted, body, fields):
    binding = Binding.of(handler_of(wanted))
    binding.bind(as_json(body))

    assert {each.field: each.near for each in binding.find_unread(as_json(body))} == fields
    assert binding.find_unread(as_json(body)) == []


def test_field_inside_a_named_parameter_is_told_too():
    async def handler(ctx, point: Point, note: str = "", **rest: int): ...

    binding = Binding.of(handler)
    found = binding.find_unread(as_json({"point": {"x": 1, "yy": 2}, "other": 5}))

    assert [(each.field, each.near) for each in found] == [("point.yy", "y")]


def test_hostile_fields_are_not_told_without_end():
    binding = Binding.of(handler_of(Point))

    told = [
        each
        for number in range(200)
        for each in binding.find_unread(as_json({"x": 1, **{f"{number}-{k}" + "z" * 500: 1 for k in range(50)}}))
    ]

    assert 0 < len(told) < 40
    assert max(len(each.field) for each in told) <= 60


def test_skipped_field_that_cannot_be_read_disturbs_nothing():
    binding = Binding.of(handler_of(Point))
    body = Body("json", b'{"x": 1, "note": "\xff"}')

    assert binding.bind(body) == ((Point(1),), {})
    assert binding.find_unread(body) == []


def test_later_bodies_are_looked_at_now_and_then():
    binding = Binding.of(handler_of(Point))
    for _ in range(1000):
        assert binding.find_unread(as_json({"x": 1})) == []

    told = [each.field for _ in range(100) for each in binding.find_unread(as_json({"x": 1, "yy": 2}))]

    assert told == ["yy"]


@pytest.mark.parametrize(
    ("wanted", "body", "text"),
    [
        (str, as_json(5), "handler: `value` expected str, got int (at $)"),
        (str, as_json({"value": 5}), "handler: `value` expected str, got int (at $.value)"),
        (str, as_json({}), "handler: `value` is missing; it takes `value`"),
        (str, as_json({"valeu": "x"}), "`value` is missing; `valeu` is not a parameter (did you mean `value`?); it"),
        (str, as_json({"value": "x", "more": 1}), "handler: `more` is not a parameter; it takes `value`"),
        (str, Body("bytes", b"\xff"), "handler: `value` expected str, got bytes (at $)"),
        (int, Body("text", b"abc"), "handler: `value` expected int, got str (at $)"),
        (int, Body("json", b""), "handler: `value` expected int, got null (at $)"),
        (list[int], as_json([1, "s3cret"]), "handler: `value` expected int, got str (at $[1])"),
        (Colour, as_json("s3cret"), "handler: `value` is not one of 'red', 'blue' (at $)"),
        (Literal["a", "b"], as_json("s3cret"), "handler: `value` is not one of 'a', 'b' (at $)"),
        (list[Colour], as_json(["s3cret"]), "handler: `value` is not one of the values allowed here (at $[0])"),
        (Point, as_json({"y": 1}), "handler: `value` object missing required field x (at $)"),
        (Point, as_json({"x": "s3cret"}), "handler: `value` expected int, got str (at $.x)"),
        (Annotated[int, msgspec.Meta(ge=1)], as_json(0), "handler: `value` expected int >= 1 (at $)"),
        (datetime, as_json("s3cret"), "handler: `value` invalid RFC3339 encoded datetime (at $)"),
        (Model, as_json({"pages": "s3cret"}), "does not fit Model: title: Field required, pages: Input should be"),
        (list[Model], as_json([{}]), "handler: `value` does not fit Model: title: Field required (at $[0])"),
        (StrictModel, as_json({"at": 5.5}), "handler: `value` does not fit StrictModel: at:"),
        (str, Body("json", b"{oops"), "handler: the body cannot be read as json: "),
        (str, Body("json", b'"\xff"'), "handler: the body cannot be read as json: "),
    ],
)
def test_body_that_does_not_fit_is_explained_without_its_value(wanted, body, text):
    found = complaint(handler_of(wanted), body)

    assert text in found
    assert "s3cret" not in found


# --- several parameters: by name ---


async def several(ctx, topic: str, depth: int = 3, *, model: Model | None = None, tags: list[str] = ["a"]):  # noqa: B006
    ...


DEFAULTS = {"depth": 3, "model": None, "tags": ["a"]}
UNKNOWN = "`topik` is not a parameter (did you mean `topic`?); `q` is not a parameter"
TAKES = "it takes `topic`, `depth` (optional), `model` (optional), `tags` (optional)"


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"topic": "x"}, {"topic": "x", **DEFAULTS}),
        ({"depth": 9, "topic": "x"}, {"topic": "x", **DEFAULTS, "depth": 9}),
        ({"topic": "x", "model": {"title": "t"}}, {"topic": "x", **DEFAULTS, "model": Model(title="t")}),
    ],
)
@pytest.mark.parametrize("content_type", ["json", "msgpack", "cbor"])
def test_several_parameters_are_bound_by_name(sent, expected, content_type):
    assert bind(several, Body(content_type, ENCODE[content_type](sent))) == ((), expected)


def test_default_is_the_very_object():
    shared: list[int] = []

    async def handler(ctx, a: int = 1, b: list[int] = shared): ...

    assert bind(handler, as_json({}))[1]["b"] is shared


@pytest.mark.parametrize("body", [Body("text", b""), as_json(None), as_json({})])
def test_no_body_is_an_empty_object(body):
    async def handler(ctx, a: int = 1, b: int = 2): ...

    assert bind(handler, body) == ((), {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (as_json({}), f"several: `topic` is missing; {TAKES}"),
        (Body("text", b""), f"several: `topic` is missing; {TAKES}"),
        (as_json(None), f"several: `topic` is missing; {TAKES}"),
        (
            as_json({"topik": "s3cret", "q": 1}),
            f"several: `topic` is missing; {UNKNOWN}; {TAKES}",
        ),
        (as_json({"topic": "x", "ctx": 1}), f"several: `ctx` is not a parameter; {TAKES}"),
        (as_json(["x"]), f"several: {TAKES} by name: expected an object, got array"),
        (Body("text", b"x"), f"several: {TAKES} by name: expected an object, got str"),
        (as_json({"topic": 5}), "several: `topic` expected str, got int (at $.topic)"),
        (as_json({"topic": "x", "tags": ["a", 1]}), "several: `tags` expected str, got int (at $.tags[1])"),
        (
            as_json({"topic": "x", "model": {}}),
            "several: `model` does not fit Model: title: Field required (at $.model)",
        ),
    ],
)
def test_names_that_do_not_fit_are_listed_with_the_known_ones(body, text):
    assert complaint(several, body) == text


async def open_ended(ctx, topic: str, **rest: int): ...


def test_kwargs_take_other_names():
    assert bind(open_ended, as_json({"topic": "x", "a": 1})) == ((), {"topic": "x", "a": 1})
    assert bind(open_ended, as_json({"topic": "x"})) == ((), {"topic": "x"})


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ({"topic": "x", "a": "b"}, "open_ended: expected int, got str (at $[...])"),
        ({"topic": "x", "ctx": 1}, "open_ended: `ctx` is not a parameter; it takes `topic`, other names"),
        ({"a": 1}, "open_ended: `topic` is missing; it takes `topic`, other names"),
        ([1], "open_ended: it takes `topic`, other names by name: expected an object, got array"),
    ],
)
def test_kwargs_have_limits_too(sent, text):
    assert complaint(open_ended, as_json(sent)) == text


def test_lone_kwargs_take_an_object():
    async def handler(ctx, /, **everything): ...

    assert bind(handler, as_json({"ctx": 1, "b": [2]})) == ((), {"ctx": 1, "b": [2]})
    assert bind(handler, Body("json", b"")) == ((), {})


# --- no parameter: no body ---


@pytest.mark.parametrize("body", [Body("text", b""), as_json(None), as_json({}), Body("msgpack", b"\xc0")])
def test_handler_without_parameters_takes_no_body(body):
    async def handler(ctx): ...

    assert bind(handler, body) == ((), {})


@pytest.mark.parametrize(("body", "came"), [(as_json([]), "array"), (as_json(0), "int"), (Body("text", b"x"), "str")])
def test_handler_without_parameters_refuses_a_body(body, came):
    async def handler(ctx): ...

    assert complaint(handler, body) == f"handler: it takes no arguments, got {came}; send an empty body or null"


# --- decoration ---


async def no_context(): ...
async def forgotten_context(topic: str): ...
async def forgotten_generic_context(topics: list[str]): ...
async def starred(ctx, *topics): ...
async def positional(ctx, topic, /): ...
async def hidden(ctx, topic: Hidden): ...
async def foreign(ctx, thing: Foreign): ...
async def foreign_inside(ctx, things: dict[str, list[Foreign]], other: int): ...
async def two_models(ctx, thing: Model | Shelf | StrictModel): ...
async def keyword_context(*, ctx): ...
def blocking(ctx): ...


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (no_context, "no_context must take the context first: `async def no_context(ctx, …)`"),
        (keyword_context, "must take the context first"),
        (forgotten_context, "`topic` is annotated as data; write `async def forgotten_context(ctx, topic: …)`"),
        (forgotten_generic_context, "`topics` is annotated as data"),
        (starred, "takes *topics, but a body has no positions; take `topics: list` instead"),
        (positional, "parameter `topic` is positional-only"),
        (hidden, "the annotation `Hidden` of parameter `topic` cannot be resolved (name 'Hidden' is not defined)"),
        (foreign, "parameter `thing`: a "),
        (foreign_inside, "parameter `things`: a "),
        (two_models, "parameter `thing`: Type unions"),
        (blocking, "blocking must be an `async def` function"),
        (functools.partial(several, topic="x"), "must be an `async def` function"),
        (Foreign, "must be an `async def` function"),
    ],
)
def test_function_that_cannot_be_a_handler_is_refused_with_the_fix(function, text):
    with pytest.raises(UsageError) as caught:
        Binding.of(function)

    assert text in str(caught.value)


def test_complaint_about_a_function_names_file_and_line():
    with pytest.raises(UsageError, match=rf"test_binding\.py:{blocking.__code__.co_firstlineno}: blocking"):
        Binding.of(blocking)


def test_context_annotation_may_be_hidden_from_run_time():
    assert Binding.of(whole).parameters[0].name == "topic"


def test_annotations_may_name_local_classes():
    @dataclass
    class Local:
        x: int

    async def handler(ctx, value: list[Local]): ...

    assert bind(handler, as_json([{"x": 1}])) == (([Local(1)],), {})


def test_decorated_handler_keeps_its_own_signature():
    @functools.wraps(several)
    async def wrapper(*args, **kwargs): ...

    assert [each.name for each in Binding.of(wrapper).parameters] == ["topic", "depth", "model", "tags"]


def test_registered_name_is_the_one_in_complaints():
    with pytest.raises(InvalidArguments, match=r"^find: `topic` expected str"):
        Binding.of(whole, name="find").bind(as_json(1))


# --- results ---


def _cycle() -> list[Any]:
    it: list[Any] = []
    it.append(it)
    return it


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (Foreign(), r"whole: the result cannot be encoded at \$: cannot store a .*Foreign"),
        ({"a": [1, {"b": Foreign()}]}, r"at \$\.a\[1\]\.b: cannot store a .*Foreign"),
        (Point(x=Foreign()), r"at \$\.x:"),  # type: ignore[arg-type]
        (Order(item=Foreign()), r"at \$\.item:"),  # type: ignore[arg-type]
        ({"a": "\ud800"}, r"at \$\.a:"),
        (_cycle(), "contains itself"),
    ],
)
def test_result_that_cannot_be_sent_is_located(result, text):
    with pytest.raises(UsageError, match=text):
        Binding.of(whole).check_result(result)


@pytest.mark.parametrize(
    "result", [None, {"a": [1, 2.5, "x"]}, Point(1), Order("hat"), Model(title="t"), b"raw", Colour.RED]
)
def test_result_that_can_be_sent_passes(result):
    Binding.of(whole).check_result(result)


# --- for any input, and fast ---

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["topic", "depth", "q"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(JSON)
def test_any_value_is_bound_or_refused_and_kinds_agree(value):
    outcomes = []
    for content_type, encode in ENCODE.items():
        for function in (whole, several, open_ended):
            try:
                outcomes.append((function, bind(function, Body(content_type, encode(value)))))
            except InvalidArguments as error:
                outcomes.append((function, str(error)))

    assert outcomes[0:3] == outcomes[3:6] == outcomes[6:9]
    assert json.dumps(value)  # the examples are plain JSON


@given(st.binary(max_size=40), st.sampled_from(["json", "msgpack", "text", "bytes"]))
def test_any_bytes_are_bound_or_refused(raw, content_type):
    for function in (whole, several, open_ended):
        with contextlib.suppress(InvalidArguments):
            assert bind(function, Body(content_type, raw))


def test_binding_a_call_takes_microseconds():
    binding, body = Binding.of(several), as_json({"topic": "x", "depth": 4})

    best = min(_elapsed(binding, body) for _ in range(5))

    assert best < 50e-6  # about 1 µs; the limit allows for a busy machine


def _elapsed(binding: Binding, body: Body) -> float:
    start = time.perf_counter()
    for _ in range(1000):
        binding.bind(body)
    return (time.perf_counter() - start) / 1000
