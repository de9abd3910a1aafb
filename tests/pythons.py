"""The tests of the engine and the flows on every Python of this machine that the project supports: `make test-pythons`.

Interpreters are looked for on the PATH and among pyenv's versions. Of each minor version the newest is taken. Each has
an environment of its own, from the lock, in `.cache/pythons/`; it is made anew when the lock has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENVIRONMENTS = ROOT / ".cache/pythons"
LOCK = ROOT / "requirements/dev.txt"
TESTS = ("tests/worker", "tests/flow")
_NAME = re.compile(r"python3\.\d+")
# `venv` needs ensurepip, which Debian packages separately.
_ASK = """
import sys, sysconfig, venv, ensurepip
print(*sys.version_info[:3], sys.implementation.name, sysconfig.get_config_var("Py_GIL_DISABLED") or 0)
"""


@dataclass(frozen=True, order=True)
class Interpreter:
    version: tuple[int, int, int]
    path: Path

    @property
    def minor(self) -> str:
        return ".".join(map(str, self.version[:2]))

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.version))} ({self.path})"


def find_interpreters() -> tuple[list[Interpreter], list[str]]:
    """Return one interpreter of each supported minor version, and a line for each that is skipped."""
    found: dict[str, Interpreter] = {}
    skipped = []
    for path in _candidates():
        answer = _ask(path)
        if isinstance(answer, str):
            skipped.append(f"{path}: {answer}")
            continue
        known = found.get(answer.minor)
        if known is None or answer.version > known.version:
            found[answer.minor] = answer
        elif answer.version < known.version:
            skipped.append(f"{path}: {known} is newer")
    return sorted(found.values()), skipped


def _candidates() -> list[Path]:
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    pyenv_bins = sorted(pyenv.glob("versions/*/bin"), reverse=True)
    directories = [*pyenv_bins, *map(Path, os.environ.get("PATH", "").split(os.pathsep))]
    found: dict[Path, Path] = {}  # by what it is in the end: a directory and its link are one
    for directory in directories:
        # Shims stand for pyenv's versions, which are here by themselves.
        if directory.is_dir() and directory != pyenv / "shims":
            for path in sorted(directory.iterdir()):
                if _NAME.fullmatch(path.name) and os.access(path, os.X_OK):
                    found.setdefault(path.resolve(), path)
    return list(found.values())


def _ask(path: Path) -> Interpreter | str:
    """Return the interpreter at this path, or why it cannot be used."""
    try:
        asked = subprocess.run([path, "-c", _ASK], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if asked.returncode != 0:
        return (asked.stderr.strip().splitlines() or [f"it ended with {asked.returncode}"])[-1]
    *numbers, implementation, is_free_threaded = asked.stdout.split()
    version = (int(numbers[0]), int(numbers[1]), int(numbers[2]))
    if version < _oldest():
        return f"older than {'.'.join(map(str, _oldest()))}"
    if implementation != "cpython" or is_free_threaded != "0":
        return "only CPython with its global lock is supported"
    return Interpreter(version, path)


def _oldest() -> tuple[int, ...]:
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    return tuple(map(int, required.removeprefix(">=").split(".")))


def ensure_environment(interpreter: Interpreter) -> Path:
    """Return the Python of this interpreter's environment, which holds what the lock says. Can be repeated."""
    place = ENVIRONMENTS / interpreter.minor
    python, stamp = place / "bin/python", place / ".lock"
    wanted = hashlib.sha256(f"{interpreter}".encode() + LOCK.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        _run([interpreter.path, "-m", "venv", "--clear", place])
        _run([python, "-m", "pip", "install", "--quiet", "--require-hashes", "--requirement", LOCK])
        _run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", ROOT])
        stamp.write_text(wanted)
    return python


def _run(command: list[str | Path]) -> None:
    subprocess.run(command, cwd=ROOT, check=True)


def passes(interpreter: Interpreter, arguments: list[str]) -> bool:
    """Run the tests; True if they passed."""
    try:
        python = ensure_environment(interpreter)
    except subprocess.CalledProcessError as error:
        _say(f"no environment for {interpreter}: {error}")
        return False
    return subprocess.run([python, "-m", "pytest", *arguments], cwd=ROOT, check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.pythons", description=__doc__)
    parser.add_argument("--list", action="store_true", help="say which interpreters were found, and run nothing")
    parser.add_argument("--only", help="one minor version, such as 3.12")
    parser.add_argument("--pytest", default=f"-n 2 {' '.join(TESTS)}", help="what pytest is told")
    chosen = parser.parse_args()
    found, skipped = find_interpreters()
    for line in skipped:
        _say(f"skipped  {line}")
    for each in found:
        _say(f"found    {each}")
    if chosen.list:
        return
    outcomes = {it: passes(it, shlex.split(chosen.pytest)) for it in found if chosen.only in {None, it.minor}}
    for interpreter, has_passed in outcomes.items():
        _say(f"{'passed' if has_passed else 'failed'}   {interpreter}")
    sys.exit(not outcomes or not all(outcomes.values()))


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
