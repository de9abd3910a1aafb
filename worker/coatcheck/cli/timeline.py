"""A task's life as bars over time: from lines of its story to segments, and from segments to text.

What the rows tell is drawn, and no more. A call or timer is open from its commit to its reply. A step's row is written
when the step ends, and tells how long it took; one of an older release is a mark at its end. When a run began is not
kept: it is drawn from the last reply before its first commit (from that commit, if no reply came) to its last commit.
What lies between two runs is a wait.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

from rich.text import Text

from coatcheck.cli.output import clock_time, duration, say, stdout
from coatcheck.store.rows import CallState, Task, TaskState
from coatcheck.store.views import Line
from coatcheck.worker.redaction import clean


class Look(StrEnum):
    """How a piece of a bar is drawn."""

    RUNS = "runs"
    WAITS = "waits"
    MARK = "mark"


class Piece(NamedTuple):
    begin: datetime
    end: datetime
    look: Look


@dataclass(frozen=True, slots=True)
class Bar:
    """One line of the picture. `took` is None where only the end is known."""

    what: str
    name: str
    state: str
    begin: datetime
    end: datetime
    took: timedelta | None
    pieces: tuple[Piece, ...]
    epoch: int | None = None
    replica: str | None = None

    @property
    def by(self) -> str:
        """`epoch 2, worker-1`, as far as it is known."""
        known = [f"epoch {self.epoch}" if self.epoch is not None else "", self.replica or ""]
        return ", ".join(part for part in known if part)


@dataclass(frozen=True, slots=True)
class Timeline:
    begin: datetime
    end: datetime
    bars: tuple[Bar, ...]

    @property
    def span(self) -> timedelta:
        return self.end - self.begin

    def share(self, at: datetime) -> float:
        """Where an instant lies between the ends, 0 to 1."""
        return min(1.0, max(0.0, (at - self.begin) / self.span)) if self.span else 0.0


class _Commit(NamedTuple):
    at: datetime
    epoch: int | None
    replica: str | None


def timeline_of(task: Task, lines: Sequence[Line], now: datetime) -> Timeline:
    """The bars of a task: its runs and waits, then its steps and calls in the order they began. Pure."""
    end = task.finished_at or max([now, *(line.closed_at or line.opened_at for line in lines)])
    life = list(_runs_and_waits(task, lines, end=max(end, task.created_at)))
    waits = [bar for bar in life if bar.what != "run"]
    drawn = sorted(lines, key=lambda line: line.opened_at)
    bars = (*life, *(_bar_of(line, waits, end) for line in drawn))
    first = min([task.created_at, *(bar.begin for bar in bars)])
    return Timeline(first, max([end, first, *(bar.end for bar in bars)]), bars)


# --- runs and waits ---


def _runs_and_waits(task: Task, lines: Sequence[Line], *, end: datetime) -> Iterator[Bar]:
    """Commits of one epoch are one run; what lies between two of them is a wait."""
    free_from, is_first, last_epoch = task.created_at, True, None
    ended = _ends_from_outside(lines)
    for epoch, group in groupby(_commits(task, lines), key=lambda commit: commit.epoch):
        commits = list(group)
        replica = next((commit.replica for commit in commits if commit.replica), None)
        begin = _run_begin(ended, free_from=free_from, first=commits[0].at, is_first=is_first)
        if begin > free_from:
            yield _wait("waited", free_from, begin)
        yield _run(begin, commits[-1].at, epoch=epoch, replica=replica)
        free_from, is_first, last_epoch = commits[-1].at, False, epoch
    if free_from >= end:
        return
    if task.state is TaskState.RUNNING:
        is_same_run = is_first or last_epoch == task.epoch
        begin = free_from if is_same_run else _run_begin(ended, free_from=free_from, first=end, is_first=False)
        if begin > free_from:
            yield _wait("waited", free_from, begin)
        yield _run(begin, end, epoch=task.epoch, replica=None)
    else:
        yield _wait("waited" if task.state.is_final else task.state.value, free_from, end)


def _commits(task: Task, lines: Sequence[Line]) -> list[_Commit]:
    """Every commit that a row tells of, in order. A run's last one is known by the task's end; a cancel is no run's."""
    found = [_Commit(line.opened_at, line.epoch, line.replica) for line in lines]
    # A run was at work both when a step began and when it was recorded.
    entries = [(line, line.closed_at) for line in lines if line.call_id is None and line.closed_at is not None]
    found += [_Commit(closed_at, line.epoch, line.replica) for line, closed_at in entries]
    if task.finished_at is not None and task.state is not TaskState.CANCELLED:
        found.append(_Commit(task.finished_at, task.epoch, None))
    return sorted(found, key=lambda commit: commit.at)


def _ends_from_outside(lines: Iterable[Line]) -> list[datetime]:
    """When replies came and timers rang, in order."""
    ended = (line.closed_at for line in lines if line.kind.is_awaited and line.state is not CallState.CLOSED)
    return sorted(at for at in ended if at is not None)


def _run_begin(ended: Sequence[datetime], *, free_from: datetime, first: datetime, is_first: bool) -> datetime:
    """The first run begins with the task; a later one, as far as is known, with the last reply before its commit."""
    if is_first:
        return free_from
    before = bisect_right(ended, first)
    return ended[before - 1] if before and ended[before - 1] >= free_from else first


def _run(begin: datetime, end: datetime, *, epoch: int | None, replica: str | None) -> Bar:
    pieces = (Piece(begin, end, Look.RUNS),)
    return Bar("run", "", "", begin, end, end - begin, pieces, epoch, replica)


def _wait(what: str, begin: datetime, end: datetime) -> Bar:
    return Bar(what, "", "", begin, end, end - begin, (Piece(begin, end, Look.WAITS),))


# --- steps and calls ---


def _bar_of(line: Line, waits: Sequence[Bar], end: datetime) -> Bar:
    closed_at = line.closed_at or (end if line.state is CallState.OPEN and line.kind.is_awaited else line.opened_at)
    closed_at = max(closed_at, line.opened_at)
    name = " ".join(clean(line.key or line.name).split())
    if not line.kind.is_awaited and (line.call_id is not None or closed_at == line.opened_at):
        pieces: tuple[Piece, ...] = (Piece(line.opened_at, line.opened_at, Look.MARK),)
        took = None
    else:
        pieces = tuple(_cut(line.opened_at, closed_at, waits))
        took = closed_at - line.opened_at
    return Bar(
        line.kind.value, name, line.state.value, line.opened_at, closed_at, took, pieces, line.epoch, line.replica
    )


def _cut(begin: datetime, end: datetime, waits: Sequence[Bar]) -> Iterator[Piece]:
    """A bar in pieces: those in which the task waited, and those in which a run went on beside it.

    Waits are in order, and only those of its time are looked at: a long task has thousands of bars and of waits.
    """
    at = begin
    for index in range(bisect_right(waits, begin, key=lambda wait: wait.end), len(waits)):
        wait = waits[index]
        if wait.begin >= end:
            break
        first, last = max(wait.begin, at), min(wait.end, end)
        if first >= last:
            continue
        if first > at:
            yield Piece(at, first, Look.RUNS)
        yield Piece(first, last, Look.WAITS)
        at = last
    if at < end or at == begin:
        yield Piece(at, end, Look.RUNS)


# --- as text ---


def say_timeline(timeline: Timeline, *, most: int | None) -> None:
    """Draw it as wide as the terminal is: in colours and blocks there, in plain characters elsewhere."""
    console = stdout()
    has_blocks = console.is_terminal and console.encoding.startswith("utf")
    glyphs, left_out = BLOCKS if has_blocks else ASCII, len(timeline.bars) - (most or len(timeline.bars))
    shown = Timeline(timeline.begin, timeline.end, timeline.bars[:most])
    strips = strips_of(shown, width=console.width if console.is_terminal else WIDTH_OF_A_FILE)
    say(axis_of(shown, strips[0]), style="dim")
    for strip in strips:
        console.print(_drawn(strip, glyphs))
    if left_out > 0:
        say(f"… {left_out} more with --full", style="dim")
    say(legend_of(glyphs), style="dim")


def _drawn(strip: Strip, glyphs: Glyphs) -> Text:
    line = Text(f"{strip.before}{glyphs.left}")
    for look, cells in groupby(strip.cells):
        glyph = " " if look is None else getattr(glyphs, look.value)
        line.append(glyph * len(list(cells)), style="" if look is None else STYLE_OF[look])
    return line.append(f"{glyphs.right} {strip.behind}")


class Glyphs(NamedTuple):
    runs: str
    waits: str
    mark: str
    left: str
    right: str


BLOCKS = Glyphs("█", "▒", "◆", "▏", "▕")
ASCII = Glyphs("#", "/", "*", "|", "|")
NARROWEST = 10
LONGEST_NAME = 28
WIDTH_OF_A_FILE = 120
STYLE_OF = {Look.RUNS: "cyan", Look.WAITS: "blue", Look.MARK: "green"}


class Strip(NamedTuple):
    """A line of text around a bar: what stands before it, the bar's cells with their looks, what stands behind it."""

    before: str
    cells: tuple[Look | None, ...]
    behind: str


def strips_of(timeline: Timeline, *, width: int) -> list[Strip]:
    """The picture in lines of that width, if it can be that narrow. What stands behind a bar is not cut off."""
    longest = min(LONGEST_NAME, max(NARROWEST, width // 5))
    heads = [_head(bar, timeline.begin, longest) for bar in timeline.bars]
    tails = [" ".join(part for part in (bar.state, bar.by) if part) for bar in timeline.bars]
    widths = [max((len(head[column]) for head in heads), default=0) for column in range(3)]
    tail = max(map(len, tails), default=0)
    cells = max(NARROWEST, width - sum(widths) - tail - 9)
    return [
        Strip(
            f"{head[0].ljust(widths[0])}  {head[1].ljust(widths[1])}  {head[2].rjust(widths[2])} ",
            cells_of(timeline, bar, cells),
            said,
        )
        for bar, head, said in zip(timeline.bars, heads, tails, strict=True)
    ]


def _head(bar: Bar, day_of: datetime, longest: int) -> tuple[str, str, str]:
    name = f"{bar.what} {bar.name}".strip()
    short = name if len(name) <= longest else f"{name[: longest - 2]}.."
    return short, clock_time(bar.begin, day_of=day_of), "-" if bar.took is None else duration(bar.took)


def cells_of(timeline: Timeline, bar: Bar, width: int) -> tuple[Look | None, ...]:
    """A bar in cells on a linear scale. A bar has a cell at least, however short; so has a piece of half a cell."""
    cells: list[Look | None] = [None] * width
    half = timeline.span / width / 2
    longest = max(piece.end - piece.begin for piece in bar.pieces)
    for piece in sorted(bar.pieces, key=lambda piece: piece.end - piece.begin, reverse=True):
        if piece.end - piece.begin < min(half, longest):
            continue
        first = min(width - 1, int(timeline.share(piece.begin) * width))
        last = min(width, max(first + 1, round(timeline.share(piece.end) * width)))
        cells[first:last] = [piece.look] * (last - first)
    return tuple(cells)


def axis_of(timeline: Timeline, strip: Strip) -> str:
    """The line above the bars: both ends of the scale, and its length where there is room for it."""
    begin, end = (clock_time(at, day_of=timeline.begin) for at in (timeline.begin, timeline.end))
    room = len(strip.cells) + 2 - len(begin) - len(end)
    middle = duration(timeline.span).center(room) if room > len(duration(timeline.span)) + 1 else " " * max(1, room)
    return f"{' ' * len(strip.before)}{begin}{middle}{end}"


def legend_of(glyphs: Glyphs) -> str:
    return (
        f"{glyphs.runs} a run works   {glyphs.waits} the task waits   {glyphs.mark} a note, a send, or a step of "
        "unknown length\n"
        "Runs and waits are as near as the rows tell: a run begins with the last reply before its first commit."
    )
