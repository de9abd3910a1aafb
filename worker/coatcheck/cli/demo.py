"""`coatcheck demo`: see it work, on this machine, in half a minute."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from coatcheck.cli.options import json_option, load_settings
from coatcheck.cli.output import emit_json
from coatcheck.demo.plan import FEWEST_TASKS, Plan

if TYPE_CHECKING:  # what the other commands need not wait for
    from rich.console import Console

    from coatcheck.demo.run import Outcome

FEWEST_REPLICAS = 2
MOST_REPLICAS = 20
MOST_TASKS = 10_000
MOST_SEEDS = 10_000


@click.command(short_help="See it work: replicas, peers, a kill -9, nothing lost.")
@click.option(
    "--tasks",
    "task_count",
    type=click.IntRange(FEWEST_TASKS, MOST_TASKS),
    default=300,
    show_default=True,
    help="How many to ask for.",
)
@click.option(
    "--replicas",
    "replica_count",
    type=click.IntRange(FEWEST_REPLICAS, MOST_REPLICAS),
    default=3,
    show_default=True,
    help="Workers to start with; one of them is killed and another one joins.",
)
@click.option("--seed", type=int, help="Ask the same questions, with the same delays, as the run that had this seed.")
@click.option(
    "--ledger",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Keep the asker's books there; the file must not exist yet.",
)
@click.option("--keep", "keeps", is_flag=True, help="Keep the logs of all processes, and say where they are.")
@click.option("--plain", "is_plain", is_flag=True, help="Print a line per event instead of a live view.")
@json_option
def demo(
    *,
    task_count: int,
    replica_count: int,
    seed: int | None,
    ledger: Path | None,
    keeps: bool,
    is_plain: bool,
    as_json: bool,
) -> None:
    """See it work: replicas, slow peers, a kill -9 in the middle, and nothing lost.

    Starts workers, a sweeper and peers as processes, asks for a few hundred surveys and kills one worker on the way. At
    the end the asker's own books say what was asked, answered, lost and answered twice; the exit code is 0 only if they
    say what was promised.

    It needs no server: it runs one of its own, which is gone afterwards. With COATCHECK_STORE and COATCHECK_BROKER it
    uses those, under names of its own, and removes what it made.

    \b
    Example:
      coatcheck demo --tasks 1000 --replicas 5
    """
    from coatcheck.demo.crew import DemoFailed
    from coatcheck.demo.display import make_console
    from coatcheck.demo.run import run

    settings = load_settings()
    plan = Plan(task_count, replica_count, random.randrange(MOST_SEEDS) if seed is None else seed)
    if ledger is not None:
        _make_file(ledger)
    # With --json stdout is the document's, and the view goes where remarks go.
    console = make_console(sys.stderr if as_json else sys.stdout, is_plain=is_plain)
    try:
        outcome = run(plan, settings, console=console, books=ledger, keeps=keeps)
    except DemoFailed as error:
        raise click.ClickException(str(error)) from error
    except BrokenPipeError:
        raise
    except OSError as error:  # a disk that is full, no temporary directory: of this machine, not of ours
        raise click.ClickException(f"{error.filename or 'writing'}: {error.strerror}") from error
    except (KeyboardInterrupt, asyncio.CancelledError):
        click.echo("Stopped and cleared up.", err=True)
        raise click.Abort from None
    _tell(outcome, console, as_json=as_json)
    if outcome.verdict.complaints:
        raise click.exceptions.Exit(1)


def _make_file(path: Path) -> None:
    """Make the file now, while a mistake costs nothing. Raises click.BadParameter."""
    try:
        path.touch(exist_ok=False)
    except OSError as error:
        raise click.BadParameter(f"{path}: {error.strerror}", param_hint="'--ledger'") from error


def _tell(outcome: Outcome, console: Console, *, as_json: bool) -> None:
    """The figures, where the logs are if they were kept, what could not be removed, and what to try next."""
    from coatcheck.demo.verdict import describe_verdict, show_next, show_verdict

    verdict = outcome.verdict
    if as_json:
        emit_json(describe_verdict(verdict, scene=outcome.scene))
    else:
        show_verdict(console, verdict, scene=outcome.scene)
    if outcome.logs is not None:
        click.echo(f"Logs are in {outcome.logs}", err=as_json)
    if outcome.leftovers:
        click.echo(f"Warning: {outcome.leftovers}", err=True)
    if not (verdict.complaints or as_json):
        show_next(console)
