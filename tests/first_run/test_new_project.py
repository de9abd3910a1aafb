"""`coatcheck new` from a clone that no index knows of: the printed steps, typed as printed, in a fresh environment."""

import json
from pathlib import Path

import pytest
from tests.cli.kit import Cli
from tests.docs.pages import ROOT
from tests.first_run.shell import Shell, printed_commands


@pytest.mark.timeout(600)
def test_the_printed_next_steps_work_as_printed(tmp_path: Path):
    printed = Cli().run("new", "bakery", "--source", str(ROOT), cwd=tmp_path)
    assert printed.returncode == 0, printed.stderr
    change, setup, test, dev, submit = printed_commands(printed.stdout)
    assert (change, dev) == ("cd bakery", "make dev")
    here, there = (Shell(tmp_path / change.removeprefix("cd ")) for _ in range(2))

    here.run(setup)
    tested = here.run(test)
    with there.background(dev, log=tmp_path / "dev.log"):
        answered = here.run(submit)

    assert "3 passed" in tested
    quote = json.loads(answered[answered.index("\n{") :])
    assert quote == {"item": "hat", "count": 3, "cents": 900, "note": ""}
