"""The short trials: everything broken that can be, on RabbitMQ and on queues in Postgres, and nothing wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.broker.node import _script
from tests.chaos.brokers import Broker
from tests.chaos.crew import ROOT

LIMIT_S = 1500


@pytest.mark.timeout(LIMIT_S + 60)
def test_nothing_is_lost_while_a_process_dies_at_every_point(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    # Two points need a client's queue that is full at that moment; a trial that is this short need not meet them.
    command = ["--tasks", "2000", "--minutes", "1.2", "--seed", "1", "--points", str(len(Broker.points) - 2)]
    if _script("rabbitmq-server") is None:
        command += ["--broker", request.getfixturevalue("broker_url")]

    report = _run_trial(tmp_path, *command)

    assert "**0 violations**" in report


@pytest.mark.timeout(LIMIT_S + 60)
def test_nothing_is_lost_on_queues_in_postgres_while_everything_is_broken_in_turn(tmp_path: Path) -> None:
    command = ["--tasks", "600", "--minutes", "0.7", "--seed", "1", "--points", "20", "--every-fault"]

    report = _run_trial(tmp_path, "--broker-kind", "pg", *command)

    assert "**0 violations**" in report
    done = {name: int(count) for name, count in re.findall(r"^\| ([\w -]+) \| (\d+) \|$", report, re.MULTILINE)}
    killed = {"kill -9 worker", "kill -9 sweeper", "kill -9 peer", "kill -9 client", "ended at a point"}
    frozen = {"freezes worker", "freezes sweeper"}
    cut_off = {"cut_store", "cut_broker", "delay", "swallow_store", "swallow_broker", "close_backends"}
    assert (killed | frozen | cut_off | {"restart_postgres"}) <= done.keys()
    assert not done.keys() & {"kill_broker", "close_connections", "memory_alarm"}


def _run_trial(directory: Path, *arguments: str) -> str:
    """Give the report of a trial that was sound."""
    report = directory / "report.md"
    command = [sys.executable, "-m", "tests.chaos", *arguments, "--patience", "600"]
    command += ["--evidence", str(directory / "evidence"), "--report", str(report)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as trial:
        try:
            said, _ = trial.communicate(timeout=LIMIT_S)
        finally:
            trial.terminate()  # it takes its servers with it
    assert trial.returncode == 0, said[-20_000:]
    return report.read_text()
