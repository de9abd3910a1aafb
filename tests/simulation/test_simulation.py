"""The simulation as part of the suite. It runs in processes of its own, as it takes over the clock and chance."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HALVES = {"first": 0, "second": 1_000_000}
SECONDS = 110
FEWEST = 500
"""Schedules in that time on the slowest machine; a good one does ten times as many."""


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("half", HALVES)
def test_no_schedule_of_faults_breaks_a_promise(half: str) -> None:
    ended = simulate("--first", str(HALVES[half]), "--count", "10000", "--seconds", str(SECONDS))

    assert ended.returncode == 0, ended.stdout + ended.stderr
    count = re.search(r"simulated (\d+) schedules", ended.stdout)
    assert count is not None
    assert int(count[1]) >= FEWEST
    assert re.search(r" \d+ acks,", ended.stdout), "acks were not under way for a while, as they are on a network"


@pytest.mark.timeout(600)
def test_a_crash_at_every_await_and_every_pair_of_points_loses_nothing() -> None:
    ended = simulate("--exhaustive")

    assert ended.returncode == 0, ended.stdout + ended.stderr
    count = re.search(r"simulated (\d+) schedules", ended.stdout)
    assert count is not None
    assert int(count[1]) > 1000


@pytest.mark.timeout(900)
def test_every_planted_bug_is_found() -> None:
    ended = simulate("--bugs", "--count", "6000")

    found = re.search(r"found (\d+) of (\d+) planted bugs", ended.stdout)
    assert found is not None, ended.stdout + ended.stderr
    assert found[1] == found[2], ended.stdout
    assert int(found[2]) >= 12


def test_a_seed_tells_the_same_story_twice() -> None:
    stories = [simulate("--seed", "3").stdout for _ in range(2)]

    assert stories[0] == stories[1]
    assert "DIES" in stories[0]
    assert stories[0].splitlines()[-1] == "good"


def test_a_bad_schedule_says_how_to_see_it_again() -> None:
    bug = "a_grant_has_no_lease"

    ended = simulate("--bug", bug, "--count", "50", "--stop-at", "1")

    assert ended.returncode == 1
    again = re.search(r"python -m tests\.simulation (.*)", ended.stdout)
    assert again is not None
    told = simulate(*again[1].split())
    assert told.returncode == 1
    assert "VIOLATION" in told.stdout
    assert "has no waker" in told.stdout
