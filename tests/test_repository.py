"""Promises the repository makes about itself: its layout, its wheel, its public names, its locks, its text."""

import importlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE_ROOTS = ("worker", "broker", "store")
PACKAGES = ("coatcheck.worker", "coatcheck.broker", "coatcheck.store")

# Spelled in pieces, so that this file does not find itself.
UNFINISHED = re.compile(r"\b(?:" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home|Users)/\w")
REGISTRY = re.compile(r"^\s*--?(?:index-url|extra-index-url|find-links|i|f)\b|\bhttps?://\S*/simple\b", re.MULTILINE)


def test_coatcheck_is_a_namespace_that_anyone_may_extend():
    assert [root for root in SOURCE_ROOTS if (ROOT / root / "coatcheck/__init__.py").exists()] == []


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    target = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", target, ROOT], check=True, stdin=subprocess.DEVNULL)
    (wheel,) = target.glob("coatcheck-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_holds_every_source_file(wheel_names):
    for root in SOURCE_ROOTS:
        files = (path for path in (ROOT / root).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        assert {str(path.relative_to(ROOT / root)) for path in files} <= wheel_names


def test_wheel_holds_the_migrations(wheel_names):
    migrations = [name for name in wheel_names if name.startswith("coatcheck/store/migrations/")]

    assert "coatcheck/store/migrations/env.py" in migrations
    assert any("/versions/" in name for name in migrations)


def test_wheel_holds_nothing_but_the_package(wheel_names):
    assert {name.split("/")[0] for name in wheel_names if ".dist-info/" not in name} == {"coatcheck"}
    assert "coatcheck/__init__.py" not in wheel_names


def test_wheel_says_of_every_package_that_it_has_types(wheel_names):
    """A namespace has no marker of its own (PEP 561): each package in it needs one, and so do its single modules."""
    packages = {name.split("/")[1] for name in wheel_names if name.startswith("coatcheck/") and name.count("/") > 1}

    assert {"worker", "broker", "store", "testing"} <= packages
    assert {f"coatcheck/{package}/py.typed" for package in packages} | {"coatcheck/py.typed"} <= wheel_names


@pytest.mark.parametrize("name", PACKAGES)
def test_public_names_exist_and_are_listed_once(name):
    module = importlib.import_module(name)

    assert [public for public in module.__all__ if not hasattr(module, public)] == []
    assert len(set(module.__all__)) == len(module.__all__)


@pytest.mark.parametrize("name", PACKAGES)
def test_what_a_package_defines_in_public_it_lists(name):
    module = importlib.import_module(name)
    public = {
        attribute
        for attribute, value in vars(module).items()
        if not attribute.startswith("_") and str(getattr(value, "__module__", "")).startswith("coatcheck.")
    }

    assert public - set(module.__all__) == set()


@pytest.mark.parametrize("lock", ["build", "runtime", "demo", "dev"])
def test_lock_pins_every_package_with_a_hash_and_names_no_registry(lock):
    text = (ROOT / f"requirements/{lock}.txt").read_text()
    requirements = re.findall(r"^[a-z].*?(?=^\S|\Z)", text, flags=re.MULTILINE | re.DOTALL)

    assert requirements
    assert all(re.match(r"\S+==\S+", entry) and "--hash=sha256:" in entry for entry in requirements)
    assert not REGISTRY.search(text)


def test_text_is_finished_and_knows_no_machine():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in _tracked_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if UNFINISHED.search(line) or MACHINE_PATH.search(line)
    ]

    assert found == []


def _tracked_files() -> list[Path]:
    """Files that are, or are about to be, under version control."""
    git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]
