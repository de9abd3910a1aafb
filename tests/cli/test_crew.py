"""A crew of child processes: what it starts, hears, starts again, replaces and ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.cli.dev_kit import alive

from coatcheck.cli.processes import crew as crews
from coatcheck.cli.processes.crew import Crew, Ending, Life, Member, Watcher

CHILD = """
import os, pathlib, signal, sys, time
how = sys.argv[1]
if how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if how == "broken" or how == "mended" and not pathlib.Path("good").exists():
    sys.exit(3)
print("started", os.getpid(), os.environ.get("COLOUR", ""), flush=True)
print("to stderr", file=sys.stderr, flush=True)
while how != "short":
    time.sleep(0.02)
"""


class Listener(Watcher):
    """Writes everything down. A process has started when it says so."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int, bytes]] = []
        self.endings: list[Ending] = []
        self.killed: list[str] = []
        self.gives_up = False

    async def on_output(self, life: Life, lines: bytes, *, descriptor: int) -> None:
        self.said += [(life.name, descriptor, line) for line in lines.splitlines()]
        if b"started" in lines:
            life.note_started()

    def on_end(self, member: Member, ending: Ending) -> float | None:
        self.endings.append(ending)
        return None if self.gives_up else ending.pause_s

    def on_killed(self, member: Member, waited_s: float) -> None:
        self.killed.append(member.name)


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def crew(listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Crew:
    monkeypatch.setattr(crews, "FIRST_PAUSE_S", 0.01)
    (tmp_path / "child_of_a_test.py").write_text(CHILD)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    return Crew(listener, environ=environ, patience_s=0.5, cwd=tmp_path, merges_output=False)


@pytest.fixture(autouse=True)
async def _in_time() -> AsyncIterator[None]:
    async with asyncio.timeout(60):
        yield


def add(crew: Crew, name: str, how: str, **environ: str) -> Member:
    return crew.add(name, how, module="child_of_a_test", **environ)


async def until_started(*members: Member) -> None:
    while not all(member.has_started for member in members):
        await asyncio.sleep(0.01)


async def test_processes_are_heard_by_name_and_gone_when_the_crew_is_left(crew: Crew, listener: Listener):
    async with crew:
        members = [add(crew, name, "steady", COLOUR=colour) for name, colour in (("a", "red"), ("b", "blue"))]
        crew.start(*members)
        await until_started(*members)
        pids = {member.name: member.pid for member in members}

    told = {(name, line.decode()) for name, descriptor, line in listener.said if descriptor == 1}
    assert told == {("a", f"started {pids['a']} red"), ("b", f"started {pids['b']} blue")}
    assert {(name, line) for name, descriptor, line in listener.said if descriptor == 2} >= {("a", b"to stderr")}
    assert [member.is_clean for member in members] == [True, True]
    assert alive(pid for pid in pids.values() if pid is not None) == []
    assert listener.endings == []


async def test_a_process_that_ends_is_started_again(crew: Crew, listener: Listener):
    async with crew:
        crew.start(add(crew, "a", "short"))
        while len(listener.endings) < 2:
            await asyncio.sleep(0.01)

    first, second, *_ = listener.endings
    assert (first.code, first.has_started, first.false_start_count) == (0, True, 0)
    assert first.pid != second.pid
    assert (first.pause_s, second.pause_s) == (0.01, 0.02)


async def test_a_process_that_is_left_alone_is_started_by_a_replacement(crew: Crew, listener: Listener, tmp_path: Path):
    listener.gives_up = True
    async with crew:
        member = add(crew, "a", "mended")
        crew.start(member)
        await member.given_up.wait()
        is_started_too_early = await crew.renew(member)
        (tmp_path / "good").touch()
        is_started = await crew.renew(member)

    assert (is_started_too_early, is_started) == (False, True)
    assert {ending.code for ending in listener.endings} == {3}


async def test_a_replacement_is_up_before_the_old_process_goes(crew: Crew, listener: Listener, tmp_path: Path):
    (tmp_path / "good").touch()
    async with crew:
        member = add(crew, "a", "mended")
        crew.start(member)
        await until_started(member)
        old = member.pid
        assert old is not None
        (tmp_path / "good").unlink()
        is_renewed_by_broken = await crew.renew(member)
        is_old_kept = member.pid == old and bool(alive([old]))
        (tmp_path / "good").touch()
        is_renewed = await crew.renew(member)
        is_new = member.has_started and member.pid != old

    assert (is_renewed_by_broken, is_old_kept) == (False, True)
    assert (is_renewed, is_new, alive([old])) == (True, True, [])
    assert listener.endings == []


async def test_a_process_that_does_not_stop_is_killed_and_that_is_told(crew: Crew, listener: Listener):
    async with crew:
        member = add(crew, "a", "stubborn")
        crew.start(member)
        await until_started(member)
        pid = member.pid
        assert pid is not None
        await crew.stop(member)
        is_gone = not alive([pid])

    assert is_gone
    assert listener.killed == ["a"]
    assert not member.is_clean


async def test_a_process_that_we_kill_is_not_started_again(crew: Crew, listener: Listener):
    async with crew:
        member = add(crew, "a", "steady")
        crew.start(member)
        await until_started(member)
        pid = member.pid
        assert pid is not None
        member.kill()
        await member.stop()
        is_gone = not alive([pid])

    assert is_gone
    assert member.pid is None
    assert (listener.endings, listener.killed) == ([], [])


async def test_what_goes_wrong_meanwhile_comes_out_as_it_is(crew: Crew):
    async def fail() -> None:
        async with crew:
            crew.start(add(crew, "a", "steady"))
            raise KeyError("mine")

    with pytest.raises(KeyError):
        await fail()


async def test_a_process_killed_from_outside_is_named_by_its_signal(crew: Crew, listener: Listener):
    async with crew:
        member = add(crew, "a", "steady")
        crew.start(member)
        await until_started(member)
        assert member.pid is not None
        os.kill(member.pid, signal.SIGKILL)
        while not listener.endings:
            await asyncio.sleep(0.01)

    assert listener.endings[0].code == -signal.SIGKILL
    assert crews.describe_end(listener.endings[0].code) == "was killed by SIGKILL"
