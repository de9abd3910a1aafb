"""From the first process to the last thing removed: one run of the demo, as its command uses it."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from coatcheck.demo.caretaker import Caretaker
from coatcheck.demo.crew import DemoFailed
from coatcheck.demo.display import make_display
from coatcheck.demo.ledger import Ledger, Verdict, judge
from coatcheck.demo.plan import Plan
from coatcheck.demo.play import perform
from coatcheck.demo.scene import Scene
from coatcheck.worker.settings import Settings


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run left: the verdict, the last thing to see, the logs if they were kept, what could not be removed."""

    verdict: Verdict
    scene: Scene
    logs: Path | None
    leftovers: str


def run(plan: Plan, settings: Settings, *, console: Console, books: Path | None, keeps: bool) -> Outcome:
    """Play, judge, clear up. Raises DemoFailed and CoatcheckError, and what an interrupt raises, after clearing up."""
    caretaker = Caretaker()
    try:
        logs = Path(tempfile.mkdtemp(prefix="coatcheck-demo-logs-"))
        caretaker.will_remove_directory(logs)
        ledger = Ledger(books or logs / "ledger.jsonl")
        try:
            with make_display(console) as display:
                scene = asyncio.run(
                    perform(plan, settings, display=display, caretaker=caretaker, logs=logs, ledger=ledger)
                )
        except DemoFailed as error:
            if not any(logs.glob("*.log")):
                raise
            caretaker.will_keep(logs)
            raise DemoFailed(f"{error}\nAll logs are in {logs}") from None
        finally:
            ledger.close()
        verdict = judge(ledger.path)
        is_kept = keeps or bool(verdict.complaints)
        if is_kept:
            caretaker.will_keep(logs)
    finally:
        leftovers = caretaker.finish()
    return Outcome(verdict, scene, logs if is_kept else None, leftovers)
