"""For tests of handlers: the real engine in one process, fake peers, and a clock to move."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coatcheck.testing.crashes import (
        Crash,
        CrashesDiffer,
        CrashReport,
        Difference,
        Peers,
        crash_at_every_checkpoint,
    )
    from coatcheck.testing.journals import (
        Journal,
        Replay,
        ReplayFailed,
        assert_replays,
        check_replay,
        record,
        record_from_store,
    )
    from coatcheck.testing.peers import Asked, NotFaked, Peer, Script
    from coatcheck.testing.stage import DeadLetter, Entry, Stage, Ticket
    from coatcheck.testing.stage_parts import Replica
    from coatcheck.testing.stuck import Stuck

_MODULES = ("stage", "stage_parts", "peers", "stuck", "crashes", "journals")

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
    # The pytest plugin lies in this package, and every test session on the machine imports it: so it must cost nothing.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = (importlib.import_module(f"{__name__}.{each}") for each in _MODULES)
    return next(getattr(module, name) for module in modules if name in module.__all__)
