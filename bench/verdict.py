"""The requirements, and whether a run meets them: each with its figure, its limit and its spread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from bench.measuring import Found, Measured
from bench.spread import Spread, percentile

NONE_AT_ALL = 0.01
"""Write transactions per lifecycle that count as none: a sweeper's housekeeping may write during the run."""


class Word(StrEnum):
    HOLDS = "holds"
    FAILS = "does not hold"
    NOT_MEASURED = "not in this run"
    TOO_HIGH = "unclear, others wrote too"


@dataclass(frozen=True, slots=True)
class Requirement:
    text: str
    limit: float
    is_floor: bool
    rows: tuple[str, ...]
    figure: Callable[[Found], Spread]
    is_of_server: bool = False
    """Counted for the whole server, so the figure may be too high, never too low."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one requirement, by the median over the rounds."""

    requirement: str
    figure: str
    word: Word


def judge(found: Found) -> list[Verdict]:
    return [_judge(requirement, found) for requirement in REQUIREMENTS]


def _judge(requirement: Requirement, found: Found) -> Verdict:
    if any(not found.get(row) for row in requirement.rows):
        return Verdict(requirement.text, "", Word.NOT_MEASURED)
    figure = requirement.figure(found)
    if figure.median >= requirement.limit if requirement.is_floor else figure.median <= requirement.limit:
        word = Word.HOLDS
    elif requirement.is_of_server and _is_shared(requirement, found):
        word = Word.TOO_HIGH
    else:
        word = Word.FAILS
    return Verdict(requirement.text, figure.written(3 if requirement.limit < 0.1 else 2), word)


def _is_shared(requirement: Requirement, found: Found) -> bool:
    costs = [cost for row in requirement.rows for each in found[row] for cost in (each.cost, each.idle_cost)]
    return any(cost.foreign_rows > 0 for cost in costs if cost is not None)


# --- figures ---


def _rates(rounds: Sequence[Measured]) -> list[float]:
    return [each.per_second for each in rounds]


def _p50s(rounds: Sequence[Measured]) -> list[float]:
    return [percentile(each.latencies_ms, 50) for each in rounds]


def _rate_ratio(row: str, to: str, found: Found) -> Spread:
    return Spread.ratio(_rates(found[row]), _rates(found[to]))


def _latency_ratio(row: str, to: str, found: Found) -> Spread:
    return Spread.ratio(_p50s(found[row]), _p50s(found[to]))


def _percentiles(row: str, percent: float, found: Found) -> Spread:
    return Spread.of([percentile(each.latencies_ms, percent) for each in found[row]])


def _writes(row: str, found: Found) -> Spread:
    return Spread.of([each.cost.write_transactions for each in found[row]])


def _idle_writes(row: str, found: Found) -> Spread:
    return Spread.of([each.idle_cost.write_transactions for each in found[row] if each.idle_cost])


# --- requirements ---


def _faster(row: str, to: str, factor: float, name: str) -> Requirement:
    text = f"{row}: throughput at least {factor:g} times {name}"
    return Requirement(text, factor, is_floor=True, rows=(row, to), figure=partial(_rate_ratio, row, to))


def _quick(row: str, text: str, limit_ms: float, *, percent: float) -> Requirement:
    figure = partial(_percentiles, row, percent)
    return Requirement(f"{row}: {text} {limit_ms:g} ms", limit_ms, is_floor=False, rows=(row,), figure=figure)


def _few_writes(row: str, text: str, limit: float, *, is_idle: bool = False) -> Requirement:
    figure = partial(_idle_writes if is_idle else _writes, row)
    return Requirement(f"{row}: {text}", limit, is_floor=False, rows=(row,), figure=figure, is_of_server=True)


REQUIREMENTS = (
    _faster("fan-4", "batched", 0.6, "the bare batched loop on the same client"),
    _faster("fan-4", "naive", 4, "the naive loop on aio-pika"),
    _few_writes("fan-4", "at most 6 write transactions each, idle", 6, is_idle=True),
    _few_writes("fan-4", "at most 0.3 write transactions each, saturated", 0.3),
    Requirement(
        "fan-4: idle p50 at most 1.5 times the bare batched loop's",
        1.5,
        is_floor=False,
        rows=("fan-4", "batched"),
        figure=partial(_latency_ratio, "fan-4", "batched"),
    ),
    _few_writes("no-wait", "no write transaction", NONE_AT_ALL),
    _faster("no-wait", "bare", 0.6, "a bare consume-reply loop on the same client"),
    _faster("fan-4", "fan-4-off", 0.95, "the same without a history"),
    _faster("fan-4-full", "fan-4-off", 0.85, "the same without a history"),
    _quick("append", "p99 of an entry at most", 10, percent=99),
    _quick("save-100k", "p95 of a save at most", 50, percent=95),
    _quick("restore-1000", "p99 of a restore at most", 100, percent=99),
)
