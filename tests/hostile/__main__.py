"""`python -m tests.hostile --minutes 60`: every attack at once on real servers, beside clients that behave."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Coroutine
from contextlib import ExitStack

from tests.conftest import ServiceNames, temporary_database
from tests.hostile.attacks import ATTACKS
from tests.hostile.run import Verdict, run
from tests.services import find_postgres, find_rabbitmq, run_sync

from coatcheck.store import migrate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="attack for so long (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=10.0, help="good requests a second (default: %(default)s)")
    parser.add_argument("--only", action="append", choices=sorted(ATTACKS), help="this attack alone; may be repeated")
    options = parser.parse_args()
    logging.getLogger("aiormq").setLevel(logging.CRITICAL)
    names = ServiceNames()
    with ExitStack() as running:
        postgres, rabbitmq = find_postgres(running), find_rabbitmq(running)
        if postgres.url is None or rabbitmq.url is None:
            print("a hostile run needs a Postgres and a RabbitMQ; see CONTRIBUTING.md")
            return 2
        running.callback(names.delete, rabbitmq.url)
        with temporary_database(postgres.url) as store:
            run_sync(migrate(store))
            attacking = run(
                rabbitmq.url, store, names, seconds=options.minutes * 60, per_s=options.rate, only=options.only
            )
            verdict = asyncio.run(_until_told(attacking))
    print(verdict)
    return 1 if verdict.faults else 0


async def _until_told(attacking: Coroutine[None, None, Verdict]) -> Verdict:
    """SIGTERM ends a run as Ctrl-C does: its processes, queues and database go with it."""
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    return await attacking


if __name__ == "__main__":
    sys.exit(main())
