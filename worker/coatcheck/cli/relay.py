"""Passing on what processes print, whole lines at a time, so that those of different processes do not mix.

Handing them our own stdout and stderr would be simpler, but a pipe takes no more than 4 KB in one piece: a traceback of
one would be cut by the next line of another, and a log of JSON lines could not be read.
"""

from __future__ import annotations

import asyncio
import os
import select

LONGEST_LINE = 1024 * 1024
CHUNK = 64 * 1024


async def relay(reader: asyncio.StreamReader, target: int) -> None:
    """Copy lines to a file descriptor until there are no more. A line that never ends is cut."""
    rest = b""
    while chunk := await reader.read(CHUNK):
        lines, newline, end = chunk.rpartition(b"\n")
        if newline:
            _write(target, rest + lines + newline)
            rest = end
        else:
            rest += chunk
        if len(rest) > LONGEST_LINE:
            _write(target, rest + b"\n")
            rest = b""
    if rest:
        _write(target, rest + b"\n")


def _write(target: int, text: bytes) -> None:
    """Write all of it. It blocks as logging blocks; a reader that has left is no reason to stop working."""
    view = memoryview(text)
    while view:
        try:
            view = view[os.write(target, view) :]
        except BlockingIOError:  # somebody who shares this terminal has made it non-blocking
            select.select([], [target], [])
        except OSError:
            return
