"""Members of sets and keys of dicts whose hashes a sender can choose.

Python salts the hashes of texts and bytes, and not those of numbers, UUIDs, decimals and what is made of them. A body
itself has texts as keys. A parameter `set[int]` or `dict[UUID, …]` makes numbers of them: n members with one hash take
n² steps, and the event loop waits.

Values that were not chosen for it practically never share the whole of a hash, so a few that do are enough to refuse.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from decimal import Decimal
from typing import Any, Union
from uuid import UUID

import msgspec
from msgspec import inspect as types

from coatcheck.decoding import Refused
from coatcheck.worker.unread_fields import nodes

FEWEST_BYTES = 1024
FEWEST_MEMBERS = 128
"""So many members of one hash take less than 2 ms."""
MOST_OF_ONE_HASH = 16

_SALTED = (types.StrType, types.BytesType, types.EnumType, types.LiteralType, types.BoolType, types.NoneType)
_PLAIN = {
    types.IntType: int,
    types.FloatType: float,
    types.DecimalType: Decimal,
    types.UUIDType: UUID,
    types.TimeDeltaType: timedelta,
}
_HOLDERS = (dict, list, tuple, set, frozenset)
_UNSEEN = (int, UUID, Decimal, tuple[int, ...])
"""What a pydantic model may have in its sets; msgspec does not look into it."""


def chosen_members(wanted: Any) -> tuple[Any, ...]:
    """The types of members and keys, anywhere in a type, whose hashes are not salted."""
    found: list[Any] = []
    for each in nodes(types.type_info(wanted)):
        if isinstance(each, types.SetType | types.FrozenSetType):
            member = each.item_type
        elif isinstance(each, types.DictType) and not isinstance(each.key_type, types.AnyType):
            member = each.key_type  # without a type, keys stay text
        elif isinstance(each, types.CustomType):
            found += _UNSEEN
            continue
        else:
            continue
        if not isinstance(_bare(member), _SALTED):
            found.append(_type_of(member))
    return tuple(dict.fromkeys(found))


def all_of_json(raw: bytes) -> Any:
    """Read JSON with every value of a name that comes twice: a decoder builds them all, and keeps the last."""
    try:
        return json.loads(raw, object_pairs_hook=_Pairs)
    except ValueError as error:
        raise Refused("it is not valid") from error


class _Pairs(list[tuple[str, Any]]):
    """The names and values of an object."""


def check_members(value: Any, members: tuple[Any, ...], dec_hook: Callable[[Any, Any], Any]) -> None:
    """Raise Refused if a list of a decoded body, or the keys of an object, would be a set of one hash."""
    for group in _large_groups(value):
        for member in members:
            _check_group(group, member, dec_hook)


def _check_group(group: list[Any], member: Any, dec_hook: Callable[[Any, Any], Any]) -> None:
    known: dict[str, list[Any]] = {}  # by the text of a hash, for that is salted
    for each in group:
        try:
            built = msgspec.convert(_plain(each), member, strict=False, dec_hook=dec_hook)
            rivals = known.setdefault(str(hash(built)), [])
        except (msgspec.ValidationError, TypeError):  # what stands before it is built all the same
            continue
        if built not in rivals:
            rivals.append(built)
            if len(rivals) > MOST_OF_ONE_HASH:
                raise Refused(f"more than {MOST_OF_ONE_HASH} members of a set, or keys, have one hash")


def _plain(value: Any) -> Any:
    if isinstance(value, _Pairs):
        return {name: _plain(each) for name, each in value}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _large_groups(value: Any) -> Iterator[list[Any]]:
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, _Pairs):
            names, values = [name for name, _ in each], [it for _, it in each]
        elif isinstance(each, dict):
            names, values = list(each), list(each.values())
        else:
            names = values = list(each) if isinstance(each, _HOLDERS) else []
        if len(names) > FEWEST_MEMBERS:
            yield names
        left.extend(it for it in values if isinstance(it, _HOLDERS))


def _bare(info: types.Type) -> types.Type:
    return _bare(info.type) if isinstance(info, types.Metadata) else info


def _type_of(info: types.Type) -> Any:
    """The type that msgspec describes, without limits on its values. Any, where it cannot be a member."""
    info = _bare(info)
    if isinstance(info, types.TupleType):
        return tuple[tuple(_type_of(each) for each in info.item_types)]  # type: ignore[misc]
    if isinstance(info, types.VarTupleType):
        return tuple[_type_of(info.item_type), ...]  # type: ignore[misc]
    if isinstance(info, types.FrozenSetType):
        return frozenset[_type_of(info.item_type)]  # type: ignore[misc]
    if isinstance(info, types.UnionType):
        return Union[tuple(_type_of(each) for each in info.types)]  # noqa: UP007 - made at run time
    if isinstance(info, types.StrType):
        return str
    return _PLAIN.get(type(info)) or getattr(info, "cls", Any)
