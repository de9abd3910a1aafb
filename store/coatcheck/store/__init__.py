"""Tasks at rest: rows, SQL, codecs and migrations. Stands alone; knows nothing of brokers or handlers."""

from coatcheck.store.blobs import Codec, CorruptBlob, decode, encode
from coatcheck.store.checkpoints import CheckpointInfo
from coatcheck.store.front import Store
from coatcheck.store.kinds import Kind
from coatcheck.store.memory import MemoryOperations, MemoryStore, Tables
from coatcheck.store.migrate import migrate
from coatcheck.store.orders import Filter, OrderDone
from coatcheck.store.port import Operations
from coatcheck.store.rows import CallId, CallState, Task, TaskId, TaskState
from coatcheck.store.versions import newest_version
from coatcheck.store.views import Line

__all__ = [
    "CallId",
    "CallState",
    "CheckpointInfo",
    "Codec",
    "CorruptBlob",
    "Filter",
    "Kind",
    "Line",
    "MemoryOperations",
    "MemoryStore",
    "Operations",
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
