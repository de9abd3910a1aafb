"""How a task's row comes into the world: by whoever writes it first, and only once."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coatcheck.store.database import columns, rows
from coatcheck.store.records import addresses_json, to_json
from coatcheck.store.rows import Birth, TaskId

REQUEST_TRIGGER = "request"

# ON CONFLICT alone would wait for whoever updates a row that is there already; such a row is left to the locks. What is
# still waited for is another birth of the same id that is not committed yet.
INSERT_BIRTHS = text("""
    INSERT INTO coatcheck.task (id, service, handler, version, state, epoch, trigger, identity, digest, correlation_id,
                                request, addresses, traceparent, tracestate, caller_subject, caller_claims, pickups,
                                due_at, look_at)
    SELECT id, service, handler, version, 'running', 1, trigger, identity, digest, correlation_id, request,
           addresses::jsonb, traceparent, tracestate, caller_subject, caller_claims::jsonb, pickups,
           clock_timestamp() + lease_s * interval '1 s', clock_timestamp() + lease_s * interval '1 s'
      FROM unnest(CAST(:id AS uuid[]), CAST(:service AS text[]), CAST(:handler AS text[]), CAST(:version AS text[]),
                  CAST(:trigger AS text[]), CAST(:identity AS text[]), CAST(:digest AS bytea[]),
                  CAST(:correlation_id AS text[]), CAST(:request AS bytea[]), CAST(:addresses AS text[]),
                  CAST(:traceparent AS text[]), CAST(:tracestate AS text[]), CAST(:caller_subject AS text[]),
                  CAST(:caller_claims AS text[]), CAST(:pickups AS integer[]), CAST(:lease_s AS float8[]))
        AS u(id, service, handler, version, trigger, identity, digest, correlation_id, request, addresses, traceparent,
             tracestate, caller_subject, caller_claims, pickups, lease_s)
     WHERE NOT EXISTS (SELECT FROM coatcheck.task t WHERE t.id = u.id)
     ORDER BY id
    ON CONFLICT (id) DO NOTHING
    RETURNING id
""")


async def insert_births(
    connection: AsyncConnection, births: Iterable[tuple[Birth, str | None, int, float]]
) -> set[TaskId]:
    """Insert rows of (birth, trigger, pickups, lease in seconds) that do not exist yet; tell which are new."""
    unique: dict[TaskId, tuple[Birth, str | None, int, float]] = {}
    for birth in births:
        unique.setdefault(birth[0].task_id, birth)  # the first copy of a request is the one that is granted
    if not unique:
        return set()
    items = [
        {
            "id": birth.task_id,
            "service": birth.service,
            "handler": birth.handler,
            "version": birth.version,
            "trigger": trigger,
            "identity": birth.identity,
            "digest": birth.digest,
            "correlation_id": birth.correlation_id,
            "request": birth.request,
            "addresses": addresses_json([birth.address] if birth.address else []),
            "traceparent": birth.traceparent,
            "tracestate": birth.tracestate,
            "caller_subject": birth.caller.subject if birth.caller else None,
            "caller_claims": to_json(birth.caller.claims) if birth.caller else None,
            "pickups": pickups,
            "lease_s": lease_s,
        }
        for birth, trigger, pickups, lease_s in unique.values()
    ]
    return {row.id for row in await rows(connection, INSERT_BIRTHS, **columns(items, *items[0]))}
