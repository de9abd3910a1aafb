"""Commands where no server is named, and none is there."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.kit import Cli

from coatcheck.embedded import wait_stopped

COATCHECK = [sys.executable, "-c", "from coatcheck.cli import main; main(prog_name='coatcheck')"]
NOWHERE_BROKER = "amqp://guest:guest@127.0.0.1:1/"
UNSET = {"COATCHECK_BROKER": "", "COATCHECK_STORE": ""}


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory with nothing above it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "command", [("ps",), ("show", "5f0c6a55"), ("submit", "research", "1"), ("dead", "ls", "research")]
)
def test_who_only_asks_is_told_how_to_get_a_server_and_makes_none(nowhere: Path, command: tuple[str, ...]):
    result = Cli(UNSET)(*command)

    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "`coatcheck dev module:app`" in line
    assert list(nowhere.iterdir()) == []


def test_a_directory_that_is_not_there_is_not_made_by_asking(nowhere: Path):
    result = Cli(UNSET)("ps", "--store", f"embedded://{nowhere}/typo")

    assert (result.exit_code, result.stderr.startswith(f"Error: there is no embedded server in {nowhere}/typo")) == (
        1,
        True,
    )
    assert list(nowhere.iterdir()) == []


def test_who_only_sends_needs_no_store(nowhere: Path):
    result = Cli({**UNSET, "COATCHECK_BROKER": NOWHERE_BROKER})("submit", "research", "1")

    assert result.exit_code == 1
    assert result.stderr.startswith("Error: broker amqp://127.0.0.1:1/: cannot connect")


def test_doctor_says_that_there_is_no_store(nowhere: Path):
    findings = Cli({**UNSET, "COATCHECK_BROKER": NOWHERE_BROKER}).json("doctor", exit_code=1)["findings"]

    assert [(it["check"], it["status"]) for it in findings if it["check"] == "store"] == [("store", "fail")]
    assert "no embedded server is here" in findings[0]["what"]


@pytest.fixture
def project() -> Iterator[Path]:
    """A directory with a service in it. Not pytest's own: as root the embedded server could not enter it."""
    directory = Path(tempfile.mkdtemp(prefix="cctest-worker-"))
    directory.chmod(0o711)
    (directory / "shop.py").write_text("from coatcheck.worker import App\n\napp = App('shop')\n")
    yield directory
    assert wait_stopped(directory / ".coatcheck")
    shutil.rmtree(directory)


@pytest.mark.parametrize("more", [(), ("--processes", "2")], ids=["one process", "two processes"])
def test_worker_that_migrates_brings_its_own_server_up_to_date(project: Path, more: tuple[str, ...]):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("COATCHECK_")}
    command = [*COATCHECK, "worker", "shop:app", "--migrate", *more]

    with subprocess.Popen(
        command, cwd=project, env=environ | {"COATCHECK_LOG_FORMAT": "json"}, stderr=subprocess.PIPE, text=True
    ) as worker:
        try:
            assert worker.stderr is not None
            said: list[str] = []
            for line in worker.stderr:
                said.append(line)
                if '"worker_started"' in line:
                    break
            worker.send_signal(signal.SIGTERM)
            said.append(worker.communicate(timeout=60)[1])
        finally:
            worker.kill()

    assert worker.returncode == 0, "".join(said)
    assert any('"schema_migrated"' in line for line in said)
