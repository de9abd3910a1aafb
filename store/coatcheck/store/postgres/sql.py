"""The statements of `statements.sql`, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files

from sqlalchemy import TextClause, text

_HEAD = re.compile(r"^-- (name|part): (\w+)$", re.MULTILINE)
_HOLE = re.compile(r"\{(\w+)\}")


def _read() -> tuple[dict[str, str], frozenset[str]]:
    """All pieces by their names, and the names of those that are whole statements."""
    _, *found = _HEAD.split(files(__package__).joinpath("statements.sql").read_text(encoding="utf-8"))
    kinds, names, bodies = found[::3], found[1::3], found[2::3]
    pieces = {name: _without_comments(body) for name, body in zip(names, bodies, strict=True)}
    return pieces, frozenset(name for kind, name in zip(kinds, names, strict=True) if kind == "name")


def _without_comments(body: str) -> str:
    return "\n".join(line for line in body.splitlines() if line and not line.lstrip().startswith("--"))


def _filled(piece: str, pieces: Mapping[str, str]) -> str:
    """The piece with those that it names in their places. Other holes are left to the code that uses it."""
    return _HOLE.sub(lambda hole: _filled(pieces[hole[1]], pieces) if hole[1] in pieces else hole[0], piece)


_PIECES, _WHOLE = _read()
PARTS: dict[str, str] = {name: _filled(piece, _PIECES) for name, piece in _PIECES.items() if name not in _WHOLE}
STATEMENTS: dict[str, TextClause] = {name: text(_filled(_PIECES[name], _PIECES)) for name in _WHOLE}
