"""How a task's row comes into the world: by the write that is first, and only once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from coatcheck.store import decide
from coatcheck.store.blobs import shrink
from coatcheck.store.decide import Standing
from coatcheck.store.documents import to_json
from coatcheck.store.postgres.database import columns
from coatcheck.store.postgres.records import addresses_json
from coatcheck.store.rows import Birth, Chain, TaskState

BIRTH_COLUMNS = (
    *("id", "service", "handler", "version", "identity", "digest", "correlation_id", "request", "addresses"),
    *("traceparent", "tracestate", "caller_subject", "caller_claims", "deadline_at", "history", "first_entry"),
    *("entry_count", "head", "pickups"),
)
STANDING_COLUMNS = (
    *("state", "seq", "is_detached", "wait_calls", "wait_groups", "wait_needs", "value", "traceback", "progress"),
    "due_s",
)
StandingRow = tuple[TaskState, int, bool, str | None, str | None, str | None, bytes | None, str | None, str | None, Any]
"""The values of STANDING_COLUMNS."""


class NewTask(NamedTuple):
    """A row to be made: with its pick-ups, how it stands, where its history stands, and its first entry there."""

    birth: Birth
    pickups: int
    standing: StandingRow
    chain: Chain = Chain()
    first_entry: int | None = None


def standing_row(standing: Standing, *, seq: int, progress: Any = None) -> StandingRow:
    """How a row stands after a write, in Postgres's words."""
    waits = _waits(standing) if standing.groups else (None, None, None)
    return (
        standing.state,
        seq,
        standing.is_detached,
        *waits,
        standing.value,
        standing.traceback,
        None if progress is None else to_json(dict(progress)),
        None if standing.due is None else standing.due.total_seconds(),
    )


def _waits(standing: Standing) -> tuple[str, str, str]:
    """The groups as three arrays: members, the group of each, and what each group needs."""
    calls, numbers, needs = [], [], []
    for number, group in enumerate(standing.groups, start=1):
        calls += [call_id.hex for call_id in group.calls]
        numbers += [str(number)] * len(group.calls)
        needs.append("NULL" if group.need is None else str(group.need))
    return f"{{{','.join(calls)}}}", f"{{{','.join(numbers)}}}", f"{{{','.join(needs)}}}"


def birth_values(births: Iterable[NewTask], *, checkpoint: int) -> dict[str, Any]:
    """What `insert_births` takes. No two of one id."""
    items = [
        (
            birth.task_id,
            birth.service,
            birth.handler,
            birth.version,
            birth.identity,
            birth.digest,
            birth.correlation_id,
            shrink(birth.request),
            addresses_json([birth.address] if birth.address else []),
            birth.traceparent,
            birth.tracestate,
            birth.caller.subject if birth.caller else None,
            to_json(birth.caller.claims) if birth.caller else None,
            birth.deadline_at,
            birth.history,
            first_entry,
            chain.count,
            chain.head,
            pickups,
            *standing,
        )
        for birth, pickups, standing, chain, first_entry in births
    ]
    values = columns((*BIRTH_COLUMNS, *STANDING_COLUMNS), items)
    return values | {"checkpoint": checkpoint, "resend_after_s": decide.RESEND_AFTER.total_seconds()}
