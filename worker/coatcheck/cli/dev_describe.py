"""What `coatcheck dev` asks of a fresh interpreter: import an App, and print what it offers as JSON.

    python -m coatcheck.cli.dev_describe module:app

The module's own output goes to stderr. What is wrong is told there too, with exit code 2 for a reference that names
nothing, 1 for code that raises.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import asdict

import click

from coatcheck.cli.apps import load_app
from coatcheck.cli.dev_probe import Offer
from coatcheck.cli.dev_samples import example_of
from coatcheck.errors import CoatcheckError
from coatcheck.worker.app import App


def describe(reference: str, app: App) -> Offer:
    names = tuple(sorted(app.handlers))
    handler = app.find_handler(None)
    if handler is not None or not names:
        return Offer(reference, app.service, names, example_of(handler) if handler else '"…"')
    named = app.handlers[names[0]]
    return Offer(reference, app.service, names, example_of(named), task=names[0])


def _main(reference: str) -> int:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            offer = describe(reference, load_app(reference))
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except CoatcheckError as error:
        click.echo(f"Error: {error}", err=True)
        return 1
    except SystemExit as error:
        click.echo(f"Error: {reference} called sys.exit({error.code!r}) while it was imported", err=True)
        return 1
    click.echo(json.dumps(asdict(offer)))
    return 0


if __name__ == "__main__":
    code = _main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that the module has started do not keep us
