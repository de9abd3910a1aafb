"""For the tests of whoever writes handlers: the real engine in one process, fake peers, and a clock to move."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coatcheck.testing.crash_report import Crash, CrashReport, Difference
    from coatcheck.testing.crashes import Peers, crash_at_every_checkpoint
    from coatcheck.testing.errors import CrashesDiffer, NotFaked, ReplayFailed, Stuck
    from coatcheck.testing.journals import Journal, record, record_from_store
    from coatcheck.testing.peers import Asked, Peer
    from coatcheck.testing.replay import Replay, assert_replays, check_replay
    from coatcheck.testing.replicas import Replica
    from coatcheck.testing.scripts import Script
    from coatcheck.testing.stage import DeadLetter, Stage
    from coatcheck.testing.stage_tasks import Entry, Ticket

_HOMES = {
    "Asked": "peers",
    "Crash": "crash_report",
    "CrashReport": "crash_report",
    "CrashesDiffer": "errors",
    "DeadLetter": "stage",
    "Difference": "crash_report",
    "Entry": "stage_tasks",
    "Journal": "journals",
    "NotFaked": "errors",
    "Peer": "peers",
    "Peers": "crashes",
    "Replay": "replay",
    "ReplayFailed": "errors",
    "Replica": "replicas",
    "Script": "scripts",
    "Stage": "stage",
    "Stuck": "errors",
    "Ticket": "stage_tasks",
    "assert_replays": "replay",
    "check_replay": "replay",
    "crash_at_every_checkpoint": "crashes",
    "record": "journals",
    "record_from_store": "journals",
}

__all__ = [
    "Asked",
    "Crash",
    "CrashReport",
    "CrashesDiffer",
    "DeadLetter",
    "Difference",
    "Entry",
    "Journal",
    "NotFaked",
    "Peer",
    "Peers",
    "Replay",
    "ReplayFailed",
    "Replica",
    "Script",
    "Stage",
    "Stuck",
    "Ticket",
    "assert_replays",
    "check_replay",
    "crash_at_every_checkpoint",
    "record",
    "record_from_store",
]


def __getattr__(name: str) -> Any:
    # The pytest plugin lies in this package, and every test session of everybody imports it: so it must cost nothing.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
