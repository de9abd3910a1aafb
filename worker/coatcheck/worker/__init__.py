"""What handler authors and clients import."""

from coatcheck.errors import (
    CallFailed,
    CallTimedOut,
    CoatcheckError,
    NobodyThere,
    StepFailed,
    TaskCancelled,
    TaskFailed,
    TransientError,
    Unauthorized,
)
from coatcheck.store.rows import Caller
from coatcheck.worker.app import App
from coatcheck.worker.client import Client, NoSuchTask, NotDone, Ticket
from coatcheck.worker.engine.context import Context
from coatcheck.worker.retry import Backoff, Retry
from coatcheck.worker.settings import Checkpointing, Settings
from coatcheck.worker.sweeper import Sweeper
from coatcheck.worker.worker import Worker

__all__ = [
    "App",
    "Backoff",
    "CallFailed",
    "CallTimedOut",
    "Caller",
    "Checkpointing",
    "Client",
    "CoatcheckError",
    "Context",
    "NoSuchTask",
    "NobodyThere",
    "NotDone",
    "Retry",
    "Settings",
    "StepFailed",
    "Sweeper",
    "TaskCancelled",
    "TaskFailed",
    "Ticket",
    "TransientError",
    "Unauthorized",
    "Worker",
]
