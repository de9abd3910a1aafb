"""The crash points: every one is reached somewhere, dies where it says, and costs nothing when off."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from coatcheck import points
from coatcheck.errors import InvalidSettings

ROOT = Path(__file__).parents[2]
PUTS = {"record", "detach", "park", "finish", "retry", "hold"}


def test_every_point_is_reached_in_the_code_and_every_reached_point_is_named() -> None:
    sources = [path.read_text() for root in ("store", "broker", "worker") for path in (ROOT / root).rglob("*.py")]
    named = {name for source in sources for name in re.findall(r'\breach\("(\w+)"\)', source)}
    put = {f"{when}_{word}" for when in ("before", "after") for word in PUTS}

    assert named | put == set(points.POINTS)
    assert len(points.POINTS) >= 25


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        ("after_prak", "there is no point 'after_prak'"),
        ("after_park:0", "counts begin at 1"),
        ("after_park:x", "counts begin at 1"),
        ("after_park:1:explode", "is not point"),
        ("after_park:1:stop:2", "is not point"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused_with_the_reason(wanted: str, complaint: str) -> None:
    with pytest.raises(InvalidSettings, match=re.escape(complaint)):
        points.Crashes(wanted)


def test_a_process_dies_at_the_wanted_time_and_not_before() -> None:
    script = """
from coatcheck import points
points.arm_from_environment()
for number in range(5):
    print(number, flush=True)
    points.reach("before_park")
    points.reach("after_park")
"""

    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={"COATCHECK_CRASH": "before_claim, after_park:3", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ended.returncode, ended.stdout.split()) == (points.EXIT_CODE, ["0", "1", "2"])


def test_whoever_arms_hears_of_every_point_until_disarmed() -> None:
    heard: list[str] = []
    points.arm(heard.append)
    try:
        points.reach("before_park")
        points.reach("after_park")
    finally:
        points.arm(None)
    points.reach("before_claim")

    assert heard == ["before_park", "after_park"]
