"""The results of a run: a summary of each row, a table for the terminal, and the same for the documentation."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
HEADINGS = ("", "lifecycles/s", "Coatcheck / this", "wanted", "idle p50 / p99, ms", "CPU each, ms")
WANTED = {"Restate": 3, "Celery chord, Redis": 6, "DBOS, direct": 15}
"""How many times faster Coatcheck should be."""

DISTURBED_CORES = 0.25
"""If other programs use more than this of the machine, the comparison is not valid."""

Row = dict[str, Any]


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summary(rounds: Sequence[Row], own: Sequence[Row | None]) -> Row:
    """One framework over all rounds; `own` has Coatcheck's figures, round by round, for the ratio within each."""
    done = [each for each in rounds if "failed" not in each]
    if not done:
        return {"failed": rounds[-1]["failed"] if rounds else "was not run"}
    idle = sorted(taken for each in done for taken in each["idle_ms"])
    ratios = [
        ours["per_second"] / each["per_second"]
        for each, ours in zip(rounds, own, strict=False)
        if "failed" not in each and ours is not None and "failed" not in ours
    ]
    return {
        "rounds": len(done),
        "failures": [each["failed"] for each in rounds if "failed" in each],
        "per_second": spread([each["per_second"] for each in done]),
        "ratio": spread(ratios) if ratios else None,
        "idle_count": len(idle),
        "idle_p50_ms": statistics.median(idle),
        "idle_p99_ms": idle[min(len(idle) - 1, int(len(idle) * 0.99))],
        "cpu_ms": spread([each["cpu_ms"] for each in done]),
        "cpu_ms_by_group": {
            group: statistics.median(each["cpu_ms_by_group"][group] for each in done)
            for group in done[0]["cpu_ms_by_group"]
        },
        "foreign_cores": max(each["foreign_cores"] for each in done),
    }


def cells(label: str, row: Row) -> tuple[str, ...]:
    if "failed" in row:
        return (label, row["failed"], "", "", "", "")
    ratio = "" if row["ratio"] is None else f"{span(row['ratio'], 1)}x"
    some_failed = f" ({len(row['failures'])} failed)" if row["failures"] else ""
    return (
        label,
        span(row["per_second"], 0) + some_failed,
        ratio,
        next((f"{factor}x" for name, factor in WANTED.items() if label.startswith(name)), ""),
        f"{row['idle_p50_ms']:.0f} / {row['idle_p99_ms']:.0f}",
        span(row["cpu_ms"], 1),
    )


def span(figures: dict[str, float], digits: int) -> str:
    """The median, then the smallest and the largest where there was more than one round."""
    median = f"{figures['median']:.{digits}f}"
    if figures["min"] == figures["max"]:
        return median
    return f"{median} ({figures['min']:.{digits}f}-{figures['max']:.{digits}f})"


def show(found: dict[str, Row]) -> None:
    table = Table()
    for heading in HEADINGS:
        table.add_column(heading, overflow="fold")
    for label, row in found.items():
        table.add_row(*cells(label, row))
    console = Console()
    console.print(table)
    if disturbance(found):
        console.print(disturbance(found))


def disturbance(found: dict[str, Row]) -> str:
    """A remark if the machine did other work as well; empty if it did not."""
    busiest = max((row["foreign_cores"] for row in found.values() if "failed" not in row), default=0.0)
    if busiest < DISTURBED_CORES:
        return ""
    return (
        f"Something else used up to {busiest:.1f} cores meanwhile, now more and now less: neither rates nor ratios "
        "hold. Of these figures only the CPU says something, and of that the servers' part may be another's."
    )


def write_docs(path: Path, found: dict[str, Row], *, conditions: str) -> None:
    """Put the table between the markers of a page; the rest of the page is left as it is."""
    before, _, rest = path.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = [conditions, "", f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    lines += [f"| {' | '.join(cells(label, row))} |" for label, row in found.items()]
    path.write_text(before + "\n".join([BEGIN, *lines, END]) + after)
