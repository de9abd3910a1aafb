"""From a message body to a handler's arguments.

One parameter after the context takes the whole body, or is bound by name from an object if its type takes no object;
several are bound by name; none takes no body.
What an annotation means is worked out once, at decoration, where a mistake is the programmer's and raises UsageError
with file, line and fix. A body that does not fit is the requester's and raises InvalidArguments, whose text says what
was expected and which type came: never the value, for that text is sent back and logged.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import sys
import typing
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from types import NoneType, UnionType
from typing import Any, Protocol, Self, get_args, get_origin
from uuid import UUID

import msgspec
from msgspec import ValidationError
from msgspec import inspect as inspected

from coatcheck.decoding import Refused, check_msgpack
from coatcheck.errors import InvalidArguments, UsageError
from coatcheck.store import blobs
from coatcheck.worker.hash_flooding import FEWEST_BYTES, all_of_json, check_members, chosen_members
from coatcheck.worker.unread_fields import FieldWatch, Unread, nodes, watch_for

__all__ = ["Binding", "Handler", "Parameter", "RequestBody"]

Handler = Callable[..., Awaitable[Any]]
Bound = tuple[tuple[Any, ...], dict[str, Any]]

_SUPPORTED = "builtins, dataclasses, msgspec structs, TypedDicts, enums, datetimes, UUID, Decimal or pydantic models"
# A first parameter of one of these types is data: the context was forgotten.
_DATA_TYPES = (str, int, float, bool, bytes, dict, list, tuple, set, datetime, date, Decimal, UUID)
# No body that is an object fits one of these.
_NEVER_OBJECTS = (
    *(inspected.StrType, inspected.IntType, inspected.FloatType, inspected.BoolType, inspected.NoneType),
    *(inspected.BytesType, inspected.ByteArrayType, inspected.MemoryViewType),
    *(inspected.DecimalType, inspected.UUIDType),
    *(inspected.DateTimeType, inspected.DateType, inspected.TimeType, inspected.TimeDeltaType),
    *(inspected.EnumType, inspected.LiteralType, inspected.ListType, inspected.SetType, inspected.FrozenSetType),
    *(inspected.TupleType, inspected.VarTupleType, inspected.CollectionType, inspected.NamedTupleType),
)
_MOST_NAMES = 8
_LONGEST_NAME = 60


class RequestBody(Protocol):
    """What a message carries. `content_type` is json, msgpack, cbor, text or bytes; `decode` gives plain builtins."""

    @property
    def content_type(self) -> str: ...

    @property
    def raw(self) -> bytes: ...

    def decode(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument a handler takes from the body."""

    name: str
    type: Any
    default: Any = inspect.Parameter.empty
    is_keyword_only: bool = False

    @property
    def is_required(self) -> bool:
        return self.default is inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Binding:
    """A handler and how its arguments are read. Made once by `Binding.of`; `bind` is the part that runs per message."""

    name: str
    function: Handler
    parameters: tuple[Parameter, ...]
    location: str
    _shape: _Nothing | _Whole | _ByName
    _watch: FieldWatch | None

    @classmethod
    def of(cls, function: Handler, *, name: str | None = None) -> Self:
        """Read a handler's signature. Raises UsageError with the place and the fix when it cannot serve as one."""
        name = name or str(getattr(function, "__name__", function))
        location = _location(function)
        if not inspect.iscoroutinefunction(function) or not hasattr(inspect.unwrap(function), "__code__"):
            raise UsageError(
                f"{location}: {name} must be an `async def` function, "
                "such as `async def handler(ctx, topic: str)`; blocking work belongs in `ctx.step`"
            )
        signature = tuple(inspect.signature(function).parameters.values())
        _check_signature(signature, name=name, location=location)
        hints = _resolve(function, signature, name=name, location=location)
        parameters, extra = _parameters(signature[1:], hints)
        try:
            shape = _shape_of(parameters, extra, context=signature[0])
            watch = None if isinstance(shape, _Nothing) else watch_for(shape.reader.type)
        except (TypeError, NameError) as error:
            raise UsageError(f"{location}: {name}: {error}; a parameter takes {_SUPPORTED}") from error
        return cls(name=name, function=function, parameters=parameters, location=location, _shape=shape, _watch=watch)

    def bind(self, body: RequestBody) -> Bound:
        """Return the positional and keyword arguments that follow the context. Raises InvalidArguments."""
        try:
            try:
                return self._shape.bind(body)
            except ValidationError as error:
                complaint = self._shape.explain(body, str(error))
        except (msgspec.DecodeError, Refused, UnicodeDecodeError, RecursionError) as error:
            reason = str(error) if isinstance(error, msgspec.DecodeError | Refused) else type(error).__name__
            complaint = f"the body cannot be read as {body.content_type}: {reason}"
        # Raised out here, because msgspec's own text may quote the value and would come along as the context.
        raise InvalidArguments(f"{self.name}: {complaint}")

    def find_unread(self, body: RequestBody) -> list[Unread]:
        """The fields that were sent and no parameter reads, each told once. Call it after `bind`."""
        return [] if self._watch is None else self._watch.look(body)

    def check_result(self, value: Any) -> None:
        """Raise UsageError, with the path of the culprit, if `value` cannot be sent. Slow: for when encoding failed."""
        found = _find_unencodable(value, path="$")
        if found is not None:
            path, reason = found
            error = UsageError(f"{self.name}: the result cannot be encoded at {path}: {reason}")
            error.add_note(f"{self.name} is defined at {self.location}")  # not in the text: that is sent
            raise error


class _Reader:
    """A type with the decoders that read it, made once."""

    __slots__ = ("_has_other_keys", "_json", "_members", "_msgpack", "type")

    def __init__(self, wanted: Any) -> None:
        self.type = wanted
        self._json: msgspec.json.Decoder[Any] = msgspec.json.Decoder(wanted, dec_hook=_build_foreign)
        self._msgpack: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(wanted, dec_hook=_build_foreign)
        parts = list(nodes(inspected.type_info(wanted)))
        self._has_other_keys = any(
            isinstance(each, inspected.DictType) and not isinstance(each.key_type, _TEXT_KEYS) for each in parts
        )
        self._members = chosen_members(wanted)
        for custom in (each.cls for each in parts if isinstance(each, inspected.CustomType)):
            if not hasattr(custom, "model_validate"):
                raise TypeError(f"a {custom.__module__}.{custom.__qualname__} cannot be read from a message")

    def read(self, body: RequestBody) -> Any:
        if body.content_type == "json":
            if self._members and len(body.raw) > FEWEST_BYTES:
                check_members(all_of_json(body.raw), self._members, _build_foreign)
            return self._json.decode(body.raw)
        if body.content_type == "msgpack" and not (self._has_other_keys or self._members):
            check_msgpack(body.raw)  # the body of a row may have been let in by an older release
            return self._msgpack.decode(body.raw)
        return self.convert(body.decode())

    def convert(self, value: Any) -> Any:
        """Read a value of plain builtins. Keys are text in every format, so numbers among them are spelled out."""
        if self._members:
            check_members(value, self._members, _build_foreign)
        return msgspec.convert(value, self.type, dec_hook=_build_foreign, str_keys=True)


@dataclass(frozen=True, slots=True)
class _Nothing:
    """No parameters: an empty body, a null or an empty object, so that every kind of client can call it."""

    def bind(self, body: RequestBody) -> Bound:
        if body.raw and body.decode() not in (None, {}, ""):
            raise ValidationError("unexpected body")
        return (), {}

    def explain(self, body: RequestBody, reason: str) -> str:
        return f"it takes no arguments, got {_kind_of(body.decode())}; send an empty body or null"


@dataclass(frozen=True, slots=True)
class _Whole:
    """One parameter: the body is the argument. No body, or a null that does not fit, means the default.

    Senders also write `{"topic": "x"}` for `topic: str`. Where the type takes no object, an object is bound by name.
    """

    parameter: Parameter
    reader: _Reader
    is_bytes: bool  # bytes are handed over as they came, under any content type
    by_name: _ByName | None  # for objects; None if the parameter itself may be one

    def bind(self, body: RequestBody) -> Bound:
        if not body.raw:
            return self._bind_empty(body)
        if self.is_bytes:
            return self._bound(body.raw)
        try:
            return self._bound(self.reader.read(body))
        except ValidationError:
            value = body.decode()
            if not self.parameter.is_required and value is None:
                return (), {}
            if self.by_name is not None and isinstance(value, dict):
                return self.by_name.bind(body)
            raise

    def _bind_empty(self, body: RequestBody) -> Bound:
        if not self.parameter.is_required:
            return (), {}
        if self.is_bytes or body.content_type == "bytes":
            return self._bound(self.reader.convert(b""))
        if body.content_type == "text":
            return self._bound(self.reader.convert(""))
        return self._bound(self.reader.convert(None))

    def _bound(self, value: Any) -> Bound:
        return ((), {self.parameter.name: value}) if self.parameter.is_keyword_only else ((value,), {})

    def explain(self, body: RequestBody, reason: str) -> str:
        if self.by_name is not None and body.raw and isinstance(body.decode(), dict):
            return self.by_name.explain(body, reason)
        return f"`{self.parameter.name}` {_plain(reason, self.parameter.type)}"


@dataclass(frozen=True, slots=True)
class _ByName:
    """Several parameters, or **kwargs: the body is an object. `extra` reads what **kwargs takes."""

    parameters: tuple[Parameter, ...]
    reader: _Reader
    extra: _Reader | None
    context: str | None  # the name that **kwargs must not bring along

    def bind(self, body: RequestBody) -> Bound:
        if self.extra is not None:
            return (), self._bind_open(body, self.extra)
        if not body.raw:
            return (), msgspec.structs.asdict(self.reader.convert({}))
        try:
            return (), msgspec.structs.asdict(self.reader.read(body))
        except ValidationError:
            if body.decode() is not None:
                raise
            return (), msgspec.structs.asdict(self.reader.convert({}))

    def _bind_open(self, body: RequestBody, extra: _Reader) -> dict[str, Any]:
        value = body.decode() if body.raw else None
        value = {} if value is None else value
        if not isinstance(value, dict):
            raise ValidationError(f"Expected `object`, got `{_kind_of(value)}`")
        if self.context in value:
            raise ValidationError(f"Object contains unknown field `{self.context}`")
        names = {each.name for each in self.parameters}
        known = self.reader.convert({key: item for key, item in value.items() if key in names})
        rest = extra.convert({key: item for key, item in value.items() if key not in names})
        return {**msgspec.structs.asdict(known), **rest}

    def explain(self, body: RequestBody, reason: str) -> str:
        value = body.decode() if body.raw else {}
        value = {} if value is None else value
        if not isinstance(value, dict):
            return f"it takes {self._names()} by name: expected an object, got {_kind_of(value)}"
        complaints = [*self._missing(value), *self._unknown(value)]
        if complaints:
            return f"{'; '.join(complaints)}; it takes {self._names()}"
        found = re.search(r" - at `\$\.(\w+)", reason)
        wanted = next((each.type for each in self.parameters if found and each.name == found[1]), Any)
        return f"`{found[1]}` {_plain(reason, wanted)}" if found else _plain(reason, Any)

    def _missing(self, value: Mapping[str, object]) -> Iterator[str]:
        for each in self.parameters:
            if each.is_required and each.name not in value:
                yield f"`{each.name}` is missing"

    def _unknown(self, value: Mapping[object, object]) -> Iterator[str]:
        names = [each.name for each in self.parameters]
        unknown = [key for key in value if (key == self.context if self.extra else key not in names)]
        for key in unknown[:_MOST_NAMES]:
            shown = str(key)[:_LONGEST_NAME]
            near = difflib.get_close_matches(shown, names, n=1)
            yield f"`{shown}` is not a parameter" + (f" (did you mean `{near[0]}`?)" if near else "")

    def _names(self) -> str:
        known = [f"`{each.name}`" if each.is_required else f"`{each.name}` (optional)" for each in self.parameters]
        return ", ".join(known + (["other names"] if self.extra else [])) or "no arguments"


def _shape_of(
    parameters: tuple[Parameter, ...], extra: Any, *, context: inspect.Parameter
) -> _Nothing | _Whole | _ByName:
    if extra is None and not parameters:
        return _Nothing()
    if extra is None and len(parameters) == 1:
        (only,) = parameters
        reader, is_bytes = _reader_of(only), _without_none(only.type) is bytes
        by_name = None if is_bytes or _takes_object(reader.type) else _by_name(parameters, None, context)
        return _Whole(only, reader=reader, is_bytes=is_bytes, by_name=by_name)
    return _by_name(parameters, extra, context)


def _takes_object(wanted: Any) -> bool:
    info = inspected.type_info(wanted)
    info = info.type if isinstance(info, inspected.Metadata) else info
    members = info.types if isinstance(info, inspected.UnionType) else (info,)
    return not all(isinstance(each, _NEVER_OBJECTS) for each in members)


def _by_name(parameters: tuple[Parameter, ...], extra: Any, context: inspect.Parameter) -> _ByName:
    for each in parameters:
        _reader_of(each)  # the struct's own complaint would not name the parameter
    fields = [_field_of(each) for each in parameters]
    struct = msgspec.defstruct("Arguments", fields, forbid_unknown_fields=True, kw_only=True)
    return _ByName(
        parameters,
        reader=_Reader(struct),
        extra=None if extra is None else _Reader(dict[str, extra]),
        context=None if context.kind is context.POSITIONAL_ONLY else context.name,
    )


def _reader_of(parameter: Parameter) -> _Reader:
    try:
        return _Reader(parameter.type)
    except (TypeError, NameError) as error:
        raise TypeError(f"parameter `{parameter.name}`: {error}") from error


def _field_of(parameter: Parameter) -> Any:
    if parameter.is_required:
        return parameter.name, parameter.type
    # A factory, because msgspec copies or refuses mutable defaults and Python hands over the object itself.
    return parameter.name, parameter.type, msgspec.field(default_factory=lambda: parameter.default)


def _check_signature(signature: tuple[inspect.Parameter, ...], *, name: str, location: str) -> None:
    if not signature or signature[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        raise UsageError(f"{location}: {name} must take the context first: `async def {name}(ctx, …)`")
    for each in signature[1:]:
        if each.kind is each.VAR_POSITIONAL:
            raise UsageError(
                f"{location}: {name} takes *{each.name}, but a body has no positions; take `{each.name}: list` instead"
            )
        if each.kind is each.POSITIONAL_ONLY:
            raise UsageError(
                f"{location}: {name}: parameter `{each.name}` is positional-only, but arguments are bound by name; "
                "move the `/` behind the context or remove it"
            )


def _resolve(
    function: Handler, signature: tuple[inspect.Parameter, ...], *, name: str, location: str
) -> dict[str, Any]:
    """Return the annotations of the arguments as types. The context's own may stay unresolved: we do not need it."""
    inner = inspect.unwrap(function)
    hints = {}
    for position, each in enumerate(signature):
        if each.annotation is each.empty:
            continue
        try:
            hints[each.name] = _evaluate(each.annotation, inner)
        except (NameError, AttributeError, SyntaxError, TypeError) as error:
            if position == 0:
                continue
            raise UsageError(
                f"{location}: {name}: the annotation `{each.annotation}` of parameter `{each.name}` cannot be "
                f"resolved ({error}); import the name at the top of the module, outside `if TYPE_CHECKING`"
            ) from error
    first = signature[0].name
    given = hints.pop(first, None)
    if (get_origin(given) or given) in _DATA_TYPES:
        raise UsageError(
            f"{location}: {name} must take the context first, but `{first}` is annotated as data; "
            f"write `async def {name}(ctx, {first}: …)`"
        )
    return hints


def _evaluate(annotation: Any, function: Any) -> Any:
    def holder() -> None: ...

    holder.__annotations__ = {"it": annotation}
    namespace = vars(sys.modules[function.__module__]) if function.__module__ in sys.modules else {}
    namespace = getattr(function, "__globals__", namespace)
    try:
        return typing.get_type_hints(holder, namespace, include_extras=True)["it"]
    except NameError:
        # A handler written inside a function may be annotated with that function's locals.
        return typing.get_type_hints(holder, namespace, _enclosing_locals(function), include_extras=True)["it"]


def _enclosing_locals(function: Any) -> dict[str, Any]:
    """Return the variables of the call that is defining `function`, which is still on the stack at decoration."""
    frame = inspect.currentframe()
    while frame is not None:
        if function.__code__ in frame.f_code.co_consts:
            return dict(frame.f_locals)
        frame = frame.f_back
    return {}


def _parameters(
    signature: tuple[inspect.Parameter, ...], hints: Mapping[str, Any]
) -> tuple[tuple[Parameter, ...], Any]:
    """Return the arguments a body is bound to, and the type of what **kwargs takes: None if there is none."""
    named, extra = [], None
    for each in signature:
        wanted = hints.get(each.name, Any)
        wanted = Any if wanted is object else wanted
        if each.kind is each.VAR_KEYWORD:
            extra = wanted
        else:
            named.append(Parameter(each.name, wanted, each.default, each.kind is each.KEYWORD_ONLY))
    return tuple(named), extra


_TEXT_KEYS = (inspected.StrType, inspected.BytesType, inspected.AnyType)


def _build_foreign(wanted: Any, value: Any) -> Any:
    """The msgspec hook for pydantic models. Its complaint is rewritten, for pydantic's own quotes the input."""
    import pydantic

    try:
        if wanted.model_config.get("strict"):  # strict models take dates and the like as text from JSON only
            return wanted.model_validate_json(msgspec.json.encode(value))
        return wanted.model_validate(value)
    except pydantic.ValidationError as error:
        details = error.errors(include_input=False, include_url=False, include_context=False)
        found = [f"{'.'.join(str(part) for part in each['loc']) or 'it'}: {each['msg']}" for each in details]
        raise ValueError(f"does not fit {wanted.__name__}: {', '.join(found[:_MOST_NAMES])}") from None


def _plain(reason: str, wanted: Any) -> str:
    """Turn msgspec's sentence into ours: "expected str, got int (at $.topic)", without any value it quotes."""
    text, separator, path = reason.rpartition(" - at `")
    if not separator:
        text, path = reason, "$`"
    text = re.sub(
        r"^(Invalid enum value|Invalid value) .*", rf"is not one of {_choices(wanted)}", text, flags=re.DOTALL
    )
    text = text.replace("got `None`", "got null").replace("`", "")  # what MessagePack's decoder calls a null
    return f"{text[:1].lower()}{text[1:]} (at {path.removesuffix('`')})"


def _choices(wanted: Any) -> str:
    """List what an enum or Literal allows, if that is what was asked for itself."""
    wanted = _without_none(wanted)
    if get_origin(wanted) is typing.Literal:
        return ", ".join(repr(each) for each in get_args(wanted)[:20])
    members = getattr(wanted, "__members__", {})
    return ", ".join(repr(each.value) for each in list(members.values())[:20]) or "the values allowed here"


def _without_none(wanted: Any) -> Any:
    if get_origin(wanted) in (typing.Union, UnionType):
        rest = [each for each in get_args(wanted) if each is not NoneType]
        return rest[0] if len(rest) == 1 else wanted
    return wanted


_KINDS = {NoneType: "null", dict: "object", list: "array", bool: "bool", bytes: "bytes", str: "str"}


def _kind_of(value: object) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def _find_unencodable(value: Any, *, path: str) -> tuple[str, str] | None:
    """Return path and reason of the innermost part that cannot be encoded, or None if all of it can."""
    try:
        blobs.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        reason = "it contains itself, or is nested too deeply" if isinstance(error, RecursionError) else str(error)
        if isinstance(error, RecursionError):
            return path, reason
    else:
        return None
    for suffix, child in _children(value):
        found = _find_unencodable(child, path=path + suffix)
        if found is not None:
            return found
    return path, reason


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f".{key}" if isinstance(key, str) else "[…]", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{position}]", item) for position, item in enumerate(value))
    elif isinstance(value, msgspec.Struct):
        yield from ((f".{name}", getattr(value, name)) for name in value.__struct_fields__)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{each.name}", getattr(value, each.name)) for each in dataclasses.fields(value))


def _location(function: Any) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else "(no source)"
