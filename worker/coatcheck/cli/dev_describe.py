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
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, get_origin

import click

from coatcheck.cli.apps import load_app
from coatcheck.cli.dev_probe import Offer
from coatcheck.errors import CoatcheckError
from coatcheck.worker.app import App, Handler

SAMPLES: Mapping[type, Any] = {str: "…", int: 1, float: 1.5, bool: True, list: [], dict: {}}


def describe(reference: str, app: App) -> Offer:
    handler = app.find_handler(None)
    return Offer(reference, app.service, tuple(sorted(app.handlers)), example_of(handler) if handler else '"…"')


def example_of(handler: Handler) -> str:
    """A body this handler may take, as JSON, with dots where only its author knows better; empty if it takes none."""
    parameters = handler.binding.parameters
    if not parameters:
        return ""
    samples = {it.name: SAMPLES.get(get_origin(it.type) or it.type, "…") for it in parameters}
    if len(parameters) == 1:
        return json.dumps(samples[parameters[0].name], ensure_ascii=False)
    return json.dumps({it.name: samples[it.name] for it in parameters if it.is_required}, ensure_ascii=False)


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
