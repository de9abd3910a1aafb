"""What the demo shows while it runs and at the end: a live line on a terminal, plain lines elsewhere."""

import time

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from examples.demo.ledger import Verdict

PLAIN_EVERY_S = 1.0


class Display:
    """`with Display(…) as display: …`; `show` as often as you like."""

    def __init__(self, console: Console, task_count: int) -> None:
        self._console = console
        self._task_count = task_count
        self._began_s = time.monotonic()
        self._shown_s = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> "Display":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """One thing that happened."""
        self._console.print(f"{self._elapsed_s:5.1f}s  {text}", highlight=False, soft_wrap=True)

    def show(self, *, asked: int, answered: int, replicas: int) -> None:
        """The state of affairs; it replaces the one before on a terminal, and is said once a second elsewhere."""
        text = f"asked {asked}/{self._task_count}, answered {answered}, waiting {asked - answered}, {replicas} replicas"
        if self._live is not None:
            filled = round(30 * answered / self._task_count)
            line = f"{self._elapsed_s:5.1f}s  [green]{'█' * filled}[/green]{'░' * (30 - filled)}  {text}"
            self._live.update(Text.from_markup(line), refresh=True)
        elif time.monotonic() - self._shown_s >= PLAIN_EVERY_S:
            self._shown_s = time.monotonic()
            self.say(text)

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s


def show_verdict(console: Console, verdict: Verdict, *, killed: str) -> None:
    """The figures, and what is wrong with them if anything is."""
    rows = [
        ("asked", verdict.asked, ""),
        ("answered", verdict.answered, ""),
        ("lost", len(verdict.lost), ""),
        ("answered twice", len(verdict.twice), f"delivered again unchanged: {verdict.repeated}"),
        ("finished elsewhere", verdict.moved, "by another replica than the one that began"),
        ("survivors", verdict.survived, f"begun by {killed}, answered after its death"),
        ("timeouts", verdict.partial, "answered in part, because one source never answers"),
    ]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(justify="left", style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for name, figure, remark in rows:
        table.add_row(name, str(figure), remark)
    console.print()
    console.print(table)
    for complaint in verdict.complaints:
        console.print(f"[red]not as promised:[/red] {complaint}", highlight=False)
