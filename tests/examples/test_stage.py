"""The stage of the examples: nothing that was started on it stays behind, and what goes wrong is said."""

import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.examples.processes import Processes, Running, wait_until

MARK = f"mark-{uuid.uuid4().hex}"
PLAY = """
import asyncio
from examples.stage import Stage, play

async def main():
    async with Stage() as stage:
        child = await stage.start("sh", "-c", "{child}", name="the child")
        await child.wait_for("ready")
        print("on stage", flush=True)
        await asyncio.sleep(1000)

raise SystemExit(play(main()))
"""
POLITE = "sleep 1000 & echo ready; wait"
STUBBORN = "trap '' TERM; (trap '' TERM; exec sleep 1000) & echo ready; wait"


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Callable[[str], Running]]:
    """Starts a command with one child, which has a child of its own."""
    processes = Processes(tmp_path, {"EXAMPLES_MARK": MARK})
    yield lambda child: processes.command(["-c", PLAY.replace("{child}", child)], {})
    processes.end()
    for pid in marked():  # a test that failed
        os.kill(pid, signal.SIGKILL)


def marked() -> list[int]:
    """Processes that were started under our mark and have not ended."""
    found: list[int] = []
    if not sys.platform.startswith("linux"):
        return found
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                is_ours = MARK.encode() in (entry / "environ").read_bytes()
                is_over = " Z " in (entry / "stat").read_text()
            except OSError:
                continue
            if is_ours and not is_over:
                found.append(int(entry.name))
    return found


needs_proc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")


@needs_proc
@pytest.mark.parametrize("child", [POLITE, STUBBORN], ids=["polite", "stubborn"])
def test_nothing_outlives_a_command_that_was_killed(stage, child):
    running = stage(child)
    running.wait_for("on stage")
    assert len(marked()) >= 4  # the command, the guard, the child and the child's child

    running.process.kill()
    running.process.wait()

    wait_until(lambda: not marked(), lambda: f"still running: {marked()}")


@needs_proc
def test_interrupted_command_ends_its_children_first(stage):
    running = stage(POLITE)
    running.wait_for("on stage")

    running.process.send_signal(signal.SIGINT)

    assert running.process.wait(60) == 130
    assert marked() == []


def test_child_that_ends_too_early_is_quoted(stage):
    running = stage("echo no disk; exit 3")

    assert running.process.wait(60) == 1
    assert running.printed == "the child ended before its time. Its last words:\n  no disk\n"
