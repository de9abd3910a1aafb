"""Programs shown in the documentation, run as their readers would run them: as processes, on real servers."""

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.docs.pages import block_run_by
from tests.flow.harness import PATIENCE_S, Rig, rig_on
from tests.peers.conftest import node_programs  # noqa: F401 - a fixture
from tests.peers.programs import Language

from coatcheck.store import TaskState
from coatcheck.worker import App, Context

ON_DEV = "test_the_readme_example_runs_as_it_says"
ON_SERVERS = "test_the_readme_example_runs_on_servers_too"


@pytest.fixture
async def rig(broker_url: str, store_url: str, service_names) -> AsyncIterator[Rig]:
    async with rig_on(broker_url, store_url, service_names) as made:
        yield made


# --- README ---


async def test_the_readme_example_runs_as_it_says(tmp_path: Path):
    """Pasted into a shell, in an empty directory, with nothing set."""
    (tmp_path / "research.py").write_text(block_run_by(ON_DEV, "python").text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COATCHECK_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    shell = await asyncio.create_subprocess_exec(
        *("bash", "-c", block_run_by(ON_DEV, "bash").text),
        cwd=tmp_path,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    assert shell.stdout is not None
    said = b""
    try:
        while b'"unanswered"' not in said:
            line = await shell.stdout.readline()
            assert line, said.decode()
            said += line
    finally:
        os.killpg(shell.pid, signal.SIGTERM)
        await shell.communicate()

    # What `dev` prints stands before and between; the answer is the one document.
    assert b'"text": "a paper on what is known about octopuses\\n' in said
    assert b'"unanswered": 0' in said


async def test_the_readme_example_runs_on_servers_too(
    broker_url: str, empty_store_url: str, service_names, tmp_path: Path
):
    async with rig_on(broker_url, empty_store_url, service_names) as rig:
        service = service_names.new("research")
        write_program(tmp_path, service=service, peer=service_names.new("search"))

        outputs = [await run_command(rig, words, service, tmp_path) for words in server_commands()]

        report = json.loads(outputs[-1])
        assert report["topic"] == "octopuses"
        assert report["unanswered"] == 0
        assert report["text"].splitlines()[0] == "a paper on what is known about octopuses"
        (task,) = await rig.task(TaskState.DONE)
        assert task.checkpoint > 1  # it was put down on the way


def write_program(directory: Path, *, service: str, peer: str) -> None:
    """The README's program, with names that no other test uses."""
    program = block_run_by(ON_DEV, "python").text
    for name, unique in (
        ('App("research")', f"App({service!r})"),
        ('App("search")', f"App({peer!r})"),
        ('ctx.call("search"', f"ctx.call({peer!r}"),
    ):
        assert program.count(name) == 1
        program = program.replace(name, unique)
    (directory / "research.py").write_text(program)


def server_commands() -> list[list[str]]:
    """The README's commands, word by word; those in the background end with &. The rig sets the two variables."""
    found = [shlex.split(line) for line in block_run_by(ON_SERVERS, "bash").text.splitlines()]
    assert [words[0] for words in found[:2]] == ["export", "export"]
    commands = found[2:]
    assert [words[1] for words in commands] == ["migrate", "worker", "worker", "worker", "sweeper", "submit"]
    return commands


async def run_command(rig: Rig, words: list[str], service: str, directory: Path) -> str:
    """Run a command to its end, or in the background until it says that it has started."""
    arguments = [service if word == "research" else word for word in words[1:] if word != "&"]
    path = os.pathsep.join(filter(None, (str(directory), os.environ.get("PYTHONPATH"))))
    process = await rig.process(*arguments, PYTHONPATH=path)
    if words[-1] == "&":
        await process.logged(f"{arguments[0]}_started")
        return ""
    assert await process.wait(60) == 0, process.tail()
    return "\n".join(process.output)


# --- the client ---


async def test_the_client_page_runs(rig: Rig, tmp_path: Path):
    app = App(rig.names.new())
    program = block_run_by("test_the_client_page_runs", "python").text
    assert program.count('"research"') == 1
    (tmp_path / "ask.py").write_text(program.replace('"research"', repr(app.service)))

    @app.task
    async def research(ctx: Context, topic: str) -> str:
        ctx.progress(1, 2, "reading")
        await ctx.sleep(0.2)
        return f"all about {topic}"

    await rig.sweeper()
    await rig.replica(app)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(tmp_path / "ask.py"),
        env={**os.environ, "COATCHECK_BROKER": rig.settings.broker, "COATCHECK_STORE": rig.settings.store},
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(PATIENCE_S):
        output, _ = await process.communicate()

    assert [line for line in output.decode().splitlines() if "broker_connected" not in line] == [
        "1.0 of 2.0: reading",
        "result: all about octopuses",
        "stored: all about octopuses",
    ]


# --- the wire contract ---


async def test_the_python_peer_answers(rig: Rig, tmp_path: Path):
    program = tmp_path / "peer.py"
    program.write_text(block_run_by("test_the_python_peer_answers", "python").text)

    assert await ask_peer(rig, sys.executable, str(program)) == ["all about octopuses"]


async def test_the_javascript_peer_answers(rig: Rig, node_programs: Language):  # noqa: F811
    program = Path(node_programs.server[-1]).with_name("peer.mjs")
    program.write_text(block_run_by("test_the_javascript_peer_answers", "javascript").text)

    assert await ask_peer(rig, "node", str(program)) == ["all about octopuses"]


async def ask_peer(rig: Rig, *command: str) -> object:
    """What a handler gets from a peer that runs as this program, and starts after it was called."""
    queue = rig.names.new("peer")
    app = App(rig.names.new())

    @app.task
    async def ask(ctx: Context, question: str) -> object:
        # The peer makes its queue when it starts; until then there is no route.
        while True:
            [answer] = await ctx.gather(ctx.call(queue, question, timeout=20), return_exceptions=True)
            if getattr(answer, "code", "") != "no_route":
                return answer
            await ctx.sleep(0.2)

    await rig.sweeper()
    await rig.replica(app)
    requester = await rig.requester()
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, "COATCHECK_BROKER": rig.settings.broker, "PEER_QUEUE": queue},
        stdin=asyncio.subprocess.DEVNULL,
    )
    try:
        return await requester.reply(await requester.send(app.service, "octopuses"))
    finally:
        process.kill()
        await process.wait()


async def test_the_python_requester_is_answered(rig: Rig, tmp_path: Path):
    program = tmp_path / "requester.py"
    program.write_text(block_run_by("test_the_python_requester_is_answered", "python").text)
    app = App(rig.names.new())

    @app.task
    async def research(ctx: Context, topic: str) -> str:
        ctx.progress(1, 2)
        await ctx.sleep(0.05)
        return f"all about {topic}"

    await rig.sweeper()
    await rig.replica(app)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(program),
        env={**os.environ, "COATCHECK_BROKER": rig.settings.broker, "SERVICE": app.service},
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(PATIENCE_S):
        output, _ = await process.communicate()

    assert output.decode().strip() == "done: all about octopuses"
