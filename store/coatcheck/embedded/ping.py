"""Ask a Postgres whether it lets anybody in, the way `pg_isready` does: no driver, no password, no session."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

_PROTOCOL = 3 << 16
_TIMEOUT_S = 2.0
_ASKS_FOR_PASSWORD = b"R"
_LONGEST_ANSWER = 4096


def answers(path: Path, *, user: str, database: str) -> bool:
    """Tell whether the server behind a Unix socket accepts connections: it asks who we are.

    A server that is starting, recovering or stopping answers too, but with an error.
    """
    words = ["user", user, "database", database, ""]
    body = struct.pack("!I", _PROTOCOL) + b"".join(word.encode() + b"\0" for word in words)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.connect(str(path))
            connection.sendall(struct.pack("!I", len(body) + 4) + body)
            # All of it: a server that is left in the middle of a sentence writes that into its log.
            return connection.recv(_LONGEST_ANSWER).startswith(_ASKS_FOR_PASSWORD)
        except OSError:
            return False
