"""Lines to stderr and stdout that never wait for their reader and never fail.

A log shipper dies, a disk is full, a terminal is stopped with Ctrl-S: none of that is a matter of the protocol. Lines
go into a bounded buffer, and a thread writes them. What does not fit, or cannot be written, is lost and counted; when
the stream takes lines again, one line says how many are missing.

The first line after a silence is written at once, the next ones together, up to a hundredth of a second later. A
process that is killed loses what it said in that time; one that ends writes it out first, for three seconds at most.
"""

from __future__ import annotations

import atexit
import errno
import io
import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from coatcheck.log import lost_lines

__all__ = ["LineStream", "flush", "line_stream"]

MOST_BYTES = 4 * 1024 * 1024
"""What waits to be written; a stream that is slower than that for long loses lines."""
LEFT = frozenset({errno.EPIPE, errno.EIO})
"""How a write fails when the reader of a pipe has left, or a terminal is closed."""
PAUSE_S = 0.01
FLUSH_S = 3.0


class LineStream:
    """The lines of this process that go to one file descriptor, in the order they were put."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.make_notice: Callable[[int], bytes] | None = None
        """Makes the line that says how many are missing; None where such a line would be out of place."""
        self.on_gone: Callable[[], object] = bool
        """Told, from another thread, when the reader has left."""
        self._is_gone = False
        self._missing_count = 0
        """Lines that were lost, and no line says so yet. Only the writing thread uses it, and the next one."""
        self._is_cut = False
        """The last thing written was a part of a line."""
        self._reset()

    def _reset(self) -> None:
        # Reentrant, both: a finalizer may log while its own thread is in `put`.
        self._queue: SimpleQueue[bytes | threading.Event] = SimpleQueue()
        self._lock = threading.RLock()
        self._size = 0
        self._refused_count = 0
        self._thread: threading.Thread | None = None
        self._is_stuck = False
        """Waited for in vain, and nothing was written since: not worth waiting for again."""

    @property
    def is_filling(self) -> bool:
        """Whether the next lines may soon find no room."""
        return self._size > MOST_BYTES // 2

    def put(self, text: bytes) -> None:
        """Have whole lines written. Never waits and never raises."""
        with self._lock:
            if self._size + len(text) > MOST_BYTES:
                count = text.count(b"\n")
                self._refused_count += count
                lost_lines.add(count)
                return
            self._size += len(text)
            self._queue.put(text)
            if self._thread is None:
                self._start()

    def flush(self, within_s: float = FLUSH_S) -> None:
        """Wait until all that was put is written or lost, but no longer than that."""
        written = threading.Event()
        with self._lock:
            if self._thread is None or self._is_stuck:
                return
            self._queue.put(written)
        self._is_stuck = not written.wait(within_s)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"lines-{self.descriptor}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads, or the interpreter is on its way out: then it has to wait
            self._thread = None
            self._write_next()

    def _run(self) -> None:
        while True:
            self._write_next()
            time.sleep(PAUSE_S)  # lines that follow each other closely share a write, and a turn of the interpreter

    def _write_next(self) -> None:
        """Wait for something to write, and write all there is."""
        taken = [self._queue.get()]
        with self._lock:
            with suppress(Empty):
                while True:
                    taken.append(self._queue.get_nowait())
            refused_count, self._size, self._refused_count = self._refused_count, 0, 0
        self._write(b"".join(each for each in taken if isinstance(each, bytes)), refused_count)
        self._is_stuck = False
        for each in taken:
            if isinstance(each, threading.Event):
                each.set()

    def _write(self, text: bytes, refused_count: int) -> None:
        """Write it, between the notices of what is missing before and after it."""
        rest = self._push(text) if self._tell_missing() else text
        unwritten_count = rest.count(b"\n")
        lost_lines.add(unwritten_count)
        self._missing_count += unwritten_count + refused_count
        if not rest:
            self._tell_missing()
        elif self._is_gone:
            self.on_gone()

    def _tell_missing(self) -> bool:
        """Say how many lines are missing, if any are; tell whether the stream took it."""
        if self._missing_count and self.make_notice is not None:
            if self._push(self.make_notice(self._missing_count)):
                return False
            self._missing_count = 0
        return True

    def _push(self, text: bytes) -> bytes:
        """Write all of it; return what could not be written."""
        if self._is_cut and self._write_all(b"\n"):
            return text
        return self._write_all(text)

    def _write_all(self, text: bytes) -> bytes:
        view = memoryview(text)
        while view:
            try:
                count = os.write(self.descriptor, view)
            except BlockingIOError:  # a process that shares this terminal has made it non-blocking
                select.select([], [self.descriptor], [])
            except OSError as error:
                self._is_gone = error.errno in LEFT
                return bytes(view)
            else:
                self._is_cut = view[count - 1] != ord("\n")
                view = view[count:]
        return b""


class LineFile(io.TextIOBase):
    """A text file in front of a stream, for those who write to files. What is written ends with a line."""

    def __init__(self, stream: LineStream, *, encoding: str, is_terminal: bool) -> None:
        self._stream = stream
        self._encoding = encoding
        self._is_terminal = is_terminal

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed has a plain attribute
        return self._encoding

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        self._stream.put(text.encode(self._encoding, "replace"))
        return len(text)


_streams: dict[int, LineStream] = {}


def line_stream(descriptor: int) -> LineStream:
    """The one stream of this process for a file descriptor, so that all who write there keep their order."""
    if not _streams:
        atexit.register(flush)
        os.register_at_fork(after_in_child=_begin_afresh)
    return _streams.setdefault(descriptor, LineStream(descriptor))


def flush(within_s: float = FLUSH_S) -> None:
    """Give all streams that long, together, to write what they have: before `os._exit`, and at the end."""
    deadline_s = time.monotonic() + within_s
    for stream in list(_streams.values()):
        stream.flush(max(0.0, deadline_s - time.monotonic()))


def _begin_afresh() -> None:
    """A child made by `fork` has none of our threads, and what waits to be written is its parent's to write."""
    for stream in list(_streams.values()):
        stream._reset()  # noqa: SLF001 - of this module
