"""A newcomer's shell: commands as printed, in an environment that knows nothing of the one the tests run in."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

# What a newcomer's login shell would not have: the test run's own environment.
OURS = re.compile(r"COATCHECK_|PYTEST|PYTHON|VIRTUAL_ENV|MAKE|MFLAGS|MYPY")


@dataclass
class Shell:
    """A terminal: where it stands, and whether an environment is activated in it."""

    directory: Path
    activated: Path | None = None
    extra: dict[str, str] = field(default_factory=dict)

    def run(self, command: str, *, timeout_s: float = 300.0) -> str:
        """Run a line as typed, to its end. What it printed is returned; a failure shows all of it."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.directory,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}"
        return done.stdout

    @contextmanager
    def background(self, command: str, *, log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Run a line in another terminal for as long as the block lasts, then press Ctrl-C there."""
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.directory,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            end_group(process)

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not OURS.match(name)}
        own = str(Path(sys.executable).parent)
        path = [it for it in kept["PATH"].split(os.pathsep) if it != own]
        if self.activated is not None:
            path.insert(0, str(self.activated / "bin"))
        # The Python of this test run, by its base: which one `python3` is here is not what is tried.
        base = Path(sys.base_prefix) / "bin/python3"
        return {**kept, "PATH": os.pathsep.join(path), "PYTHON": str(base), **self.extra}


def end_group(process: subprocess.Popen[bytes], *, patience_s: float = 30.0) -> None:
    """End a process and all it started: by Ctrl-C, and by force if that does not help."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
        until = time.monotonic() + patience_s
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)


def printed_commands(text: str) -> list[str]:
    """The commands in a list of next steps: indented lines, each with what it means behind a `#`."""
    lines = [line for line in text.splitlines() if line.startswith("  ")]
    return [line.partition("  # ")[0].strip() for line in lines]
