"""Passing on what processes print, whole lines at a time, so that those of different processes do not mix.

Handing them our own stdout and stderr would be simpler, but a pipe takes no more than 4 KB in one piece: a traceback of
one would be cut by the next line of another, and a log of JSON lines could not be read.

A slow reader slows the processes down a little. One that has left or does not read is no reason to stop working: what
it does not take in time is lost and counted (`streams.py`).
"""

from __future__ import annotations

import asyncio
import time

from coatcheck.worker.log_streams import LineStream

LONGEST_LINE = 1024 * 1024
CHUNK = 64 * 1024
PATIENCE_S = 1.0
LOOK_AGAIN_S = 0.01


async def relay(reader: asyncio.StreamReader, stream: LineStream) -> None:
    """Copy lines to a stream until there are no more. A line that never ends is cut."""
    rest = b""
    while chunk := await reader.read(CHUNK):
        await _wait_for_room(stream)
        lines, newline, end = chunk.rpartition(b"\n")
        if newline:
            stream.put(rest + lines + newline)
            rest = end
        else:
            rest += chunk
        if len(rest) > LONGEST_LINE:
            stream.put(rest + b"\n")
            rest = b""
    if rest:
        stream.put(rest + b"\n")


async def _wait_for_room(stream: LineStream) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while stream.is_filling and time.monotonic() < deadline_s:  # noqa: ASYNC110 - a thread makes the room
        await asyncio.sleep(LOOK_AGAIN_S)
