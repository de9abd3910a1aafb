"""How a task's row comes into the world: by whoever writes it first, and only once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import text

from coatcheck.store.blobs import shrink
from coatcheck.store.connection import Connection
from coatcheck.store.database import columns, rows
from coatcheck.store.records import addresses_json, to_json
from coatcheck.store.rows import Birth, TaskId, TaskState

REQUEST_TRIGGER = "request"

# ON CONFLICT alone would wait for whoever updates a row that is there already; such a row is left to the locks. What is
# still waited for is another birth of the same id that is not committed yet.
INSERT_BIRTHS = text("""
    INSERT INTO coatcheck.task (id, service, handler, version, identity, digest, correlation_id, request, addresses,
                                traceparent, tracestate, caller_subject, caller_claims, epoch, state, checkpoint, seq,
                                attempt, pickups, trigger, wait_calls, wait_groups, wait_needs, value, traceback,
                                progress, due_at, look_at, finished_at)
    SELECT id, service, handler, version, identity, digest, correlation_id, request, addresses::jsonb, traceparent,
           tracestate, caller_subject, caller_claims::jsonb, 1, state, checkpoint, seq, 1 + more_attempts, pickups,
           trigger, wait_calls::uuid[], wait_groups::integer[], wait_needs::integer[], value, traceback,
           progress::jsonb, clock_timestamp() + due_s * interval '1 s', clock_timestamp() + look_s * interval '1 s',
           CASE WHEN is_final THEN clock_timestamp() END
      FROM unnest(CAST(:id AS uuid[]), CAST(:service AS text[]), CAST(:handler AS text[]), CAST(:version AS text[]),
                  CAST(:identity AS text[]), CAST(:digest AS bytea[]), CAST(:correlation_id AS text[]),
                  CAST(:request AS bytea[]), CAST(:addresses AS text[]), CAST(:traceparent AS text[]),
                  CAST(:tracestate AS text[]), CAST(:caller_subject AS text[]), CAST(:caller_claims AS text[]),
                  CAST(:state AS text[]), CAST(:checkpoint AS integer[]), CAST(:seq AS integer[]),
                  CAST(:more_attempts AS integer[]), CAST(:pickups AS integer[]), CAST(:trigger AS text[]),
                  CAST(:wait_calls AS text[]), CAST(:wait_groups AS text[]), CAST(:wait_needs AS text[]),
                  CAST(:value AS bytea[]), CAST(:traceback AS text[]), CAST(:progress AS text[]),
                  CAST(:due_s AS float8[]), CAST(:look_s AS float8[]), CAST(:is_final AS boolean[]))
        AS u(id, service, handler, version, identity, digest, correlation_id, request, addresses, traceparent,
             tracestate, caller_subject, caller_claims, state, checkpoint, seq, more_attempts, pickups, trigger,
             wait_calls, wait_groups, wait_needs, value, traceback, progress, due_s, look_s, is_final)
     WHERE NOT EXISTS (SELECT FROM coatcheck.task t WHERE t.id = u.id)
     ORDER BY id
    ON CONFLICT (id) DO NOTHING
    RETURNING id
""")


def running(lease_s: float, *, pickups: int) -> dict[str, Any]:
    """A row as it stands while its first run goes on. A run that has something to write puts that in its place."""
    return {
        "state": TaskState.RUNNING,
        "checkpoint": 0,
        "seq": 0,
        "more_attempts": 0,
        "pickups": pickups,
        "trigger": REQUEST_TRIGGER,
        "wait_calls": None,
        "wait_groups": None,
        "wait_needs": None,
        "value": None,
        "traceback": None,
        "progress": None,
        "due_s": lease_s,
        "look_s": lease_s,
        "is_final": False,
    }


async def insert_births(connection: Connection, births: Iterable[tuple[Birth, Mapping[str, Any]]]) -> set[TaskId]:
    """Insert rows that do not exist yet, each standing as it is told to; tell which are new."""
    unique: dict[TaskId, tuple[Birth, Mapping[str, Any]]] = {}
    for birth in births:
        unique.setdefault(birth[0].task_id, birth)  # the first copy of a request is the one that is granted
    if not unique:
        return set()
    requests = shrink(birth.request for birth, _ in unique.values())
    items = [
        {
            "id": birth.task_id,
            "service": birth.service,
            "handler": birth.handler,
            "version": birth.version,
            "identity": birth.identity,
            "digest": birth.digest,
            "correlation_id": birth.correlation_id,
            "request": request,
            "addresses": addresses_json([birth.address] if birth.address else []),
            "traceparent": birth.traceparent,
            "tracestate": birth.tracestate,
            "caller_subject": birth.caller.subject if birth.caller else None,
            "caller_claims": to_json(birth.caller.claims) if birth.caller else None,
            **standing,
        }
        for (birth, standing), request in zip(unique.values(), requests, strict=True)
    ]
    return {row.id for row in await rows(connection, INSERT_BIRTHS, **columns(items, *items[0]))}
