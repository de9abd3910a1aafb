"""The group all commands hang on, and what happens to what they raise."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import click

from coatcheck.errors import CoatcheckError

# Nothing else is imported here: `coatcheck --help` must not wait for database drivers. A command's module is imported
# when the command is asked for; until then this table speaks for it.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "demo": ("demo", "See it work: replicas, peers, a kill -9, nothing lost."),
    "new": ("new", "Write a small project to begin with."),
    "dev": ("dev", "Run services while you write them."),
    "migrate": ("setup", "Bring the database schema up to date."),
    "declare": ("setup", "Make the queues of services, and the sweeper's."),
    "worker": ("run", "Run one replica of a service."),
    "sweeper": ("run", "Run the process that notices what is overdue."),
    "submit": ("requests", "Hand a request to a service."),
    "result": ("requests", "Print the result of a task, waiting for it."),
    "ps": ("tasks", "List tasks and what they wait for."),
    "show": ("show", "Show everything about one task."),
    "checkpoints": ("checkpoints", "List the checkpoints of a task."),
    "history": ("history", "Show what happened to a task."),
    "check": ("check", "Check that all that is stored of a task can be read and replayed."),
    "cancel": ("requests", "Cancel a task, wherever it is."),
    "rewind": ("orders", "Take tasks back to an earlier point, and on from there."),
    "fork": ("orders", "Begin a new task from an earlier point of another one."),
    "retry": ("orders", "Let failed tasks go on from their last checkpoint."),
    "pause": ("orders", "Let nothing of a task run until it is resumed."),
    "resume": ("orders", "Let paused tasks go on."),
    "dead": ("dead", "Look after messages that no service could deal with."),
    "audit": ("audit", "Prove that histories are whole and unaltered."),
    "doctor": ("doctor", "Check the installation, and print the fix for what is wrong."),
    "version": ("setup", "Print the versions of Coatcheck, its schema and Python."),
}
"""Each command with its module and its line in the list, in the order a newcomer meets them."""

INTERRUPTED = 130
BROKEN_PIPE = 141


class Commands(click.Group):
    """A group in which our own errors are one line, an interrupt is quiet, and a reader that left is no failure.

    Anything else is a bug of ours and keeps its traceback.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)  # in their own order, not by alphabet

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _ = COMMANDS[cmd_name]
        found: click.Command = getattr(import_module(f"coatcheck.cli.{module}"), cmd_name)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in COMMANDS.items()])

    def main(self, *args: Any, **extra: Any) -> Any:
        _open_closed_streams()
        _let_remarks_be_lost()
        return super().main(*args, **extra)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _output_that_may_fail():  # --help and --version write here
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _output_that_may_fail():
                returned = super().invoke(ctx)
                sys.stdout.flush()  # a broken pipe should show here, not while Python shuts down
        except (KeyboardInterrupt, click.Abort):
            ctx.exit(INTERRUPTED)
        except (CoatcheckError, ExceptionGroup) as error:
            leaves = _leaves(error)
            if not all(isinstance(leaf, CoatcheckError) for leaf in leaves):
                raise
            from coatcheck.worker.redaction import clean, redacted

            for text in dict.fromkeys(redacted(str(leaf)) for leaf in leaves):
                click.echo(f"Error: {clean(text)}", err=True)
            ctx.exit(1)
        return returned


@contextmanager
def _output_that_may_fail() -> Iterator[None]:
    """Exit quietly when the reader of our output has left, and with one line when there is no room for it."""
    try:
        yield
    except BrokenPipeError:
        _forget_stdout()
        raise click.exceptions.Exit(BROKEN_PIPE) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _forget_stdout()
        raise click.ClickException(f"the output could not be written: {error.strerror}") from error
    finally:
        if streams := sys.modules.get("coatcheck.worker.log_streams"):  # never imported: nothing was logged
            streams.flush()  # what was logged stands before what is said at the end


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Every command that prints data has --json. Settings come from options, then from COATCHECK_* variables.",
)
@click.version_option(package_name="coatcheck", message="coatcheck %(version)s")
def main() -> None:
    """Tasks that wait: run the workers that carry them, and look after the tasks.

    \b
    A first round, with nothing but Python:
      coatcheck new shop
      cd shop
      coatcheck dev shop.service:app shop.prices:app
      coatcheck submit shop '{"item": "hat"}' --wait       (in another terminal)
      coatcheck ps
    """
    from coatcheck.worker.logs import QUIET_LOGGERS, configure
    from coatcheck.worker.settings import LogFormat, LogLevel

    # Tools speak for themselves; what the libraries underneath log would only get in between.
    configure(LogFormat.CONSOLE, LogLevel.ERROR)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def _open_closed_streams() -> None:
    """Point stdout and stderr at nothing if we were started without them, lest the next file be taken for one."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.set_inheritable(nothing, True)
            setattr(sys, name, os.fdopen(nothing, "w", encoding="utf-8"))


class _Remarks(io.FileIO):
    """A file that takes everything: what cannot be written is lost."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in {errno.EPIPE, errno.ENOSPC, errno.EIO}:
                raise
            return len(data)


def _let_remarks_be_lost() -> None:
    """Write to stderr without failing: a remark or a warning without a reader changes nothing for the command."""
    if sys.stderr is sys.__stderr__ and isinstance(sys.stderr, io.TextIOWrapper):  # not a test's own
        raw = _Remarks(sys.stderr.fileno(), "w", closefd=False)
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(raw), sys.stderr.encoding, sys.stderr.errors, line_buffering=True, write_through=True
        )


def _forget_stdout() -> None:
    """Point stdout at nothing, so that the flush at exit finds no broken pipe."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)
