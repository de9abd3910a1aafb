"""Which store an address means."""

from __future__ import annotations

from coatcheck.store.port import Operations

MEMORY = "memory://"


def is_in_memory(url: str) -> bool:
    """Tell whether what is at this address lives and ends with the process that opens it."""
    return url.startswith(MEMORY)


def open_operations(url: str, *, pool_size: int, begins: bool) -> Operations:
    """The operations at this address. Nothing is connected before the first of them. Raises InvalidSettings."""
    if is_in_memory(url):
        from coatcheck.store.memory.operations import MemoryOperations
        from coatcheck.store.memory.shared import find_tables

        return MemoryOperations(find_tables(url.removeprefix(MEMORY)))
    from coatcheck.store.postgres.operations import PostgresOperations

    return PostgresOperations(url, pool_size=pool_size, begins=begins)
