"""Tables by name: all stores of `memory://name` in one process have the same rows."""

from __future__ import annotations

from coatcheck.errors import InvalidSettings
from coatcheck.store.memory.tables import Tables

_TABLES: dict[str, Tables] = {}


def find_tables(name: str) -> Tables:
    """The tables of this name, made at the first call. They live as long as the process. Raises InvalidSettings."""
    if not all(letter.isalnum() or letter in "-_." for letter in name):
        raise InvalidSettings(
            f"the store address memory://{name} has a name that is no name; "
            "write memory:// or memory://name, with letters, digits, '-', '_' and '.'"
        )
    return _TABLES.setdefault(name, Tables())
