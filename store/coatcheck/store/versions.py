"""The versions of the tables that this release knows."""

from __future__ import annotations

from importlib.resources import files


def newest_version() -> str:
    """The version this release of the code was written for."""
    return max(known_versions())


def known_versions() -> set[str]:
    """By the names of the scripts, `0001_tables.py`: a replica that only looks should not wait for Alembic to load."""
    scripts = files("coatcheck.store.migrations").joinpath("versions").iterdir()
    return {script.name.partition("_")[0] for script in scripts if script.name[:1].isdigit()}
