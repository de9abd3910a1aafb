"""The parts of `make scale` that say what was seen; and that copies are as good as what they were copied from."""

import itertools
import json
import math
from uuid import UUID

import asyncpg
import pytest
from bench.scale.fill import copy, copy_due, row_sizes, sizes, spread
from bench.scale.lifecycles import Lives
from bench.scale.replay import replay_lines
from bench.scale.report import Line, indexes_of, percentile, reads_whole_tables, show, write
from bench.scale.rig import make_request

from coatcheck.store import CallState, Store, TaskState, encode
from coatcheck.store.rows import Arrival, CallId, Verdict

PLAN = """
Limit  (cost=0.43..0.49 rows=1 width=8)
  ->  Index Only Scan using call_look_at on call  (cost=0.43..7 rows=100 width=8)
        Index Cond: (look_at IS NOT NULL)
  ->  Bitmap Index Scan on task_pkey  (cost=0.00..4 rows=1 width=0)
"""


# --- figures ---


@pytest.mark.parametrize(
    ("line", "holds"),
    [
        (Line("as much as may be", 5, target=5), True),
        (Line("more", 5.1, target=5), False),
        (Line("at least", 1, target=1, least=True), True),
        (Line("less", 0.9, target=1, least=True), False),
        (Line("nothing to compare", math.nan, target=1), False),
        (Line("for information", 5), None),
    ],
    ids=lambda each: each.name if isinstance(each, Line) else "",
)
def test_line_knows_whether_it_holds(line, holds):
    assert line.holds is holds


def test_percentile_is_a_value_that_was_seen():
    values = [float(number) for number in range(100, 0, -1)]

    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50, 99, 100]
    assert percentile([7.0], 0.99) == 7
    assert math.isnan(percentile([], 0.5))


def test_plan_tells_its_indexes():
    assert indexes_of(PLAN) == {"call_look_at", "task_pkey"}
    assert not reads_whole_tables(PLAN)
    assert reads_whole_tables("  ->  Seq Scan on task t  (cost=0.00..1.00)")


def test_figures_are_written_with_their_verdicts(tmp_path, capsys):
    lines = [Line("bytes", 2376.4, "B", target=2560), Line("late", 603, "ms", target=250), Line("p50", math.nan)]

    show(lines)
    write(lines, tmp_path / "bench" / "scale.json", tasks=1000)

    printed = capsys.readouterr().out
    assert all(words in printed for words in ("2,376 B", "holds", "603 ms", "missed"))
    stored = json.loads((tmp_path / "bench" / "scale.json").read_text())
    assert stored["about"] == {"tasks": 1000}
    assert [figure["holds"] for figure in stored["figures"]] == [True, False, None]


@pytest.mark.parametrize("size", [200, 1024, 5000])
def test_request_has_the_size_that_was_asked_for(size):
    body = make_request(1, size)

    assert len(body) == size
    assert json.loads(body).keys() == {"topic", "queries"}
    assert make_request(2, size) != body


@pytest.mark.parametrize("among", [1, 10, 1000, 1_000_000])
def test_numbers_are_spread_and_differ(among):
    numbers = spread(1000, among)

    assert len(set(numbers)) == len(numbers) == min(1000, among)
    assert min(numbers) >= 1
    assert max(numbers) <= among
    if among == 1_000_000:
        assert {number * 10 // (among + 1) for number in numbers} == set(range(10))


# --- measuring ---


async def test_replay_is_measured_on_whole_journals():
    lines = await replay_lines(entries=30, times=1)

    assert len(lines) == 3
    assert all(line.value > 0 for line in lines)


@pytest.fixture
async def sql(store_url: str):
    connection = await asyncpg.connect(store_url)
    yield connection
    await connection.close()


@pytest.fixture
async def store(store_url: str):
    store = Store(store_url)
    yield store
    await store.close()


async def test_copies_are_like_what_they_were_copied_from(store, sql):
    put = Lives(store).park(1)
    await store.put(put)

    copies = await copy(sql, put.task_id, count=30)

    wanted = await row_sizes(sql, put.task_id)
    found = [row["id"] for row in await sql.fetch("SELECT id FROM coatcheck.task WHERE id <> $1", put.task_id)]
    assert len(found) == 30
    assert {await row_sizes(sql, one) for one in found} == {wanted}
    assert {"task", "call", "call_pkey", "call_look_at"} <= (await sizes(sql)).keys()
    assert await store.without_waker() == []
    rulings = [
        await store.claim(Arrival(CallId(one), CallState.OK, encode(place)))
        for place in (1, 2, 3, 4)
        for one in await copies.call_ids(sql, [7], place)
    ]
    assert [one.verdict for one in rulings] == [Verdict.RECORDED] * 3 + [Verdict.GRANTED]
    assert rulings[-1].task is not None
    assert rulings[-1].task.request
    assert len(rulings[-1].known.recorded) == 4


async def test_copies_come_due_one_after_the_other(store, sql):
    put = Lives(store).park(1)
    await store.put(put)

    await copy_due(sql, put.task_id, count=8, over_s=100.0, lead_s=10.0)

    query = "SELECT task_id, min(due_at) AS due_at, count(DISTINCT due_at) FROM coatcheck.call GROUP BY 1 ORDER BY 2"
    found = [row for row in await sql.fetch(query) if row["task_id"] != UUID(str(put.task_id))]
    assert [row["count"] for row in found] == [1] * 8
    steps = [(after["due_at"] - before["due_at"]).total_seconds() for before, after in itertools.pairwise(found)]
    assert steps == pytest.approx([12.5] * 7)
    assert await store.count_tasks() == {TaskState.PARKED: 9}
