"""What the demo shows: a view that is redrawn on a terminal, a line per event elsewhere, and the figures at the end."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coatcheck.demo.books import DemoVerdict
from coatcheck.demo.peer import ORACLE, PRESS, SOURCES
from coatcheck.demo.scene import DemoScene, ReplicaState, ReplicaView, StoryLine

PLAIN_EVERY_S = 1.0
NARROW = 64
TINY = 44
"""Columns below which the view leaves out what matters least."""

_STATE_STYLES = dict(zip(ReplicaState, ("dim", "green", "bold red", "cyan"), strict=True))
_COUNTS = ("started", "parked", "resumed", "finished")
NEXT = (
    ("coatcheck new shop", "a small project of your own: a service, a peer, a test"),
    ("cd shop && make dev", "run it here with `coatcheck dev`; each change reloads it"),
    ("docs/README.md", "in the repository: how to write, run and watch tasks"),
)


def make_console(stream: TextIO, *, is_plain: bool) -> Console:
    """A console for a person at a terminal, or one that writes text and nothing else."""
    if is_plain or not stream.isatty() or not (stream.encoding or "").lower().startswith("utf"):
        return _Console(file=stream, force_terminal=False, color_system=None, highlight=False, soft_wrap=True)
    return _Console(file=stream, highlight=False)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the command line, which treats a reader that left the same way everywhere."""
        raise  # noqa: PLE0704 - called where it is caught


def make_display(console: Console) -> Display:
    """A view on a terminal, lines elsewhere."""
    return LiveDisplay(console) if console.is_terminal and not console.is_dumb_terminal else Display(console)


class Display:
    """A line per event, for pipes, logs and `--plain`; `show` as often as you like."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said_at_s = 0.0
        self._told: set[StoryLine] = set()
        self._ready: set[str] = set()

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def say(self, scene: DemoScene, text: str) -> None:
        """Tell one thing that happened."""
        self._print(scene.elapsed_s(), text)

    def show(self, scene: DemoScene) -> None:
        """Show the state of affairs."""
        self._tell_ready(scene)
        self._tell_story(scene)
        is_under_way = scene.answered < scene.plan.task_count and scene.asked
        if is_under_way and scene.now_s - self._said_at_s >= PLAIN_EVERY_S:
            self._said_at_s = scene.now_s
            waiting = scene.asked - scene.answered
            self.say(
                scene, f"asked {scene.asked} of {scene.plan.task_count}, answered {scene.answered}, waiting {waiting}"
            )

    def _tell_ready(self, scene: DemoScene) -> None:
        for word, names in scene.starts.items():
            ready_s = scene.find_ready_s(word)
            if ready_s is not None and word not in self._ready:
                self._ready.add(word)
                self._print(scene.elapsed_s(ready_s), f"ready: {word}" + (f" {', '.join(names)}" if names[1:] else ""))

    def _tell_story(self, scene: DemoScene) -> None:
        """What the task went through before it was chosen is one line; the rest is told as it happens."""
        chronicle = scene.chronicle
        news = [line for line in chronicle.lines if line not in self._told]
        who = f"task {(chronicle.task_id or '')[:8]}:"
        if news and not self._told:
            past = [f"{line.text} ({scene.elapsed_s(line.at_s):.1f}s)" for line in news]
            self.say(scene, f"{who} {' -> '.join(past)}")
        else:
            for line in news:
                self._print(scene.elapsed_s(line.at_s), f"{who} {line.text}")
        self._told.update(news)

    def _print(self, elapsed_s: float, text: str) -> None:
        self._console.print(Text(f"{elapsed_s:6.1f}s  {text}"))


class LiveDisplay(Display):
    """One view, drawn again and again in its place; it stays when the demo is over."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(console=console, auto_refresh=False)
        self._news = ""

    def __enter__(self) -> Display:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, scene: DemoScene, text: str) -> None:
        self._news = text
        self.show(scene)

    def show(self, scene: DemoScene) -> None:
        self._live.update(render(scene, self._news, width=self._console.width), refresh=True)


def render(scene: DemoScene, news: str, *, width: int) -> RenderableType:
    """The whole view. Until the first survey is asked for there is nothing to count: it shows what is being started."""
    middle: list[RenderableType] = [Text(news or " ", style="dim"), _starts(scene)]
    if scene.asked:
        middle = [_replicas(scene, width=width), _peers(scene, width=width), _progress(scene, width=width)]
    return Group(_head(scene, width=width), *(it for part in [*middle, _story(scene)] for it in (Text(), part)))


def _head(scene: DemoScene, *, width: int) -> RenderableType:
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1, overflow="ellipsis", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    title = Text.assemble(("coatcheck demo", "bold"), (f"  {scene.servers}" if width >= NARROW else "", "dim"))
    grid.add_row(title, Text(f"{scene.elapsed_s():.1f}s", style="dim"))
    return grid


def _starts(scene: DemoScene) -> Table:
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim", overflow="ellipsis", no_wrap=True)
    for word, names in scene.starts.items():
        ready_s = scene.find_ready_s(word)
        missing = [name for name in names if name not in scene.ready]
        state, more = Text("starting", "yellow"), ""
        if ready_s is not None:
            state = Text(f"ready at {scene.elapsed_s(ready_s):.1f}s", "green")
        elif len(names) > 1:
            state = Text(f"{len(names) - len(missing)} of {len(names)} ready", "yellow")
            more = f"starting {' '.join(missing)}"
        table.add_row(Text(word, "bold"), state, more)
    return table


def _replicas(scene: DemoScene, *, width: int) -> Table:
    counts = _COUNTS if width >= NARROW else _COUNTS[2:] if width >= TINY else _COUNTS[3:]
    table = Table(box=None, pad_edge=False, padding=(0, 3 if width >= TINY else 1, 0, 0), header_style="dim")
    table.add_column("replica", no_wrap=True)
    table.add_column("", min_width=18 if width >= NARROW else 9, no_wrap=True)
    for name in (*counts, *(["memory"] if width >= TINY else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for replica in scene.replicas.values():
        figures = [str(replica.counts[name]) for name in counts]
        if width >= TINY:
            figures.append(f"{replica.rss / 1e6:.0f} MB" if replica.rss else "-")
        style = "dim" if replica.state is ReplicaState.KILLED else ""
        table.add_row(Text(replica.name, "bold"), _state(scene, replica, width=width), *figures, style=style)
    return table


def _state(scene: DemoScene, replica: ReplicaView, *, width: int) -> Text:
    at = f" at {scene.elapsed_s(replica.changed_at_s):.1f}s"
    is_dated = replica.state in {ReplicaState.KILLED, ReplicaState.JOINED} and width >= NARROW
    return Text(f"{replica.state.value}{at if is_dated else ''}", style=_STATE_STYLES[replica.state])


def _peers(scene: DemoScene, *, width: int) -> RenderableType:
    counts = scene.peers
    line = Text("peers     ", style="dim")
    for source in SOURCES:
        done, came = (counts[source.name][name] for name in ("question_answered", "question_came"))
        line.append(f"{source.name} {done}/{came}   ", style="not dim")
    if width < NARROW:
        return line
    told = counts[PRESS.name]["progress_told"]
    remark = f"          {PRESS.name} is slow and says so ({told} times), {ORACLE.name} never answers"
    return Group(line, Text(remark, style="dim"))


def _progress(scene: DemoScene, *, width: int) -> RenderableType:
    total = scene.plan.task_count
    figures = Text.assemble(
        (f"{scene.answered}", "bold"), f"/{total} answered", (f", {scene.asked - scene.answered} waiting", "dim")
    )
    bar_width = max(10, min(40, width - len(figures.plain) - 3))
    bar = ProgressBar(
        total=total, completed=scene.answered, width=bar_width, complete_style="cyan", finished_style="green"
    )
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_row(bar, figures)
    return grid


def _story(scene: DemoScene) -> RenderableType:
    chronicle = scene.chronicle
    if chronicle.task_id is None:
        text = f"{scene.plan.victim} will be killed with -9 on the way; then one of its tasks is followed here."
        return Text(text, style="dim")
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(justify="right", style="dim", no_wrap=True)
    grid.add_column()
    for line in chronicle.lines:
        grid.add_row(f"{scene.elapsed_s(line.at_s):.1f}s", Text(line.text, style="bold" if line.is_turn else ""))
    title = Text.assemble("the story of one task  ", (chronicle.task_id[:8], "cyan"))
    return Group(title, Padding(grid, (0, 0, 0, 2)))


# --- the figures at the end, for people and for programs ---


def show_verdict(console: Console, verdict: DemoVerdict, *, scene: DemoScene) -> None:
    """The figures, and what is wrong with them if anything is."""
    console.print()
    if console.is_terminal:
        console.print(_table(verdict))
    else:
        for name, figure, remark in _figures(verdict):
            console.print(Text(f"{name:<18}  {figure:>6}   {remark}".rstrip()))
    console.print()
    for complaint in verdict.complaints:
        console.print(Text.assemble(("not as promised: ", "bold red"), complaint))
    if not verdict.complaints:
        rest = f" {scene.elapsed_s():.1f} s, seed {scene.plan.seed}."
        console.print(Text.assemble(("Nothing was lost, and nothing was answered twice.", "bold green"), (rest, "dim")))


def show_next(console: Console) -> None:
    """Where to go from here."""
    width = max(len(command) for command, _ in NEXT)
    console.print()
    console.print(Text("What to try next:"))
    for command, about in NEXT:
        console.print(Text.assemble("  ", (command.ljust(width), "cyan"), "   ", (about, "dim")))


def describe_verdict(verdict: DemoVerdict, *, scene: DemoScene) -> dict[str, Any]:
    """The verdict as a document; its names do not change."""
    lines = [{"at_s": round(scene.elapsed_s(it.at_s), 3), "what": it.text} for it in scene.chronicle.lines]
    return {
        "is_ok": not verdict.complaints,
        **asdict(verdict),
        "complaints": verdict.complaints,
        "story": {"task_id": scene.chronicle.task_id, "lines": lines},
        "seed": scene.plan.seed,
        "seconds": round(scene.elapsed_s(), 3),
    }


def _table(verdict: DemoVerdict) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 3, 0, 0), pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for name, figure, remark in _figures(verdict):
        table.add_row(name, str(figure), remark)
    return table


def _figures(verdict: DemoVerdict) -> list[tuple[str, int, str]]:
    return [
        ("asked", verdict.asked, ""),
        ("answered", verdict.answered, ""),
        ("lost", len(verdict.lost), ""),
        ("answered twice", len(verdict.answered_twice), f"the same answer delivered again: {verdict.repeated}"),
        ("finished elsewhere", verdict.finished_elsewhere, "by another replica than the one that began"),
        ("survivors", verdict.survivors, f"begun by {verdict.killed}, answered after it was killed"),
        ("kept by progress", verdict.kept_by_progress, f"{PRESS.name} took longer than a peer may be silent"),
        ("timeouts", verdict.timeouts, _why_timeouts(verdict)),
    ]


def _why_timeouts(verdict: DemoVerdict) -> str:
    busy = f"; a busy machine made {verdict.late} others late" if verdict.late else ""
    return f"answered in part: {ORACLE.name} never answers{busy}"
