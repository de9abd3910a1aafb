"""The figures at the end, for people and for programs, and what to try next."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coatcheck.demo.ledger import Verdict
from coatcheck.demo.plan import ORACLE, PRESS
from coatcheck.demo.scene import Scene

NEXT = (
    ("coatcheck new shop", "a small project of your own: a service, a peer, a test"),
    ("cd shop && make dev", "run it here with `coatcheck dev`; each change reloads it"),
    ("docs/README.md", "in the repository: how to write, run and watch tasks"),
)


def show_verdict(console: Console, verdict: Verdict, *, scene: Scene) -> None:
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


def describe_verdict(verdict: Verdict, *, scene: Scene) -> dict[str, Any]:
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


def _table(verdict: Verdict) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 3, 0, 0), pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for name, figure, remark in _figures(verdict):
        table.add_row(name, str(figure), remark)
    return table


def _figures(verdict: Verdict) -> list[tuple[str, int, str]]:
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


def _why_timeouts(verdict: Verdict) -> str:
    busy = f"; a busy machine made {verdict.late} others late" if verdict.late else ""
    return f"answered in part: {ORACLE.name} never answers{busy}"
