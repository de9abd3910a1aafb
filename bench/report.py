"""The results of a run, for people and for programs: tables, Markdown, JSON, a plot."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import plot
from bench.measuring import Found, Measured
from bench.rows import ROWS, Kind
from bench.spread import Spread, percentile
from bench.verdict import Verdict
from rich.console import Console
from rich.table import Table

GROUPS = ("worker", "sweeper", "peer", "client", "rabbitmq", "postgres")
FILE_WIDTH = 150


@dataclass
class Sheet:
    """A table, for any of the output formats."""

    title: str
    heads: Sequence[str]
    lines: list[Sequence[str]] = field(default_factory=list)

    def is_number(self, column: int) -> bool:
        cells = [line[column] for line in self.lines]
        return all(cell[:1].isdigit() for cell in cells if cell) and any(cells)

    def to_rich(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for column, head in enumerate(self.heads):
            table.add_column(head, justify="right" if self.is_number(column) else "left")
        for line in self.lines:
            table.add_row(*line)
        return table

    def to_markdown(self) -> str:
        rule = ["---:" if self.is_number(column) else "---" for column in range(len(self.heads))]
        return "\n".join(f"| {' | '.join(line)} |" for line in (self.heads, rule, *self.lines))


def sheets(found: Found, verdicts: Sequence[Verdict]) -> list[Sheet]:
    made = [_speed(found), _ratios(found), _cost(found), _storms(found), _store(found), _targets(verdicts)]
    return [sheet for sheet in made if sheet.lines]


def _speed(found: Found) -> Sheet:
    sheet = Sheet("Speed", ("row", "lifecycles/s", "idle p50, ms", "idle p99, ms"))
    for name, rounds in _rounds(found, Kind.LIFECYCLES):
        rate = Spread.of([each.per_second for each in rounds])
        p50 = Spread.of(_p50s(rounds))
        p99 = percentile([taken for each in rounds for taken in each.latencies_ms], 99)
        sheet.lines.append((name, rate.written(0), p50.written(1), f"{p99:.1f}"))
    return sheet


def _ratios(found: Found) -> Sheet:
    sheet = Sheet("Compared, round by round", ("row", "with", "lifecycles/s", "idle p50", "CPU of one lifecycle"))
    for name, rounds in found.items():
        for other in ROWS[name].yardsticks:
            if to := found.get(other):
                rate = Spread.ratio([each.per_second for each in rounds], [each.per_second for each in to])
                has_idle = ROWS[name].kind is Kind.LIFECYCLES
                idle = Spread.ratio(_p50s(rounds), _p50s(to)).written() if has_idle else ""
                cpu = Spread.ratio(_cpu_totals(rounds), _cpu_totals(to))
                sheet.lines.append((name, other, rate.written(), idle, cpu.written()))
    return sheet


def _cost(found: Found) -> Sheet:
    groups = [name for name in GROUPS if any(name in each.cost.cpu_ms for rounds in found.values() for each in rounds)]
    heads = ("row", "writes, idle", "writes, saturated", "WAL, KB", "messages", "CPU, ms", *groups)
    sheet = Sheet("Cost of one lifecycle", heads)
    for name, rounds in found.items():
        idle = [each.idle_cost.write_transactions for each in rounds if each.idle_cost]
        costs = [each.cost for each in rounds]
        total = Spread.of(_cpu_totals(rounds))
        by_group = _cpu_by_group(rounds)
        sheet.lines.append(
            (
                name,
                Spread.of(idle).written(1) if idle else "",
                Spread.of([cost.write_transactions for cost in costs]).written(2),
                f"{statistics.median(cost.wal_bytes for cost in costs) / 1024:.1f}",
                f"{statistics.median(cost.messages for cost in costs):.1f}",
                total.written(1),
                *(f"{by_group[group]:.2f}" if group in by_group else "" for group in groups),
            )
        )
    return sheet


def _storms(found: Found) -> Sheet:
    sheet = Sheet("Storms", ("row", "tasks/s", "late p50, ms", "late p99, ms"))
    for kind in (Kind.TIMERS, Kind.CANCELS):
        for name, rounds in _rounds(found, kind):
            late = [
                Spread.of([percentile(each.latencies_ms, percent) for each in rounds]).written(0)
                for percent in (50, 99)
                if all(each.latencies_ms for each in rounds)
            ]
            rate = Spread.of([each.per_second for each in rounds]).written(0)
            sheet.lines.append((name, rate, *(late or ("", ""))))
    return sheet


def _store(found: Found) -> Sheet:
    sheet = Sheet("The store by itself, one operation at a time", ("row", "p50, ms", "p95, ms", "p99, ms"))
    for name, rounds in _rounds(found, Kind.STORE):
        for_each = [[percentile(each.latencies_ms, percent) for each in rounds] for percent in (50, 95, 99)]
        sheet.lines.append((name, *(Spread.of(times).written(2) for times in for_each)))
    return sheet


def _targets(verdicts: Sequence[Verdict]) -> Sheet:
    lines: list[Sequence[str]] = [(each.requirement, each.figure, each.word.value) for each in verdicts]
    return Sheet("What has to be shown", ("requirement", "measured", "verdict"), lines)


def _rounds(found: Found, kind: Kind) -> list[tuple[str, list[Measured]]]:
    return [(name, rounds) for name, rounds in found.items() if ROWS[name].kind is kind]


def _p50s(rounds: Sequence[Measured]) -> list[float]:
    return [percentile(each.latencies_ms, 50) for each in rounds]


def _cpu_totals(rounds: Sequence[Measured]) -> list[float]:
    return [sum(each.cost.cpu_ms.values()) for each in rounds]


def _cpu_by_group(rounds: Sequence[Measured]) -> dict[str, float]:
    names = rounds[0].cost.cpu_ms
    return {name: statistics.median(each.cost.cpu_ms[name] for each in rounds) for name in GROUPS if name in names}


# --- where it goes ---


def notes(found: Found, conditions: dict[str, object]) -> list[str]:
    """Remarks that a reader needs in order to judge the figures."""
    made = ["; ".join(f"{name} {value}" for name, value in conditions.items()) + "."]
    costs = [cost for rounds in found.values() for each in rounds for cost in (each.cost, each.idle_cost) if cost]
    rows = sum(cost.foreign_rows for cost in costs)
    if rows > 0:
        made.append(
            f"Others wrote {rows:,} rows to the same Postgres during the run: write transactions and WAL, which are "
            "counted for the whole server, are too high."
        )
    missing = {"rabbitmq", "postgres"} - {name for cost in costs for name in cost.cpu_ms}
    if missing:
        made.append(f"CPU of {' and '.join(sorted(missing))} is not included: not found on this machine.")
    return made


def to_json(found: Found, verdicts: Sequence[Verdict], conditions: dict[str, object]) -> str:
    document = {
        "conditions": conditions,
        "rows": {name: [dataclasses.asdict(each) for each in rounds] for name, rounds in found.items()},
        "verdicts": [dataclasses.asdict(each) for each in verdicts],
    }
    return json.dumps(document, indent=1)


def show(made: Sequence[Sheet], said: Sequence[str]) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    for sheet in made:
        console.print(sheet.to_rich())
    for note in said:
        console.print(note, markup=False)


def fill(page: str, name: str, content: str) -> str:
    """Put content between the markers of this name. Raises ValueError if the page has none."""
    block = re.compile(rf"(<!-- {name}: .*? -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    filled, count = block.subn(lambda found: f"{found[1]}{content}\n{found[2]}", page)
    if count != 1:
        raise ValueError(f"the page has {count} places for {name!r}, not one")
    return filled


def write_page(made: Sequence[Sheet], said: Sequence[str], page: Path) -> None:
    *figures, targets = made
    titled = [f"### {sheet.title}\n\n{sheet.to_markdown()}" for sheet in figures]
    text = fill(page.read_text(encoding="utf-8"), "figures", "\n\n".join([*titled, *said]))
    page.write_text(fill(text, "targets", targets.to_markdown()), encoding="utf-8")


def draw(found: Found) -> str:
    """Throughput, and where the CPU of a lifecycle goes. Rows of a weight under 1 are left out."""
    drawn = [(name, rounds) for name, rounds in _rounds(found, Kind.LIFECYCLES) if ROWS[name].weight >= 1]
    rates = [(name, Spread.of([each.per_second for each in rounds])) for name, rounds in drawn]
    cpu = [(name, _cpu_by_group(rounds)) for name, rounds in drawn]
    room = plot.height_of(len(drawn))
    parts = plot.bars(rates, top=plot.TOP, title="lifecycles per second: median, lowest to highest round")
    parts += plot.stacks(cpu, top=plot.TOP + room, title="CPU of one lifecycle, ms")
    return plot.document(parts, width=plot.LEFT + plot.WIDTH + 70, height=2 * room + plot.TOP)
