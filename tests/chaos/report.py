"""The page a trial leaves behind: what was done to whom, what was seen, how long recovery took."""

from __future__ import annotations

import importlib.metadata
import math
import platform
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.chaos.books import read
from tests.chaos.trial import LEASE_S, Outcome

LIBRARIES = ("coatcheck", "aio-pika", "aiormq", "asyncpg", "SQLAlchemy", "uvloop")


def recovery_times(directory: Path) -> list[float]:
    """For every handler that was running in a worker when that died: seconds until it runs again, anywhere.

    From the moment of death to the next `begin` of the same task in the ledger of another process. Outages that went on
    at the same time are part of it. A task that was cancelled meanwhile does not run again and does not count.
    """
    died_at = _deaths(directory)
    begun: dict[str, list[tuple[float, int]]] = defaultdict(list)
    held: dict[int, dict[str, str]] = defaultdict(dict)
    for path in directory.glob("ledger-*.jsonl"):
        pid = int(path.name.split("-")[1])
        for line in read(path):
            if line["what"] == "begin":
                begun[line["task"]].append((line["at"], pid))
                held[pid][line["run"]] = line["task"]
            elif line["what"] == "end":
                held[pid].pop(line["run"], None)
    times = []
    for pid, at in died_at.items():
        for task in set(held[pid].values()):
            later = [when for when, where in begun[task] if when > at and where != pid]
            times += [min(later) - at] if later else []
    return sorted(times)


def _deaths(directory: Path) -> dict[int, float]:
    """When each worker died: by our signal, or when its end was noticed."""
    died_at: dict[int, float] = {}
    for event in read(directory / "events.jsonl"):
        if event["what"] == "killed" and event["role"] == "worker":
            died_at[event["pid"]] = event["at"]
        elif event["what"] == "died" and event["role"] == "worker":
            died_at.setdefault(event["pid"], event["at"])
    return died_at


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so many are not above."""
    return values[max(0, math.ceil(share * len(values)) - 1)] if values else math.nan


def kinds(directory: Path) -> Counter[str]:
    lines = (line for path in directory.glob("client-*.jsonl") for line in read(path))
    return Counter(kind for _, kind in {(line["id"], line["kind"]) for line in lines if line["what"] == "send"})


def render(outcome: Outcome, directory: Path) -> str:
    """The whole page, in Markdown."""
    options, points = outcome.options, outcome.points
    assert points is not None
    times = recovery_times(directory)
    began = datetime.fromtimestamp(outcome.began_at, UTC)
    violation_count = (
        outcome.verdict.strip().splitlines()[-1] if outcome.verdict.strip() else "the checker said nothing"
    )
    versions = {
        "Python": platform.python_version(),
        **outcome.versions,
        **{name: importlib.metadata.version(name) for name in LIBRARIES},
    }
    sections = [
        f"# Trial of {began:%Y-%m-%d %H:%M} UTC, seed {options.seed}",
        f"**{violation_count}**, {_reached(outcome)}."
        + ("" if outcome.is_broken_enough else " Less was broken than was asked for.")
        + ("" if outcome.is_settled else " It did not settle within its time limit."),
        _how(outcome),
        "## What was done",
        _table(("fault", "count"), _faults(outcome)),
        "## What was looked at",
        f"```text\n{outcome.verdict.strip()}\n```",
        "## Recovery",
        _recovery(times),
        "## Crash points",
        _table(
            ("point", "deaths", "freezes"), [(name, points.ended[name], points.stopped[name]) for name in points.names]
        ),
        "## Kinds of tasks",
        ", ".join(f"{kind} {count}" for kind, count in sorted(kinds(directory).items())),
        "## Versions",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
    ]
    return "\n\n".join(sections) + "\n"


def _how(outcome: Outcome) -> str:
    options = outcome.options
    more = [f"--broker-kind {outcome.broker_kind}"] if outcome.broker_kind != "amqp" else []
    more += [f"--points {options.point_count}"] if options.point_count is not None else []
    more += ["--every-fault"] if options.needs_every_fault else []
    arguments = f" CHAOS_ARGS='{' '.join(more)}'" if more else ""
    return (
        f"`make chaos TASKS={options.task_count} MINUTES={options.minutes:g} SEED={options.seed}{arguments}`, "
        f"{outcome.length_s:.0f} s in all, {options.worker_count} workers, 2 sweepers, "
        f"{options.client_count} clients, lease {LEASE_S:g} s."
    )


def _recovery(times: Sequence[float]) -> str:
    return (
        f"{len(times)} handlers were running in a worker when it died. Until each ran again elsewhere: "
        f"p50 {percentile(times, 0.5):.2f} s, p99 {percentile(times, 0.99):.2f} s, "
        f"longest {max(times, default=math.nan):.2f} s. Outages that went on at the time are part of it."
    )


def _reached(outcome: Outcome) -> str:
    assert outcome.points is not None
    names, missing = outcome.points.names, outcome.points.missing
    text = f"a process died at {len(names) - len(missing)} of {len(names)} crash points"
    return f"{text} (not at: {', '.join(missing)})" if missing else text


def _faults(outcome: Outcome) -> list[tuple[str, Any]]:
    done = sorted((outcome.counts + outcome.faults).items())
    return [*done, *((name, f"not possible: {why}") for name, why in outcome.impossible.items())]


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)
