"""`coatcheck new`: a small project that runs, is tested, and can be put into containers.

The project is installed with a release from an index, or with a wheel that it brings along. A project made with a
Coatcheck from a clone or a repository needs that one, and no index may have it. So its wheel is built once and lies in
the project's `vendor/`: neither a machine nor an image that installs the project needs the clone, git, or an index with
Coatcheck in it.
"""

from __future__ import annotations

import importlib.util
import json
import keyword
import os
import re
import shlex
import shutil
import string
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import distribution, packages_distributions
from importlib.metadata import version as installed_version
from importlib.resources import files
from pathlib import Path
from urllib.parse import unquote, urlsplit

import click

from coatcheck.cli.output import say
from coatcheck.worker.settings import redacted

TAKEN_NAMES = sys.stdlib_module_names | {"coatcheck", "tests"}
LONGEST_NAME = 48
"""It is the name of a database and of an image, too."""
TEMPLATES: Mapping[str, str] = {
    ".dockerignore": "dockerignore",
    ".gitignore": "gitignore",
    "Dockerfile": "Dockerfile",
    "Makefile": "Makefile",
    "README.md": "README.md",
    "compose.yaml": "compose.yaml",
    "pyproject.toml": "pyproject.toml",
    "%{name}/__init__.py": "package.py",
    "%{name}/prices.py": "prices.py",
    "%{name}/service.py": "service.py",
    "tests/test_service.py": "test_service.py",
}
"""What is written, and the template it is made of."""
INDEX = "index"
BUILD_TIMEOUT_S = 600.0
_WHEEL = re.compile(r"coatcheck-(?P<version>[^-]+)-py3-none-any\.whl")


class Template(string.Template):
    """A template that leaves `$` alone: Makefiles, Dockerfiles and compose files have uses of their own for it."""

    delimiter = "%"


@click.command(short_help="Write a small project to begin with.")
@click.argument("name")
@click.option(
    "--path",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where to write it.  [default: a directory called NAME, here]",
)
@click.option(
    "--source",
    metavar="PATH|GIT_URL|index",
    help="What the project gets Coatcheck from: a clone, a wheel, git+https://…, or a package index.  [default: where "
    "this Coatcheck came from]",
)
def new(name: str, path: Path | None, source: str | None) -> None:
    """Write a small project: a service that waits, a peer it calls, a test, and what it takes to run them.

    NAME becomes the Python package and the name of the service. Nothing is overwritten. Unless Coatcheck comes from an
    index, its wheel is built and put into the project's vendor/.

    \b
    Example:
      coatcheck new shop
      cd shop
      make dev
    """
    check_name(name)
    directory = path or Path(name)
    found = find_source(source)
    _check_place(directory, [*make_pages(name), *([Path("vendor")] if found is not None else [])])
    with tempfile.TemporaryDirectory(prefix="coatcheck-new-") as scratch:
        vendored = None if found is None else build_wheel(found, Path(scratch))
        try:
            write(directory, make_pages(name, vendored))
            if vendored is not None:
                (directory / "vendor").mkdir()
                shutil.copy(vendored.wheel, directory / "vendor")
        except OSError as error:
            raise click.ClickException(f"{error.filename or directory} cannot be written: {error.strerror}") from error
    _tell_what_next(directory, vendored)


def _check_place(directory: Path, targets: Iterable[Path]) -> None:
    in_the_way = [target for target in targets if os.path.lexists(directory / target)]
    if in_the_way:
        listed = "\n".join(f"  {directory / target}" for target in in_the_way)
        raise click.ClickException(f"nothing was written, for these are there already:\n{listed}")


def check_name(name: str) -> None:
    """Raise click.UsageError, with a name that would do, unless this is one for a package and for a service."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or len(name) > LONGEST_NAME:
        raise click.UsageError(
            f"{name!r} will not do: a name is a Python package and a service, so it takes up to {LONGEST_NAME} small "
            f"letters, digits and '_', beginning with a letter{_suggestion(name)}"
        )
    if keyword.iskeyword(name) or keyword.issoftkeyword(name) or name in TAKEN_NAMES:
        raise click.UsageError(f"{name!r} will not do: Python has a use of its own for it; try {name}_service")
    if owners := packages_distributions().get(name):
        raise click.UsageError(f"{name!r} will not do: it is a package of {owners[0]}, which is installed here")


def make_pages(name: str, vendored: Vendored | None = None) -> dict[Path, str]:
    """The files of the project, by their paths in it."""
    folder = files("coatcheck.cli") / "templates"
    values = {"name": name, "version": installed_version("coatcheck"), "copied": "", "wheel": "", "origin": ""}
    if vendored is not None:
        wheel = f"vendor/{vendored.wheel.name}"
        origin = (
            f"\n`{wheel}` is the Coatcheck this project was made with. To bring another along, put its wheel there\n"
            "(`pip wheel --no-deps --wheel-dir vendor SOURCE`) and name it in the Dockerfile.\n"
        )
        values |= {"version": vendored.version, "origin": origin}
        values |= {"copied": "COPY vendor vendor\n", "wheel": f" {wheel}"}
    return {
        Path(Template(target).substitute(values)): Template(
            (folder / f"{template}.tmpl").read_text(encoding="utf-8")
        ).substitute(values)
        for target, template in TEMPLATES.items()
    }


def write(directory: Path, pages: Mapping[Path, str]) -> None:
    """Write all files; one that appeared meanwhile is not overwritten either (FileExistsError)."""
    for target, text in pages.items():
        place = directory / target
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("x", encoding="utf-8") as file:
            file.write(text)


def _suggestion(name: str) -> str:
    near = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_0123456789")[:LONGEST_NAME]
    return f"; try {near}" if near and near not in TAKEN_NAMES and not keyword.iskeyword(near) else ""


def _tell_what_next(directory: Path, vendored: Vendored | None) -> None:
    if vendored is not None:
        say(f"{directory / 'vendor' / vendored.wheel.name} was built from {redacted(vendored.source)}.")
    say(f"{directory}/ is there. Next:\n")
    for command, meaning in (
        (f"cd {shlex.quote(str(directory))}", ""),
        ("make setup", "install what it needs into .venv"),
        ("make test", "its tests, which need no server"),
        ("make dev", "run it, until Ctrl-C"),
        ("make submit", "in another terminal: ask the service something"),
    ):
        say(f"  {command:<14}{f'  # {meaning}' if meaning else ''}".rstrip())


# --- the wheel that a project brings along ---


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


def build_wheel(source: str, directory: Path) -> Vendored:
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
