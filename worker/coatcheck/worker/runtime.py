"""The parts of a running worker that its hops share. Put together in `worker.py`, handed to everyone else."""

from __future__ import annotations

from dataclasses import dataclass

from coatcheck.broker.bodies import Limits
from coatcheck.store.postgres.store import Store
from coatcheck.worker.app import App
from coatcheck.worker.live_runs import LiveRuns, Slots
from coatcheck.worker.metrics import Metrics
from coatcheck.worker.outbox import Hints, Marks, Outbox
from coatcheck.worker.ram_waits import RamCalls
from coatcheck.worker.settings import Checkpointing, Settings
from coatcheck.worker.store_outage import StoreGate


@dataclass(frozen=True, slots=True)
class Runtime:
    app: App
    settings: Settings
    limits: Limits
    metrics: Metrics
    outbox: Outbox
    lives: LiveRuns
    slots: Slots
    hints: Hints
    store: Store
    gate: StoreGate
    marks: Marks
    ram_calls: RamCalls
    private_queue: str | None = None
    """Where replies to in-RAM waits arrive; None when every wait is a row."""

    @property
    def uses_store(self) -> bool:
        return self.settings.checkpointing is not Checkpointing.OFF

    @property
    def may_use_ram(self) -> bool:
        return self.settings.checkpointing is not Checkpointing.REQUIRED
