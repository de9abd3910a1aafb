"""The process that owns one Postgres: `python -m coatcheck.embedded.supervisor DIRECTORY REPORT LOCK`.

`REPORT` and `LOCK` are descriptors from the process that started it: a pipe that is told how the start went, and
`supervisor.lock`, held from before the start until the last process of the server is gone. States::

    starting ──► running ──► stopping ──► gone         nobody holds users.lock any more, or we are told to end
        ▲           │
        └───────────┘  Postgres died: again, after a pause that grows; users meet it at the same address

It has one thread: the kernel ties Postgres to the thread that started it, and a fork of several is unsafe.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from coatcheck.embedded import cluster, locks
from coatcheck.embedded.identity import ensure_room, find_identity, reachable
from coatcheck.embedded.installs import find_install
from coatcheck.embedded.places import Places
from coatcheck.embedded.postmaster import Postmaster
from coatcheck.errors import EmbeddedUnavailable

log = logging.getLogger(__name__)

_POLL_S = 0.2
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
# A server that ran this long had recovered: what ends it next is another story.
_HEALTHY_S = 60.0


_FAILURES = (EmbeddedUnavailable, OSError, subprocess.SubprocessError)


class Over(Exception):
    """Nobody needs the server any more, or we were told to end."""


class Supervisor:
    def __init__(self, places: Places, lock: locks.Lock) -> None:
        self.places = places
        self._lock = lock
        self._is_told = False
        self._alone: locks.Lock | None = None

    def be_told(self, number: int, frame: FrameType | None) -> None:
        self._is_told = True

    def check(self) -> None:
        """Raise Over when the server is not needed; `users.lock` is ours then, and newcomers wait for our end."""
        if self._is_told:
            raise Over("told to end")
        if not self._lock.is_at(self.places.supervisor_lock):
            raise Over(f"{self.places.home} was deleted")
        if self._alone is None:
            self._alone = locks.try_exclusive(self.places.users_lock)
        if self._alone is not None:
            raise Over("nobody needs the server any more")

    def prepare(self) -> Postmaster:
        """Return the server of this directory, ready to start, its cluster made if there was none."""
        identity = find_identity()
        ensure_room(self.places, identity)
        major = cluster.find_major(self.places, identity)
        install = reachable(find_install(major=major), identity)
        postmaster = Postmaster(self.places, install, identity, check=self.check)
        postmaster.clear_leftovers()
        if major is None:
            log.info("making a cluster with %s as %s", install, identity)
            cluster.make(self.places, install, identity)
        cluster.check_owner(self.places, identity)
        if self.places.read_password() is None:
            cluster.renew_password(self.places, install, identity)
        return postmaster

    def keep(self, postmaster: Postmaster) -> None:
        """Keep the server running until it is over."""
        pause_s, up_at = _FIRST_PAUSE_S, time.monotonic()
        while True:
            while postmaster.is_alive():
                self.check()
                if postmaster.has_lost_socket():
                    log.warning("the socket was deleted")
                    postmaster.stop()
                time.sleep(_POLL_S)
            if time.monotonic() - up_at > _HEALTHY_S:
                pause_s = _FIRST_PAUSE_S
            log.warning("Postgres ended by itself (%s); it starts again in %g s", postmaster.exit_code, pause_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self.check()
            try:
                postmaster.start()
                up_at = time.monotonic()
            except _FAILURES as error:
                log.error("it did not start: %s", error)


def main() -> None:
    directory, report, lock = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    # Whoever started us waits for its child only; the supervisor itself is nobody's child to wait for.
    if os.fork():
        os._exit(0)
    for descriptor in (report, lock):
        os.set_inheritable(descriptor, False)
    logging.basicConfig(format="%(asctime)s supervisor[%(process)d] %(levelname)s %(message)s", level=logging.INFO)
    supervisor = Supervisor(Places.of(directory), locks.Lock(lock))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, supervisor.be_told)
    supervise(supervisor, report)
    os.close(lock)


def supervise(supervisor: Supervisor, report: int) -> None:
    postmaster: Postmaster | None = None
    try:
        try:
            postmaster = supervisor.prepare()
            postmaster.start()
        except _FAILURES as error:
            reason = str(error)
            if not isinstance(error, EmbeddedUnavailable):
                reason = cluster.explain("Postgres cannot be started", reason, supervisor.places.room)
            log.error("it did not start: %s", reason)
            _tell(report, failure=reason)
            return
        _tell(report, failure="")
        supervisor.keep(postmaster)
    except Over as why:
        log.info("stopping: %s", why)
    finally:
        if postmaster is not None:
            postmaster.stop()
    log.info("stopped")


def _tell(report: int, *, failure: str) -> None:
    try:
        os.write(report, json.dumps({"failure": failure}).encode())
    except BrokenPipeError:  # whoever started us has died; others may have joined
        pass
    finally:
        os.close(report)


if __name__ == "__main__":
    main()
