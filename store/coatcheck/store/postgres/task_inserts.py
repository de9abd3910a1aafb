"""How a task's row comes into the world: by whoever writes it first, and only once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from coatcheck.store.blobs import shrink
from coatcheck.store.postgres.database import columns
from coatcheck.store.postgres.records import addresses_json, to_json
from coatcheck.store.rows import Birth, Request, TaskId, TaskState

REQUEST_TRIGGER = "request"
RESEND_AFTER_S = 60.0
"""How long a call or final reply may stand unmarked before the sweeper sends it again."""

# A row is made no later than its task ends: the column's own default is worked out last, and would come after the end.
# ON CONFLICT alone would wait for whoever updates a row that is there already; such a row is left to the locks. What is
# still waited for is another birth of the same id that is not committed yet.
INSERT_BIRTHS = f"""
    INSERT INTO coatcheck.task (id, service, handler, version, identity, digest, correlation_id, request, addresses,
                                traceparent, tracestate, caller_subject, caller_claims, deadline_at, epoch, checkpoint,
                                pickups, state, seq, attempt, trigger, wait_calls, wait_groups, wait_needs, value,
                                traceback, progress, due_at, look_at, finished_at,
                                created_at)
    SELECT id, service, handler, version, identity, digest, correlation_id, request, addresses::jsonb, traceparent,
           tracestate, caller_subject, caller_claims::jsonb, deadline_at, 1, CAST(:checkpoint AS integer),
           CAST(:pickups AS integer),
           state, seq, CASE WHEN state = 'retrying' THEN 2 ELSE 1 END,
           CASE WHEN is_final OR NOT is_detached THEN '{REQUEST_TRIGGER}' END,
           wait_calls::uuid[], wait_groups::integer[], wait_needs::integer[], value, traceback, progress::jsonb,
           clock_timestamp() + due_s * interval '1 s',
           clock_timestamp() + CASE WHEN NOT is_final THEN due_s
                                    WHEN is_detached THEN CAST(:resend_after_s AS float8) END * interval '1 s',
           CASE WHEN is_final THEN clock_timestamp() END, statement_timestamp()
      FROM (SELECT *, state IN ('done', 'failed') AS is_final
              FROM unnest(CAST(:id AS uuid[]), CAST(:service AS text[]), CAST(:handler AS text[]),
                          CAST(:version AS text[]), CAST(:identity AS text[]), CAST(:digest AS bytea[]),
                          CAST(:correlation_id AS text[]), CAST(:request AS bytea[]), CAST(:addresses AS text[]),
                          CAST(:traceparent AS text[]), CAST(:tracestate AS text[]), CAST(:caller_subject AS text[]),
                          CAST(:caller_claims AS text[]), CAST(:deadline_at AS timestamptz[]), CAST(:state AS text[]),
                          CAST(:seq AS integer[]),
                          CAST(:is_detached AS boolean[]), CAST(:wait_calls AS text[]), CAST(:wait_groups AS text[]),
                          CAST(:wait_needs AS text[]), CAST(:value AS bytea[]), CAST(:traceback AS text[]),
                          CAST(:progress AS text[]), CAST(:due_s AS float8[]))
                AS u(id, service, handler, version, identity, digest, correlation_id, request, addresses, traceparent,
                     tracestate, caller_subject, caller_claims, deadline_at, state, seq, is_detached, wait_calls,
                     wait_groups, wait_needs, value, traceback, progress, due_s)) AS u
     WHERE NOT EXISTS (SELECT FROM coatcheck.task t WHERE t.id = u.id)
     ORDER BY id
    ON CONFLICT (id) DO NOTHING
"""
BIRTH_COLUMNS = (
    *("id", "service", "handler", "version", "identity", "digest", "correlation_id", "request", "addresses"),
    *("traceparent", "tracestate", "caller_subject", "caller_claims", "deadline_at"),
)
STANDING_COLUMNS = (
    *("state", "seq", "is_detached", "wait_calls", "wait_groups", "wait_needs", "value", "traceback", "progress"),
    "due_s",
)
Standing = tuple[TaskState, int, bool, str | None, str | None, str | None, bytes | None, str | None, str | None, Any]
"""How a row stands after a write: the values of STANDING_COLUMNS. What is due at `due_s` from now is looked at then."""


def running(lease_s: float) -> Standing:
    """A row as it stands while its first run goes on."""
    return (TaskState.RUNNING, 0, False, None, None, None, None, None, None, lease_s)


def births_by_pickups(requests: Iterable[Request]) -> dict[int, list[Birth]]:
    """The rows that requests would become, one for each task, by the pick-ups that they begin with.

    A request that was delivered before may have been run before, without a row, and have ended its process. Of several
    copies the first one counts: it is the one that is granted.
    """
    first: dict[TaskId, Request] = {}
    for one in requests:
        first.setdefault(one.birth.task_id, one)
    found: dict[int, list[Birth]] = {}
    for one in first.values():
        found.setdefault(2 if one.is_redelivered else 1, []).append(one.birth)
    return found


def birth_values(
    births: Iterable[Birth], standings: Sequence[Standing], *, checkpoint: int, pickups: int
) -> dict[str, Any]:
    """What INSERT_BIRTHS takes: rows that do not exist yet, each standing as it is told to. No two of one id."""
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
            *standing,
        )
        for birth, standing in zip(births, standings, strict=True)
    ]
    values = columns((*BIRTH_COLUMNS, *STANDING_COLUMNS), items)
    return values | {"checkpoint": checkpoint, "pickups": pickups, "resend_after_s": RESEND_AFTER_S}
