"""A Postgres of one's own under `.coatcheck/`, for development, demos and tests: no container, no root, no set-up.

Who does what:

- A *user* is a process that joined. It holds `users.lock` shared, for as long as it needs the server.
- The *supervisor* is one process per directory. It holds `supervisor.lock`, is the parent of Postgres, starts it again
  after a crash, and asks every fifth of a second for `users.lock` alone. When it gets it, no user is left: it stops
  Postgres and ends, and only then lets go, so that a newcomer waits for a clean start.

Both locks are the kernel's, so what counts is which processes live, not which ones took their leave::

    killed -9           what follows
    a user              its lock is gone; the last one's death stops the server
    the supervisor      Linux tells Postgres to shut down (PR_SET_PDEATHSIG). A user that is left notices within a
                        second and starts both again at the same address. On macOS that user, or the next one,
                        first stops the orphan
    Postgres            the supervisor starts it again; what was committed is recovered from its log
    all of them         nothing runs; the next user meets the leftovers and clears them away

fsync is on: what was committed survives a crash of the machine too.

As root Postgres does not run, so the server becomes `nobody`. If that user may not enter the directory, data and socket
live under /var/lib/coatcheck, and the link `elsewhere` says where: if you delete the directory for good, delete that
too. If it may not read the binaries of the wheel, it gets a copy of them in /var/cache/coatcheck.
"""

from coatcheck.embedded.joining import Server, find_directory, is_running, join, wait_stopped

__all__ = ["Server", "find_directory", "is_running", "join", "wait_stopped"]
