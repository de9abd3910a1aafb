"""Commands where no server is named, and none is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.kit import Cli

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
