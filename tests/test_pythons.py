"""Which interpreters `make test-pythons` takes, and which it skips with a reason."""

import sys
from pathlib import Path

import pytest
from tests import pythons

OWN = ".".join(map(str, sys.version_info[:2]))


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is all of the PATH; pyenv has nothing."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return tmp_path


def fake(path: Path, *, says: str, code: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\necho '{says}' >&2\nexit {code}\n")
    path.chmod(0o755)


def test_interpreter_on_the_path_is_found(on_path: Path):
    (on_path / f"python{OWN}").symlink_to(sys.executable)

    found, skipped = pythons.find_interpreters()

    assert [each.minor for each in found] == [OWN]
    assert skipped == []


def test_newest_of_each_minor_version_is_taken_from_pyenv_too(on_path: Path):
    fake(on_path / "python3.12", says="3 12 4 cpython 0")
    fake(on_path / "pyenv/versions/3.12.7/bin/python3.12", says="3 12 7 cpython 0")
    fake(on_path / "pyenv/versions/3.13.1/bin/python3.13", says="3 13 1 cpython 0")

    found, skipped = pythons.find_interpreters()

    assert [each.version for each in found] == [(3, 12, 7), (3, 13, 1)]
    assert len(skipped) == 1
    assert str(on_path / "python3.12") in skipped[0]


@pytest.mark.parametrize(
    ("says", "code", "reason"),
    [
        ("3 9 18 cpython 0", 0, "older than 3.11"),
        ("3 14 0 pypy 0", 0, "only CPython"),
        ("3 14 0 cpython 1", 0, "only CPython"),
        ("No module named ensurepip", 1, "No module named ensurepip"),
    ],
)
def test_interpreter_that_cannot_be_used_is_skipped_with_the_reason(on_path: Path, says: str, code: int, reason: str):
    fake(on_path / "python3.9", says=says, code=code)

    found, skipped = pythons.find_interpreters()

    assert found == []
    assert len(skipped) == 1
    assert reason in skipped[0]
