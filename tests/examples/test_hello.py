"""The smallest example, as it is run first: with nothing set up, in a directory of its own."""

from pathlib import Path

from tests.examples.processes import ROOT, Processes, command_of


def test_hello_needs_no_server_at_all(tmp_path: Path, server_home: Path):
    processes = Processes(tmp_path, {"PYTHONPATH": str(ROOT)})

    ended = processes.play(command_of("Hello"), cwd=server_home)

    assert (ended.code, ended.lines) == (0, ["Hello, Ada!", "Hello, Grace!"])
    assert (server_home / ".coatcheck").is_dir()  # and when this fixture ends, the server in it has stopped by itself
