"""The whole of a newcomer's path, in a fresh clone with environments of its own: `make newcomer`."""

import argparse
import tempfile
import time
from pathlib import Path

from tests.first_run.path import clone, examples_of, shuffled, timed, try_examples, try_new_project, try_readme
from tests.first_run.shell import Shell


def say(line: str) -> None:
    print(line, flush=True)


def walk(place: Path, seed: int) -> None:
    shell = Shell(clone(place))
    timed(shell, "make demo", say)
    timed(shell, "make venv", say)
    shell.activated = shell.directory / ".venv"
    try_readme(shell, place / "readme.log", say)
    try_new_project(shell, place / "project.log", say)
    try_examples(shell, shuffled(examples_of(shell.directory), seed), say)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.first_run", description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="the order of the examples")
    chosen = parser.parse_args()
    say(f"a newcomer's path, seed {chosen.seed}")
    with tempfile.TemporaryDirectory(prefix="coatcheck-newcomer-") as place:
        walk(Path(place).resolve(), chosen.seed)
    say("every command did what its page says")


if __name__ == "__main__":
    main()
