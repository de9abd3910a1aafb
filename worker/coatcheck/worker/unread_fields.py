"""Fields of a body that no parameter reads: most likely a sender's typo, which would otherwise pass in silence.

Dataclasses, TypedDicts, structs and pydantic models skip a field they do not know. That stays so, for a sender may be
newer than the handler; but each such field is reported once. To find it, the body is read a second time, so only some
bodies are looked at: the first ones of a handler, then one in a hundred.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from msgspec import MsgspecError
from msgspec import inspect as types

from coatcheck.errors import CoatcheckError

FIRST_BODIES = 20
ONE_IN = 100
LARGEST_BODY = 64 * 1024
MOST_REPORTED = 20
MOST_IN_ONE = 8
MOST_ITEMS = 3
"""Items of one list or mapping that are looked into; the others are most likely alike."""
LONGEST_NAME = 60

Fields = types.StructType | types.DataclassType | types.TypedDictType
Items = types.ListType | types.SetType | types.FrozenSetType | types.VarTupleType | types.CollectionType


class Readable(Protocol):
    @property
    def raw(self) -> bytes: ...

    def decode(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Unread:
    """A field that was sent and not read: where it stands in the body, and the known name it resembles, if any."""

    field: str
    near: str | None

    def facts(self) -> dict[str, str]:
        """What a log line says of it."""
        return {"field": self.field} | ({"did_you_mean": self.near} if self.near else {})


class FieldWatch:
    """Looks at some bodies of one handler, and tells each unread field once."""

    __slots__ = ("_body_count", "_reported", "_wanted")

    def __init__(self, wanted: types.Type) -> None:
        self._wanted = wanted
        self._body_count = 0
        self._reported: set[str] = set()

    def look(self, body: Readable) -> list[Unread]:
        """The fields of this body that no parameter reads and that were not told before. Mostly it does not look."""
        self._body_count += 1
        if self._body_count > FIRST_BODIES and self._body_count % ONE_IN:
            return []
        if len(self._reported) >= MOST_REPORTED or not 0 < len(body.raw) <= LARGEST_BODY:
            return []
        try:
            value = body.decode()
        except (ValueError, RecursionError, MsgspecError, CoatcheckError):
            return []  # a field that was skipped is no text, say: it was bound all the same
        found = {each.field: each for each in find_unread(value, self._wanted)}
        new = [each for field, each in found.items() if field not in self._reported]
        self._reported.update(each.field for each in new)
        return new


def watch_for(wanted: Any) -> FieldWatch | None:
    """A watch for bodies of this type; None if the type reads, or refuses, everything it is sent."""
    info = types.type_info(wanted)
    return FieldWatch(info) if any(_skips(each) for each in nodes(info)) else None


def nodes(info: object, seen: set[int] | None = None) -> Iterator[object]:
    """Walk msgspec's description of a type: every part of it, once."""
    seen = set() if seen is None else seen
    if id(info) in seen:
        return
    seen.add(id(info))
    if isinstance(info, tuple):
        for each in info:
            yield from nodes(each, seen)
    elif isinstance(info, types.Type | types.Field):
        yield info
        for name in info.__struct_fields__:
            yield from nodes(getattr(info, name), seen)


def find_unread(value: Any, wanted: types.Type, path: str = "") -> Iterator[Unread]:
    """Lay a decoded body beside its type. Where several types could be meant, nothing is said."""
    if isinstance(wanted, types.Metadata):
        yield from find_unread(value, wanted.type, path)
    elif isinstance(wanted, types.UnionType):
        fitting = [each for each in wanted.types if _may_be(value, each)]
        if len(fitting) == 1:
            yield from find_unread(value, fitting[0], path)
    elif isinstance(wanted, Items) and isinstance(value, list):
        for item in value[:MOST_ITEMS]:
            yield from find_unread(item, wanted.item_type, f"{path}[]")
    elif isinstance(wanted, types.DictType) and isinstance(value, dict):
        for item in islice(value.values(), MOST_ITEMS):
            yield from find_unread(item, wanted.value_type, f"{path}.*")
    elif isinstance(value, dict):
        yield from _find_in_object(value, wanted, path)


def _find_in_object(value: Mapping[Any, Any], wanted: types.Type, path: str) -> Iterator[Unread]:
    known = _fields_of(wanted)
    if known is None:
        return
    if _skips(wanted):
        yield from islice(_strangers(value, known, path), MOST_IN_ONE)
    for name, inner in known.items():
        if inner is not None and name in value:
            yield from find_unread(value[name], inner, _join(path, name))


def _strangers(value: Iterable[Any], known: Mapping[str, Any], path: str) -> Iterator[Unread]:
    for key in value:
        if key not in known:
            shown = str(key)[:LONGEST_NAME]
            near = difflib.get_close_matches(shown, known, n=1)
            yield Unread(_join(path, shown), near[0] if near else None)


def _fields_of(wanted: types.Type) -> dict[str, types.Type | None] | None:
    """The names an object of this type may carry, with what is expected under each; None if that is not known."""
    if isinstance(wanted, Fields):
        found: dict[str, types.Type | None] = {each.encode_name: each.type for each in wanted.fields}
        if isinstance(wanted, types.StructType) and wanted.tag_field is not None:
            found[wanted.tag_field] = None
        return found
    model = getattr(wanted.cls, "model_fields", None) if isinstance(wanted, types.CustomType) else None
    if model is None:
        return None
    names = {name for field, it in model.items() for name in (field, it.alias, it.validation_alias) if name is not None}
    return dict.fromkeys(names) if all(isinstance(name, str) for name in names) else None


def _skips(wanted: object) -> bool:
    """Tell whether this type takes an object with a field it does not know, and drops the field."""
    if isinstance(wanted, types.StructType):
        return not wanted.forbid_unknown_fields and not wanted.array_like
    if isinstance(wanted, types.CustomType):
        config = getattr(wanted.cls, "model_config", {"extra": "allow"})
        return config.get("extra") not in {"allow", "forbid"}
    return isinstance(wanted, types.DataclassType | types.TypedDictType)


def _may_be(value: Any, wanted: types.Type) -> bool:
    if isinstance(value, list):
        return isinstance(wanted, Items)
    if not isinstance(value, dict):
        return False
    if isinstance(wanted, types.StructType) and wanted.tag_field is not None:
        return bool(value.get(wanted.tag_field) == wanted.tag)
    return isinstance(wanted, Fields | types.CustomType | types.DictType)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
