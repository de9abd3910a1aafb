"""Service, sweeper and client in one process: nothing is set up, and nothing is left behind."""

from pathlib import Path

from tests.examples.processes import ROOT, Processes, command_of


def test_task_sleeps_and_ends_in_one_process(tmp_path: Path):
    here = tmp_path / "here"
    here.mkdir()

    ended = Processes(tmp_path, {"PYTHONPATH": str(ROOT)}).play(command_of("In memory"), cwd=here)

    assert (ended.code, ended.lines) == (0, ["a cup of assam"])
    assert list(here.iterdir()) == []
