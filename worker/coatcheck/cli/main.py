"""The group all commands hang on, and what happens to whatever they raise."""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import version as installed_version
from typing import Any

import click

from coatcheck.cli.asking import result, submit
from coatcheck.cli.cancelling import cancel
from coatcheck.cli.dead import dead
from coatcheck.cli.demo import demo
from coatcheck.cli.dev import dev
from coatcheck.cli.doctor import doctor
from coatcheck.cli.new import new
from coatcheck.cli.processes import sweeper, worker
from coatcheck.cli.ps import ps
from coatcheck.cli.setup import declare, migrate, version
from coatcheck.cli.show import show
from coatcheck.errors import CoatcheckError
from coatcheck.worker.logs import QUIET_LOGGERS, configure
from coatcheck.worker.settings import LogFormat, LogLevel, redacted

INTERRUPTED = 130
BROKEN_PIPE = 141


class Commands(click.Group):
    """A group in which our own errors are one line, an interrupt is quiet, and a reader that left is no failure.

    Anything else is a bug of ours and keeps its traceback.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order a newcomer meets them, not by alphabet

    def invoke(self, ctx: click.Context) -> Any:
        try:
            returned = super().invoke(ctx)
            sys.stdout.flush()  # a broken pipe should show here, not while Python shuts down
        except (KeyboardInterrupt, click.Abort):
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            _forget_stdout()
            ctx.exit(BROKEN_PIPE)
        except (CoatcheckError, ExceptionGroup) as error:
            leaves = _leaves(error)
            if not all(isinstance(leaf, CoatcheckError) for leaf in leaves):
                raise
            for text in dict.fromkeys(redacted(str(leaf)) for leaf in leaves):
                click.echo(f"Error: {text}", err=True)
            ctx.exit(1)
        return returned


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Every command that prints data has --json. Settings come from options, then from COATCHECK_* variables.",
)
@click.version_option(installed_version("coatcheck"), message="coatcheck %(version)s")
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
    # Tools speak for themselves; what the libraries underneath log would only get in between.
    configure(LogFormat.CONSOLE, LogLevel.ERROR)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)


for command in (
    *(demo, new, dev),
    *(migrate, declare, worker, sweeper),
    *(submit, result, ps, show, cancel),
    *(dead, doctor, version),
):
    main.add_command(command)


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def _forget_stdout() -> None:
    """Point stdout at nothing, so that the flush at exit finds no broken pipe."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)
