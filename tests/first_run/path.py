"""A newcomer's path through a fresh clone, as commands: what the README, the examples' page and `new` print.

`python -m tests.first_run` walks all of it; the test walks the part that needs no new environment.
"""

import json
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.docs.pages import ROOT, block_run_by
from tests.first_run.shell import Shell, printed_commands

ON_DEV = "test_the_readme_example_runs_as_it_says"
# They run until Ctrl-C, or need RabbitMQ and programs in other languages.
ELSEWHERE = {"examples.web", "examples.foreign_peers", "examples.calling_celery", "examples.search_peer"}

Say = Callable[[str], None]


def clone(into: Path) -> Path:
    """A clone of what is committed here, as a newcomer gets it."""
    directory = into / "coatcheck"
    Shell(into).run(f"git clone --quiet --depth 1 file://{ROOT} {directory}")
    return directory


def examples_of(directory: Path) -> list[str]:
    """The commands of the examples' page that end by themselves and need nothing installed."""
    page = (directory / "examples/README.md").read_text()
    found = re.findall(r"^    (python -m (examples\.\w+).*)$", page, flags=re.MULTILINE)
    return [command for command, module in found if module not in ELSEWHERE]


def try_readme(shell: Shell, log: Path, say: Say) -> None:
    """Paste the README's program and type its two commands."""
    (shell.directory / "research.py").write_text(block_run_by(ON_DEV, "python").text)
    dev, submit = block_run_by(ON_DEV, "bash").text.splitlines()
    with shell.background(dev.removesuffix(" &"), log=log):
        said = timed(shell, submit, say)
        timed(shell, "coatcheck ps --all", say)

    report = json.loads(said[said.index("{") :])
    assert report["unanswered"] == 0, said


def try_examples(shell: Shell, commands: Sequence[str], say: Say) -> None:
    """Run examples one after the other, in the order given. All of them share the server under `.coatcheck/`."""
    for command in commands:
        timed(shell, command, say)


def try_new_project(shell: Shell, log: Path, say: Say) -> None:
    """Make a project, and type the next steps that are printed."""
    change, *steps = printed_commands(timed(shell, "coatcheck new bakery", say))
    setup, test, dev, submit = steps
    project = Shell(shell.directory / change.removeprefix("cd "))
    timed(project, setup, say)
    timed(project, test, say)
    with project.background(dev, log=log):
        said = timed(project, submit, say)
    assert json.loads(said[said.index("\n{") :])["cents"] == 900, said


def shuffled(commands: Sequence[str], seed: int) -> list[str]:
    return random.Random(seed).sample(list(commands), len(commands))


def timed(shell: Shell, command: str, say: Say) -> str:
    began = time.monotonic()
    said = shell.run(command, timeout_s=900)
    say(f"{time.monotonic() - began:6.1f} s  {command}")
    return said
