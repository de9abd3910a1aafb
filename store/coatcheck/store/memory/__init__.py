"""The store without Postgres: the same promises on plain Python rows, for tests and simulation.

Stores over the same `Tables` are replicas on one database. Whatever reaches the rows goes through
`MemoryStore._transact`: a store that is slow, away, or dies in the middle of a commit is one that overrides it.
"""

from coatcheck.store.memory.operations import MemoryOperations
from coatcheck.store.memory.store import MemoryStore
from coatcheck.store.memory.tables import Tables

__all__ = ["MemoryOperations", "MemoryStore", "Tables"]
