"""The short trial: 2,000 tasks, everything broken that can be, a process dead at every crash point, nothing wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.broker.node import _script
from tests.chaos.crew import ROOT

LIMIT_S = 1500


@pytest.mark.timeout(LIMIT_S + 60)
def test_nothing_is_lost_while_a_process_dies_at_every_point(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    command = [sys.executable, "-m", "tests.chaos", "--tasks", "2000", "--minutes", "1.2", "--seed", "1"]
    command += ["--evidence", str(tmp_path / "evidence"), "--report", str(report), "--patience", "600"]
    if _script("rabbitmq-server") is None:
        command += ["--broker", request.getfixturevalue("broker_url")]

    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as trial:
        try:
            said, _ = trial.communicate(timeout=LIMIT_S)
        finally:
            trial.terminate()  # it takes its servers with it

    assert trial.returncode == 0, said[-20_000:]
    assert "**0 violations**" in report.read_text()
