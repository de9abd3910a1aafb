"""The timeline: from plain lines to bars, from bars to cells, and the page that holds it."""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.cli.kit import Cli, with_store
from tests.examples.browser import browsing, find_browser
from tests.store.kit import all_of, birth, birth_put, calls, entry, parking, written

from coatcheck.cli.timeline import Bar, Look, Piece, Timeline, cells_of, strips_of, timeline_of
from coatcheck.store import CallId, CallState, Kind, Line, Store, Task, TaskId, TaskState

NOON = datetime(2026, 11, 18, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def task(state: TaskState, **options: Any) -> Task:
    values: dict[str, Any] = dict.fromkeys(Task.__struct_fields__[:26])
    values |= {"task_id": TaskId(uuid.UUID(int=1)), "state": state, "epoch": 1, "created_at": NOON}
    return Task(**values | options)


def line(kind: Kind, key: str, begin: float, end: float | None, **options: Any) -> Line:
    values: dict[str, Any] = {
        "name": key,
        "state": CallState.OPEN if end is None else CallState.OK,
        "seq": None,
        "value": None,
        "call_id": CallId(uuid.uuid4()),
        "peer": "search",
        "due_at": None,
        "progress": None,
        "is_sent": True,
        "is_forgotten": False,
        "checkpoint": 1,
        "epoch": 1,
        "replica": "one",
    }
    times = {"opened_at": at(begin), "closed_at": None if end is None else at(end)}
    return Line(key=key, kind=kind, **values | times | options)


def test_runs_lie_between_the_reply_that_woke_them_and_their_last_commit():
    lines = [
        line(Kind.CALL, "search#1", 10, 70),
        line(Kind.STEP, "write#1", 80, 80, epoch=2, replica="two"),
        line(Kind.CALL, "print#1", 80, None, epoch=2, replica="two"),
    ]

    found = timeline_of(task(TaskState.PARKED, epoch=2), lines, at(100))
    life = [(bar.what, bar.begin, bar.end, bar.epoch, bar.replica) for bar in found.bars[:4]]

    assert life == [
        ("run", at(0), at(10), 1, "one"),
        ("waited", at(10), at(70), None, None),
        ("run", at(70), at(80), 2, "two"),
        ("parked", at(80), at(100), None, None),
    ]
    assert (found.begin, found.end) == (at(0), at(100))


def test_a_call_is_hatched_where_its_task_waits_and_a_step_is_a_mark():
    lines = [line(Kind.CALL, "slow#1", 10, None), line(Kind.CALL, "fast#1", 10, 40), line(Kind.STEP, "a#1", 50, 50)]
    lines[2] = line(Kind.STEP, "a#1", 50, 50, epoch=2)

    found = timeline_of(task(TaskState.RUNNING, epoch=2), lines, at(60))
    slow, fast, step = (bar for bar in found.bars if bar.name)

    assert slow.pieces == (Piece(at(10), at(40), Look.WAITS), Piece(at(40), at(60), Look.RUNS))
    assert (fast.took, fast.pieces) == (timedelta(seconds=30), (Piece(at(10), at(40), Look.WAITS),))
    assert (step.took, step.pieces) == (None, (Piece(at(50), at(50), Look.MARK),))


def test_a_life_of_thousands_of_calls_is_drawn_in_a_moment():
    lines = [line(Kind.CALL, f"c#{n}", 2 * n, 2 * n + 1, epoch=n + 1, replica="r") for n in range(8000)]

    began_s = time.process_time()
    drawn = timeline_of(task(TaskState.DONE, finished_at=at(16000), epoch=8000), lines, at(16000))

    assert len(drawn.bars) > 16000
    assert time.process_time() - began_s < 5


def test_a_task_without_lines_or_time_is_drawn_all_the_same():
    found = timeline_of(task(TaskState.RUNNING), [], NOON)

    assert found.span == timedelta()
    assert strips_of(found, width=80) == []


def test_rows_of_an_older_release_have_neither_epoch_nor_replica():
    lines = [line(Kind.STEP, "a#1", 5, 5, epoch=None, replica=None)]

    found = timeline_of(task(TaskState.DONE, finished_at=at(9)), lines, at(60))

    assert {bar.by for bar in found.bars} == {"", "epoch 1"}
    assert found.end == at(9)


@pytest.mark.parametrize("width", [10, 33, 500])
def test_the_shortest_bar_of_a_long_life_can_be_seen(width: int):
    wink = Bar("call", "a#1", "ok", at(50), at(50.001), timedelta(), (Piece(at(50), at(50.001), Look.RUNS),))
    end = Bar("step", "z#1", "ok", at(1e6), at(1e6), None, (Piece(at(1e6), at(1e6), Look.MARK),))
    picture = Timeline(at(0), at(1e6), (wink, end))

    assert cells_of(picture, wink, width).count(Look.RUNS) == 1
    assert cells_of(picture, end, width)[-1] is Look.MARK


@pytest.mark.parametrize("width", [60, 80, 120, 240])
def test_the_picture_is_as_wide_as_it_may_be(width: int):
    lines = [line(Kind.CALL, f"call number {number}#1", number, 90) for number in range(20)]

    strips = strips_of(timeline_of(task(TaskState.RUNNING), lines, at(100)), width=width)

    assert len({len(strip.cells) for strip in strips}) == 1
    assert max(len(strip.before) + len(strip.cells) + len(strip.behind) + 3 for strip in strips) <= max(width, 80)


def test_a_name_moves_no_cursor():
    found = timeline_of(task(TaskState.RUNNING), [line(Kind.STEP, "a\x1b[2J\nb#1", 1, 1)], at(2))

    assert "\x1b" not in found.bars[-1].name
    assert "\n" not in found.bars[-1].name


# --- on the command line ---

NASTY = "<script>document.title='taken'</script>'\"&"


async def _park(store: Store) -> TaskId:
    newborn = birth(service="research", body={"topic": NASTY})
    waits = calls(2)
    put = birth_put(newborn, parking(all_of(waits)), opens=tuple(waits), entries=(entry(f"{NASTY}#1", NASTY),))
    await written(store, put)
    return newborn.task_id


def test_show_draws_a_timeline_in_plain_characters_off_a_terminal(store_cli: Cli, store_url: str):
    task_id = str(with_store(store_url, _park))

    shown = store_cli("show", task_id).stdout

    picture = shown.partition("Timeline\n")[2].partition("\nStory")[0]
    assert picture.isascii()
    assert "call search#1" in picture
    assert "parked" in picture
    assert "a step of unknown length" in picture
    assert "Timeline" not in store_cli("show", task_id, "--no-timeline").stdout


def test_show_draws_blocks_in_colour_on_a_terminal(store_cli: Cli, store_url: str):
    task_id = str(with_store(store_url, _park))

    shown = Cli({**store_cli.environ, "FORCE_COLOR": "1", "COLUMNS": "120"})("show", task_id).stdout

    assert "\x1b[34m▒" in shown


def test_the_page_escapes_all_and_fetches_nothing(store_cli: Cli, store_url: str, tmp_path: Path):
    task_id = str(with_store(store_url, _park))
    page = tmp_path / "task.html"

    assert store_cli("show", task_id, "--html", str(page)).exit_code == 0

    written_page = page.read_text()
    assert "<script" not in written_page
    assert "http://" not in written_page
    assert "https://" not in written_page
    assert "&lt;script&gt;" in written_page
    assert store_cli("show", task_id, "--html", str(page), "--json").exit_code == 2
    assert "cannot be written" in store_cli("show", task_id, "--html", str(tmp_path / "no" / "x.html")).stderr


@pytest.mark.skipif(find_browser() is None, reason="there is no Chromium on this machine")
def test_a_browser_shows_the_page(store_cli: Cli, store_url: str, tmp_path: Path):
    task_id = str(with_store(store_url, _park))
    page = tmp_path / "task.html"
    store_cli("show", task_id, "--html", str(page))
    program = find_browser()
    assert program is not None

    with browsing(program, tmp_path / "profile") as browser:
        browser.open(page.as_uri())
        browser.wait_for("document.readyState === 'complete' && document.querySelectorAll('section').length > 3")

        assert task_id in browser.run("document.title")
        assert browser.run("performance.getEntriesByType('resource').length") == 0
        assert browser.run("document.querySelectorAll('.bar svg').length") == 5
        assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
