"""The Coatcheck that a new project is installed with: a release from an index, or a wheel that it brings along.

A project made with a Coatcheck from a clone or a repository needs that one, and no index may have it. So its wheel is
built once and lies in the project's `vendor/`: neither a machine nor an image that installs the project needs the
clone, git, or an index with Coatcheck in it.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

import click

from coatcheck.worker.settings import redacted

INDEX = "index"
BUILD_TIMEOUT_S = 600.0
_WHEEL = re.compile(r"coatcheck-(?P<version>[^-]+)-py3-none-any\.whl")


@dataclass(frozen=True, slots=True)
class Vendored:
    """A wheel to bring along. `source` is what it was built from."""

    wheel: Path
    version: str
    source: str


def find_source(written: str | None) -> str | None:
    """What `pip` shall build Coatcheck from; None for an index. Unsaid, it is where this Coatcheck came from."""
    if written == INDEX:
        return None
    if written is not None:
        return str(Path(written).resolve()) if Path(written).exists() else written
    return _own_source()


def build(source: str, directory: Path) -> Vendored:
    """Build the wheel into a directory. Raises click.ClickException with what pip said."""
    shown = redacted(source)
    if importlib.util.find_spec("pip") is None:
        raise click.ClickException(
            f"building Coatcheck from {shown} takes pip, and {sys.executable} has none: run `python -m ensurepip`, or "
            f"say --source {INDEX} if a package index has it"
        )
    # In a clone's own environment the build backend is there already, pinned; elsewhere pip fetches one.
    options = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *options, "--wheel-dir", str(directory)]
    try:
        done = subprocess.run(  # noqa: S603 - building it is what was asked for
            [*command, source],
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise click.ClickException(f"pip was still building {shown} after {BUILD_TIMEOUT_S:g} s") from error
    wheels = [(path, found) for path in directory.glob("*.whl") if (found := _WHEEL.fullmatch(path.name))]
    if done.returncode or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise click.ClickException(
            f"{shown} is no source of Coatcheck that pip can build: {redacted(said[-1]) if said else 'no such wheel'}\n"
            f"A source is a directory, a wheel or a git+https:// address; --source {INDEX} takes a package index."
        )
    ((wheel, found),) = wheels
    return Vendored(wheel, found["version"], source)


def _own_source() -> str | None:
    """Where this Coatcheck was installed from, if not from an index (PEP 610)."""
    noted = distribution("coatcheck").read_text("direct_url.json")
    if noted is None:
        return None
    found = json.loads(noted)
    url = str(found["url"])
    if "vcs_info" in found:
        return f"{found['vcs_info']['vcs']}+{url}@{found['vcs_info']['commit_id']}"
    if urlsplit(url).scheme != "file":
        return url
    path = Path(unquote(urlsplit(url).path))
    return str(path) if path.exists() else None
