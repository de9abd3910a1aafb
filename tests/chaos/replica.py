"""A worker or sweeper of the trial: `python -m tests.chaos.replica worker MODULE:APP`, as `coatcheck` would run it.

Nothing is different but how long the safety net waits: what takes a minute in production takes seconds here, so that
a trial of two minutes sees it at work often.
"""

import sys
from datetime import timedelta

from coatcheck.cli import main
from coatcheck.store import cancels, puts
from coatcheck.worker import executor
from coatcheck.worker import sweeper as sweeping


def shorten() -> None:
    puts.RESEND_AFTER_S = cancels.RESEND_AFTER_S = 5.0  # type: ignore[attr-defined]
    sweeping.LOOK_AGAIN = timedelta(seconds=5)
    sweeping.HOUSEKEEPING_S = 2.0
    sweeping.QUIET_BEFORE_REPAIR = timedelta(seconds=3)
    executor.SHORTEST_HOLD = timedelta(seconds=2)


def start() -> None:
    shorten()
    main(sys.argv[1:])


if __name__ == "__main__":
    start()
