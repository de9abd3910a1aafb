"""How far a run of a task can be, from the grant to the ack.

    GRANTED ──slot──► RUNNING ──outcome──► ENDING ──last write──► ENDED ──ack──► SETTLED
                        │  ▲                  │                                    ▲
                        │  └── retry in RAM ──┘                                    │
                        ├── the write that parks is in ──► PARKED ─── ack ─────────┤
                        ├── another replica has it ──────► FENCED ─── ack ─────────┤
                        └── the process stops ───────────► LET_GO ── requeue ──────┘

Who moves it, and what a crash leaves:

    GRANTED  the executor, when there is a slot. The unacked trigger; the row, if there is one, under its lease
    RUNNING  the engine, by an outcome or the write that parks. The same, and the rows as of the last write
    ENDING   the executor, by the last write. The same: the end is decided, and nothing says so
    PARKED   the executor, when calls are out. A parked row, its calls not marked as sent: trigger or sweeper send them
    ENDED    the executor, when the final reply is out. A final, retrying or held row: trigger or sweeper send the reply
    FENCED   the executor, when the handler is unwound. The row of another epoch, with a lease of its own
    LET_GO   the executor, when the handler is unwound. The unacked trigger, a row whose lease is over
    SETTLED  the end: the trigger is acked or requeued. What the rows say

A fenced run that was about to write finds out by that write. A renewal may have crossed with the run's own last write:
then the row is ended or parked by us, and FENCED moves to ENDED or PARKED after all. Any phase moves to SETTLED when
the run breaks off: its trigger comes back.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Set

__all__ = ["DECIDED", "LAST_WRITES", "MOVES", "Phase"]


class Phase(enum.StrEnum):
    """How far a run is."""

    GRANTED = "granted"
    RUNNING = "running"
    ENDING = "ending"
    PARKED = "parked"
    ENDED = "ended"
    FENCED = "fenced"
    LET_GO = "let go"
    SETTLED = "settled"


MOVES: Mapping[Phase, Set[Phase]] = {
    Phase.GRANTED: {Phase.RUNNING, Phase.FENCED, Phase.LET_GO, Phase.SETTLED},
    Phase.RUNNING: {Phase.ENDING, Phase.PARKED, Phase.FENCED, Phase.LET_GO, Phase.SETTLED},
    Phase.ENDING: {Phase.RUNNING, Phase.ENDED, Phase.FENCED, Phase.SETTLED},
    Phase.PARKED: {Phase.SETTLED},
    Phase.ENDED: {Phase.SETTLED},
    Phase.FENCED: {Phase.PARKED, Phase.ENDED, Phase.SETTLED},
    Phase.LET_GO: {Phase.ENDING, Phase.PARKED, Phase.FENCED, Phase.SETTLED},
    Phase.SETTLED: set[Phase](),
}
LAST_WRITES = {Phase.PARKED, Phase.ENDED, Phase.SETTLED}
"""The last write of the run is in."""
DECIDED = {Phase.ENDING, Phase.ENDED, Phase.SETTLED}
"""How the run ends is decided."""
