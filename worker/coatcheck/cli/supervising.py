"""How a supervisor is run, by the command that became it.

    python -m coatcheck.cli.supervising PLAN module:app

PLAN is a pipe to read what it should do from; the rest is for whoever lists the processes.
"""

from __future__ import annotations

import asyncio
import os
import sys

import click
import msgspec
import structlog

from coatcheck.cli.supervisor import Plan, Supervisor
from coatcheck.errors import InvalidSettings
from coatcheck.worker.logs import configure
from coatcheck.worker.redaction import clean, redacted


def _run(plan: Plan) -> int:
    configure(plan.log_format, plan.log_level)
    try:
        with structlog.contextvars.bound_contextvars(service=plan.service):
            return asyncio.run(Supervisor(plan).run())
    except InvalidSettings as error:
        click.echo(f"Error: {clean(redacted(str(error)))}", err=True)
        return 1


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), "rb") as asked:
        plan = msgspec.json.decode(asked.read(), type=Plan)
    sys.exit(_run(plan))
