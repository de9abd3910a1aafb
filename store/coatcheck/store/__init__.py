"""Tasks at rest: rows, SQL, codecs and migrations. Stands alone; knows nothing of brokers or handlers."""

from coatcheck.store.blobs import Codec, CorruptBlob, decode, encode
from coatcheck.store.kinds import Kind
from coatcheck.store.memory import MemoryStore, Tables
from coatcheck.store.migrate import migrate, newest_version
from coatcheck.store.orders import Filter, OrderDone
from coatcheck.store.postgres.store import Store
from coatcheck.store.rows import CallId, CallState, Task, TaskId, TaskState
from coatcheck.store.views import Line

__all__ = [
    "CallId",
    "CallState",
    "Codec",
    "CorruptBlob",
    "Filter",
    "Kind",
    "Line",
    "MemoryStore",
    "OrderDone",
    "Store",
    "Tables",
    "Task",
    "TaskId",
    "TaskState",
    "decode",
    "encode",
    "migrate",
    "newest_version",
]
