"""Programs that come from npm: installed from a lock, by a test that needs them."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

NPM_TIMEOUT_S = 90.0


def install(directory: Path, *, purpose: str) -> None:
    """Install what the lock in `directory` names. Where that cannot be, the test is skipped; on CI it fails."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            _go_without(f"{purpose}: no {program} on PATH")
    if reason := _why_npm_ci_failed(directory):
        _go_without(f"{purpose}: `npm ci` failed, the npm registry may be out of reach: {reason}")


def _why_npm_ci_failed(directory: Path) -> str | None:
    command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    try:
        subprocess.run(
            command,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=NPM_TIMEOUT_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {NPM_TIMEOUT_S:.0f} s"
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.startswith(("npm error", "npm ERR!"))]
        return lines[0] if lines else f"exit code {error.returncode}"
    return None


def _go_without(message: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(message, pytrace=False)
    pytest.skip(message)
