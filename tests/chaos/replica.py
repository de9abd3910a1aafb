"""A worker or sweeper of the trial: `python -m tests.chaos.replica worker MODULE:APP`, as `coatcheck` would run it.

Nothing is different but how long the safety net waits: what takes a minute in production takes seconds here, so that
a trial of two minutes sees it at work often.
"""

import os
import sys
from datetime import timedelta
from typing import Any

from coatcheck.broker import connecting
from coatcheck.broker.settings import BrokerSettings, make_settings
from coatcheck.cli import main
from coatcheck.store import decide
from coatcheck.worker import executor
from coatcheck.worker import sweeper as sweeping

HEARTBEAT_S = 2


def shorten() -> None:
    decide.RESEND_AFTER = timedelta(seconds=5)
    sweeping.LOOK_AGAIN = timedelta(seconds=5)
    sweeping.HOUSEKEEPING_S = 2.0
    sweeping.QUIET_BEFORE_REPAIR = timedelta(seconds=3)
    executor.SHORTEST_HOLD = timedelta(seconds=2)

    if os.environ["COATCHECK_BROKER"].startswith("pg:"):
        # A frozen process holds its messages for three heartbeats: less than it is frozen for, so that it wakes up
        # with a session that was taken from it.
        connecting.make_settings = _with_short_heartbeat  # type: ignore[attr-defined]


def _with_short_heartbeat(settings: dict[str, Any]) -> BrokerSettings:
    return make_settings({"heartbeat": HEARTBEAT_S, **settings})


def start() -> None:
    shorten()
    main(sys.argv[1:])


if __name__ == "__main__":
    start()
