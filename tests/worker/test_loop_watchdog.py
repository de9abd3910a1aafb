"""Code that blocks the event loop is named, once, and nothing else is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from structlog.testing import LogCapture

from coatcheck import broker, errors, worker
from coatcheck.worker.engine.classify import line_of_user
from coatcheck.worker.loop_watchdog import LoopWatch


@pytest.fixture
def told() -> Iterator[list[Any]]:
    capture = LogCapture()
    known = structlog.get_config()
    structlog.configure(processors=[capture])
    yield capture.entries
    structlog.configure(**known)


def block() -> None:
    time.sleep(0.4)  # the line that is named


async def test_line_that_blocks_the_loop_is_named_once(told: list[Any]):
    with LoopWatch(lambda _: None):
        for _ in range(3):
            block()
            await asyncio.sleep(0.3)

    mine = [each for each in told if "in block:" in each["line"]]
    assert [each["event"] for each in mine] == ["loop_blocked"]
    assert "test_loop_watchdog.py:" in mine[0]["line"]
    assert mine[0]["line"].endswith("time.sleep(0.4)  # the line that is named")
    assert mine[0]["blocked_s"] >= 0.1
    assert "ctx.step" in mine[0]["fix"]


async def test_block_without_end_is_told_while_it_lasts(told: list[Any]):
    def wait_for_word() -> None:
        deadline_s = time.monotonic() + 30
        while not any("wait_for_word" in each["line"] for each in told) and time.monotonic() < deadline_s:
            time.sleep(0.05)

    with LoopWatch(lambda _: None):
        wait_for_word()

    assert any("wait_for_word" in each["line"] for each in told)


async def test_loop_that_waits_is_not_blocked(told: list[Any]):
    with LoopWatch(lambda _: None):
        await asyncio.sleep(0.6)

    assert told == []


@pytest.mark.parametrize("file", [broker.__file__, errors.__file__, worker.__file__, "<string>"])
def test_line_of_ours_or_of_no_file_is_no_users(file: str):
    names: dict[str, Any] = {}
    exec(compile("def wait(): yield", file, "exec"), names)

    assert line_of_user(names["wait"]().gi_frame) is None
