"""Where the names in our statements are looked up: in Postgres's own schema, and nowhere else.

A role that may create in a schema on the path, as every role could in `public` before Postgres 15, can plant a function
whose argument types fit better than those of the function meant. That function then runs with the rights of the worker.
So every connection is opened with this path, our tables are named with their schema, and a connection that has another
path is not used. `pg_temp` is named last: if it is not named, it is searched first.
"""

from __future__ import annotations

SEARCH_PATH = "pg_catalog, pg_temp"
SHOW = "SHOW search_path"


class UnsafeSearchPath(ConnectionError):
    """The connection has another search path: a program between us and Postgres has dropped our setting."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"the connection has the search_path {found!r} and not {SEARCH_PATH!r}, so functions of other roles could "
            "be called; a pooler has dropped the setting: connect to Postgres itself, or set it for the role, with "
            f"ALTER ROLE … SET search_path = {SEARCH_PATH}"
        )


def check(found: str) -> None:
    """Raises UnsafeSearchPath unless the answer of SHOW is the path that we asked for."""
    if found != SEARCH_PATH:
        raise UnsafeSearchPath(found)
