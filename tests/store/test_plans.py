"""The plans of hot statements: with many tasks at rest, each is found by an index."""

import asyncio
import re
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
from sqlalchemy import TextClause
from tests.store.bench import Bench
from tests.store.kit import (
    all_of,
    birth,
    call,
    calls,
    cancel_of,
    done,
    end_lease,
    entry,
    get,
    going,
    make_due,
    need,
    new_id,
    ok,
    park,
    parking,
    progress,
    put_of,
    resumed,
    start,
    written,
)

from coatcheck.store import Store
from coatcheck.store.postgres.connection import Connection, _compiled
from coatcheck.store.postgres.database import SERVER_SETTINGS
from coatcheck.store.rows import Address, Answered, Request, Wake
from coatcheck.store.views import Renewal, Retention

AT_REST = """
    WITH parked AS (
        INSERT INTO coatcheck.task (id, service, version, state, epoch, checkpoint, digest, request, correlation_id,
                                    wait_calls, wait_groups, wait_needs)
        SELECT gen_random_uuid(), 'svc', '1', 'parked', 1, 1, '', convert_to(repeat('x', 1000), 'UTF8'), 'c-' || number,
               ARRAY[gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), gen_random_uuid()], '{1,1,1,1}', '{4}'
          FROM generate_series(1, 4000) AS number RETURNING id, wait_calls),
    recorded AS (
        INSERT INTO coatcheck.journal (task_id, seq, key, kind, name, digest, is_ok, value, checkpoint)
        SELECT id, 1, 'plan#1', 'step', 'plan', '', true, 'x', 1 FROM parked)
    INSERT INTO coatcheck.call (id, task_id, key, kind, name, digest, peer, headers, body, state, due_at, look_at,
                                checkpoint, is_sent)
    SELECT call_id, parked.id, 'search#1', 'call', 'search', '', 'search', '{}', 'x', 'open', due.at, due.at, 1, true
      FROM parked, unnest(wait_calls) AS call_id, LATERAL (SELECT now() + random() * interval '1 day' AS at) AS due;
    INSERT INTO coatcheck.task (id, service, version, state, epoch, digest, request, value, is_final_sent, due_at,
                                finished_at)
    SELECT gen_random_uuid(), 'svc', '1', 'done', 1, '', 'x', 'x', true, now() + random() * interval '1 day', now()
      FROM generate_series(1, 4000)
"""


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple]]:
    """Everything the store executes, with its values."""
    found: list[tuple[str, tuple]] = []
    fetch = Connection._fetch

    async def noting(connection: Connection, statement: TextClause, values: Mapping[str, Any]):
        sql, names = _compiled(statement)
        found.append((sql, tuple(values[name] for name in names)))
        return await fetch(connection, statement, values)

    monkeypatch.setattr(Connection, "_fetch", noting)
    return found


@pytest.mark.parametrize("is_analyzed", [True, False], ids=["analyzed", "fresh"])
async def test_hot_statements_use_indexes(store, sql, bench, statements, is_analyzed):
    await sql.execute(AT_REST)
    if is_analyzed:
        await sql.execute("ANALYZE coatcheck.task, coatcheck.call, coatcheck.journal")

    await _do_everything(store, sql, bench)

    plans = {statement: await _plan(sql, statement, values) for statement, values in statements}
    assert len(plans) > 25
    # The repair's walk by id is no hot statement: on a table this small the planner may well read it whole and sort.
    hot = {
        statement: plan for statement, plan in plans.items() if "state = 'parked'\n   AND updated_at" not in statement
    }
    assert len(hot) == len(plans) - 1
    scans = {statement: plan for statement, plan in hot.items() if "Seq Scan on" in plan}
    assert not scans, "\n\n".join(f"{statement}\n{plan}" for statement, plan in scans.items())
    # The sweeper's statements stop at what is due now; a mere filter would read on through all that is due some day.
    swept = [plan for statement, plan in plans.items() if "<= statement_timestamp()" in statement]
    assert len(swept) == 5
    ends = r"Index Cond: \((look_at <= statement_timestamp\(\)|\(state = '\w+'::text\) AND \(finished_at <= .*)\)"
    assert all(re.search(ends, plan) for plan in swept), "\n\n".join(swept)


async def test_plans_that_are_made_while_the_tables_are_empty_use_indexes_too(store_url, store, sql, bench, statements):
    """A connection keeps its plans while the tables grow, until they are analyzed."""
    await _do_everything(store, sql, bench)
    await sql.execute("TRUNCATE coatcheck.journal, coatcheck.call, coatcheck.task")
    planner = await asyncpg.connect(store_url, server_settings=SERVER_SETTINGS)

    plans = {}
    for number, (statement, values) in enumerate(dict(statements).items()):
        await planner.execute(f"PREPARE plan_{number} AS {statement}")
        nothing = f"({', '.join(['NULL'] * len(values))})" if values else ""
        plans[statement] = "\n".join(row[0] for row in await planner.fetch(f"EXPLAIN EXECUTE plan_{number}{nothing}"))
    await planner.close()

    scans = {statement: plan for statement, plan in plans.items() if "Seq Scan on" in plan}
    assert not scans, "\n\n".join(f"{statement}\n{plan}" for statement, plan in scans.items())


async def test_next_due_time_is_read_off_the_ends_of_two_indexes(store, sql, statements):
    await sql.execute(AT_REST)
    await sql.execute("VACUUM (ANALYZE) coatcheck.task, coatcheck.call")

    await store.next_look()

    [(statement, values)] = statements
    plan = await _plan(sql, statement, values)
    found = re.findall(r"Limit .*\n +->  Index Only Scan using (\w+)", plan)
    assert sorted(found) == ["call_look_at", "task_look_at"], plan


async def test_parked_task_leaves_no_dead_row_behind(store, sql):
    await park(store, calls(4), entries=(entry(),))

    # The first version of a row lies where the table begins; an update would have moved it.
    assert await sql.fetchval("SELECT ctid::text FROM coatcheck.task") == "(0,1)"


async def _plan(sql: asyncpg.Connection, statement: str, values: tuple) -> str:
    return "\n".join(row[0] for row in await sql.fetch(f"EXPLAIN {statement}", *values))


async def _do_everything(store: Store, sql: asyncpg.Connection, bench: Bench) -> None:
    members = calls(4)
    await park(store, members, need(2, members), entries=(entry(),))
    await asyncio.gather(store.claim(ok(members[0])), store.claim(progress(members[2])))
    task = await resumed(store, members[1])
    await store.claim(ok(members[2]))
    await store.claim(ok(members[1], is_redelivered=True))
    task = await get(store, task.task_id)
    await store.claim(ok(members[3]))
    await written(store, put_of(task, parking(all_of(members)), entries=(entry("a#1"),)))
    await written(store, put_of(await get(store, task.task_id), going(), opens=(one := call("b#1"),)))
    await written(store, put_of(await get(store, task.task_id), going(), closes=(one.call_id,)))
    await written(store, put_of(await get(store, task.task_id), done(), opens=(call("c#1"),)))
    newborn = birth(correlation_id="mine")
    await store.accept(Request(newborn))
    await store.accept(Request(newborn, is_redelivered=True))
    running = await start(store)
    await end_lease(bench, running.task_id)
    await store.renew([Renewal(running.task_id, running.epoch)], lease=timedelta())
    await store.resume(Wake(running.task_id, running.epoch))
    await store.mark_sent([call().call_id])
    await store.resend_calls([call().call_id], after=timedelta())
    await store.resend_to(task.task_id, Address("q", "c"), after=timedelta())
    await store.mark_final_sent({task.task_id: Answered((*task.addresses, Address("q", "c")), 0)})
    await park(store, [late := call()])
    await make_due(bench, late)
    await store.look(limit=100, again=timedelta(seconds=30))
    await store.next_look()
    await store.hasten_unsent("search")
    await sql.execute("UPDATE coatcheck.task SET finished_at = now() - interval '1 day' WHERE id = $1", task.task_id)
    assert await store.retire(limit=100, keep=Retention(timedelta(hours=1), timedelta(hours=1))) >= 1
    await store.repair(after=uuid.UUID(int=0), limit=100, quiet=timedelta())
    await store.cancel(cancel_of(new_id(), correlation_id="mine"))
    await store.cancel(cancel_of(new_id(), correlation_id="mine"))
