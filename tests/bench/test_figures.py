"""What the bench makes of its figures: spreads, ratios, CPU of process trees, verdicts, the page it fills in."""

import math
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from bench import report
from bench.measuring import Found, Measured
from bench.probes import Cost, Reading, children_by_parent, cpu_of_tree_s, read_counter, read_stat
from bench.rows import ROWS, UnknownRow, choose
from bench.spread import Spread, percentile
from bench.verdict import Word, judge

SVG = "{http://www.w3.org/2000/svg}"
COST = Cost({"worker": 2.0, "client": 0.5}, 0.2, 4096.0, 10.0, 0)


def rounds(*rates: float, latency_ms: float = 10.0, writes: float = 0.2, idle_writes: float = 4.0) -> list[Measured]:
    cost, idle = replace(COST, write_transactions=writes), replace(COST, write_transactions=idle_writes)
    return [Measured(rate, cost, [latency_ms] * 5, idle) for rate in rates]


def good() -> Found:
    return {
        "naive": rounds(100, 110),
        "batched": rounds(700, 720),
        "fan-4-off": rounds(510, 490),
        "fan-4": rounds(500, 480, latency_ms=14),
        "bare": rounds(2000, 2100),
        "no-wait": rounds(1500, 1600, writes=0.0),
        "fan-4-full": rounds(450, 430),
    }


def stored() -> Found:
    names = ("append", "save-100k", "restore-1000")
    return {name: [Measured(300, COST, [1.0, 2.0, 9.0])] for name in names}


def verdicts(found: Found) -> dict[str, Word]:
    return {each.requirement: each.word for each in judge(found)}


# --- spreads ---


def test_spread_is_the_median_with_both_ends() -> None:
    assert Spread.of([3, 1, 2]) == Spread(2, 1, 3)
    assert Spread.of([3, 1, 2]).written(1) == "2.0 (1.0 to 3.0)"
    assert Spread.of([1234.5]).written(0) == "1,234"


def test_ratio_is_taken_round_by_round() -> None:
    slow_machine_later = Spread.ratio([100, 50], [50, 25])

    assert slow_machine_later == Spread(2, 2, 2)
    assert Spread.ratio([1], [0]).median == math.inf


@pytest.mark.parametrize(("percent", "value"), [(50, 50), (99, 99), (100, 100), (0, 1)])
def test_percentile_is_a_value_that_was_seen(percent: float, value: float) -> None:
    assert percentile(list(range(100, 0, -1)), percent) == value


def test_percentile_of_one_value_is_that_value() -> None:
    assert percentile([7.0], 99) == 7.0


# --- probes ---


def test_cost_is_the_difference_for_each_lifecycle() -> None:
    before = Reading({"worker": 1.0}, transactions=100, wal_bytes=1000, foreign_rows=5, messages=50)
    after = Reading({"worker": 3.0}, transactions=300, wal_bytes=5000, foreign_rows=8, messages=150)

    assert Cost.between(before, after, 10) == Cost({"worker": 200.0}, 20.0, 400.0, 10.0, 3)


BURN = "import time\nwhile time.process_time() < 0.3: pass\n"
PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {BURN!r}])
child = subprocess.Popen([sys.executable, "-c", {BURN + "print(flush=True); input()"!r}], stdout=-1, stdin=-1)
child.stdout.readline()
print(flush=True)
input()
"""


def test_cpu_of_a_tree_holds_children_that_live_and_children_that_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as root:
        assert root.stdout is not None
        root.stdout.readline()
        alone_s, tree_s = cpu_of_tree_s(root.pid, {}), cpu_of_tree_s(root.pid, children_by_parent())
        root.kill()

    assert alone_s >= 0.25  # its own, and that of the child that ended; Linux counts in ticks, and rounds down
    assert tree_s >= alone_s + 0.25  # and that of the child that lives


def test_process_that_is_gone_costs_nothing() -> None:
    assert read_stat(2**30) == []
    assert cpu_of_tree_s(2**30, {}) == 0.0


def test_counter_is_read_from_metrics() -> None:
    text = "# HELP sent_total x\nsent_total_created 5\nsent_total 12.0\n"

    assert read_counter(text, "sent_total") == 12
    with pytest.raises(ValueError, match="no lost_total"):
        read_counter(text, "lost_total")


# --- rows ---


def test_rows_are_measured_in_one_order_and_unknown_ones_are_named() -> None:
    assert [row.name for row in choose(["fan-4", "naive"])] == ["naive", "fan-4"]
    with pytest.raises(UnknownRow, match=r"no row 'fan-5'; there are naive, .*fan-4"):
        choose(["fan-4", "fan-5"])


# --- verdict ---


def test_good_run_shows_all_that_was_measured() -> None:
    found = verdicts(good() | stored())

    assert set(found.values()) == {Word.HOLDS}


@pytest.mark.parametrize(
    ("row", "worse", "broken_count"),
    [
        ("fan-4", rounds(300, 300, latency_ms=14), 3),  # too slow for both loops, and for what its history costs
        ("fan-4-full", rounds(400, 400), 1),
        ("append", [Measured(9, COST, [1.0, 11.0])], 1),
        ("save-100k", [Measured(9, COST, [1.0, 51.0])], 1),
        ("restore-1000", [Measured(9, COST, [1.0, 101.0])], 1),
        ("fan-4", rounds(500, 500, latency_ms=16), 1),
        ("fan-4", rounds(500, 500, writes=0.31), 1),
        ("fan-4", rounds(500, 500, idle_writes=6.5), 1),
        ("no-wait", rounds(1500, 1500, writes=0.02), 1),
        ("no-wait", rounds(1000, 1000, writes=0.0), 1),
    ],
)
def test_each_requirement_can_fail(row: str, worse: list[Measured], broken_count: int) -> None:
    assert list(verdicts(good() | stored() | {row: worse}).values()).count(Word.FAILS) == broken_count


def test_row_that_was_not_measured_leaves_its_requirements_open() -> None:
    found = good() | stored()
    del found["batched"]

    assert list(verdicts(found).values()).count(Word.NOT_MEASURED) == 2


def test_write_transactions_of_a_shared_server_prove_no_failure() -> None:
    shared = [
        replace(each, cost=replace(each.cost, foreign_rows=9)) for each in rounds(500, 500, writes=7, idle_writes=7)
    ]
    found = verdicts(good() | {"fan-4": shared})

    assert list(found.values()).count(Word.TOO_HIGH) == 2
    assert Word.FAILS not in found.values()


# --- report ---


def test_tables_hold_every_row_and_requirement() -> None:
    found = good() | {"timer-storm": [Measured(300, COST, [1.0, 9.0])], "cancel-storm": [Measured(100, COST, [])]}
    found |= {"append": stored()["append"]}
    found = {name: rounds[:1] for name, rounds in found.items()}
    speed, ratios, cost, storms, store, targets = report.sheets(found, judge(found))

    assert [line[0] for line in speed.lines] == list(good())
    assert {line[0] for line in cost.lines} == found.keys()
    assert storms.lines == [("timer-storm", "300", "1", "9"), ("cancel-storm", "100", "", "")]
    assert store.lines == [("append", "2.00", "9.00", "9.00")]
    assert len(targets.lines) == len(judge(found))
    assert ("fan-4", "batched", "0.71", "1.40", "1.00") in ratios.lines
    for sheet in (speed, ratios, cost, storms, store, targets):
        assert all(len(line) == len(sheet.heads) for line in sheet.lines)


def test_notes_tell_of_others_and_of_what_was_not_seen() -> None:
    found = {"fan-4": [Measured(300, replace(COST, foreign_rows=7), [1.0])]}
    (conditions, others, unseen) = report.notes(found, {"cores": 2})

    assert conditions == "cores 2."
    assert "Others wrote 7 rows" in others
    assert "CPU of postgres and rabbitmq is not included" in unseen


def test_page_is_filled_between_its_markers_and_can_be_filled_again() -> None:
    page = "before\n<!-- figures: made by a run -->\nold\n<!-- /figures -->\nafter\n"
    filled = report.fill(page, "figures", r"new \1")

    assert filled == "before\n<!-- figures: made by a run -->\nnew \\1\n<!-- /figures -->\nafter\n"
    assert report.fill(filled, "figures", "old") == page
    with pytest.raises(ValueError, match="0 places for 'targets'"):
        report.fill(page, "targets", "")


def test_plot_draws_each_row_as_long_as_it_is_fast() -> None:
    plot = ET.fromstring(report.draw(good()))
    named = [each.attrib for each in plot.iter(f"{SVG}rect") if "data-name" in each.attrib]
    widths = {each["data-name"]: float(each["width"]) for each in named}

    assert widths["batched"] / widths["naive"] == pytest.approx(710 / 105, rel=0.01)
    assert {f"{name} worker" for name in good()} <= widths.keys()
    assert good().keys() <= ROWS.keys()
