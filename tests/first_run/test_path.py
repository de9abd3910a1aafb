"""A newcomer's path in small: a fresh clone, the README's program and examples one after the other, in one directory.

The environment is that of the test run; `make newcomer` also builds environments of its own.
"""

import os
import sys
from pathlib import Path

import pytest
from tests.first_run.path import clone, examples_of, try_examples, try_readme
from tests.first_run.shell import Shell


def test_the_page_of_examples_has_some_that_need_nothing():
    commands = examples_of(Path(__file__).parents[2])

    assert {"python -m examples.hello Ada Grace", "python -m examples.kill_a_replica"} <= set(commands)


@pytest.mark.timeout(400)
def test_a_fresh_clone_runs_the_readme_and_examples_in_one_directory(tmp_path: Path):
    directory = clone(tmp_path)
    roots = os.pathsep.join(str(directory / root) for root in ("worker", "broker", "store"))
    shell = Shell(directory, activated=Path(sys.prefix), extra={"PYTHONPATH": roots})
    said: list[str] = []

    by_hand = [command for command in examples_of(directory) if "hello" in command or "partial" in command]
    try_examples(shell, by_hand[::-1], said.append)
    try_readme(shell, tmp_path / "dev.log", said.append)
    try_examples(shell, by_hand[:1], said.append)

    assert len(said) == 5
