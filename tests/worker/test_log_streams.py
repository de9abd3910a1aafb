"""Lines for a stream that may be closed, full or blocked: written in order, or lost and counted, and nothing else."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator

import pytest

from coatcheck.log import lost_lines
from coatcheck.worker import log_streams as streams
from coatcheck.worker.log_streams import LineStream

SMALL = 4096
WAIT_S = 30.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe that holds 4 KiB."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, SMALL)
    yield reading, writing
    for descriptor in (reading, writing):
        try:
            os.close(descriptor)
        except OSError:  # the test has closed it
            continue


def noticing(descriptor: int) -> LineStream:
    stream = LineStream(descriptor)
    stream.make_notice = lambda count: f"{count} lost\n".encode()
    return stream


def read_until(reading: int, end: bytes) -> bytes:
    found = b""
    while not found.endswith(end):
        found += os.read(reading, 65_536)
    return found


def read_all_of(reading: int, count: int, line: bytes) -> int:
    """Read until `count` lines have come, or were said to be lost; how many were. The writer may say so in parts."""
    come, lost, rest = 0, 0, b""
    while come + lost < count:
        *whole, rest = (rest + os.read(reading, 65_536)).split(b"\n")
        for each in whole:
            if each.endswith(b" lost"):
                lost += int(each.removesuffix(b" lost"))
            else:
                assert each + b"\n" == line
                come += 1
    assert (come + lost, rest) == (count, b"")
    return lost


def test_lines_come_in_the_order_they_were_put(pipe: tuple[int, int]):
    reading, writing = pipe
    stream = LineStream(writing)
    lines = [f"{number} {'x' * 50}\n".encode() for number in range(1000)]

    for line in lines:
        stream.put(line)

    assert read_until(reading, lines[-1]) == b"".join(lines)


def test_a_blocked_stream_makes_no_caller_wait_and_says_afterwards_how_many_lines_it_lost(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    reading, writing = pipe
    monkeypatch.setattr(streams, "MOST_BYTES", 10_000)
    stream, before = noticing(writing), lost_lines.count
    line = b"x" * 999 + b"\n"

    for _ in range(100):
        stream.put(line)
    stream.flush(0.01)  # returns, although nothing is read
    lost = lost_lines.count - before

    assert 0 < lost < 100
    assert read_all_of(reading, 100, line) == lost
    stream.put(b"back\n")
    assert read_until(reading, b"back\n") == b"back\n"


def test_a_stream_without_a_reader_loses_lines_and_counts_them(pipe: tuple[int, int]):
    reading, writing = pipe
    os.close(reading)
    gone = threading.Event()
    stream, before = noticing(writing), lost_lines.count
    stream.on_gone = gone.set

    for _ in range(3):
        stream.put(b"one\n")
        stream.flush(WAIT_S)

    assert lost_lines.count - before == 3
    assert gone.is_set()


def test_a_stream_that_works_again_says_first_what_is_missing(pipe: tuple[int, int]):
    reading, writing = pipe
    full = os.open("/dev/full", os.O_WRONLY)
    stream = noticing(full)

    stream.put(b"one\ntwo\n")
    stream.flush(WAIT_S)
    os.dup2(writing, full)
    stream.put(b"three\n")

    assert read_until(reading, b"three\n") == b"2 lost\nthree\n"
    os.close(full)


def test_a_child_made_by_fork_writes_its_own_lines_only(pipe: tuple[int, int]):
    reading, writing = pipe
    stream = streams.line_stream(writing)
    stream.put(b"parent\n")
    stream.flush(WAIT_S)

    child = os.fork()
    if child == 0:  # pragma: no cover - another process
        stream.put(b"child\n")
        stream.flush(WAIT_S)
        os._exit(0)

    os.waitpid(child, 0)
    del streams._streams[writing]
    assert read_until(reading, b"child\n") == b"parent\nchild\n"


def test_many_lines_cost_few_turns_of_the_writing_thread(tmp_path):
    """A thread that wakes for each line would take the interpreter from the protocol as often."""
    with (tmp_path / "lines").open("wb") as file:
        stream = LineStream(file.fileno())
        stream.put(b"first\n")
        stream.flush(WAIT_S)
        began_s = time.thread_time()
        for _ in range(20_000):
            stream.put(b"x" * 99 + b"\n")
        used_s = time.thread_time() - began_s
        stream.flush(WAIT_S)

    assert (tmp_path / "lines").stat().st_size == 6 + 20_000 * 100
    assert used_s < 2.0  # 0.05 where it was measured
