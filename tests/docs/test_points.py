"""The page that lists the crash points lists those there are."""

from pathlib import Path

from coatcheck.points import POINTS

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def test_every_crash_point_is_described_as_the_code_describes_it() -> None:
    rows = [line for line in PAGE.read_text().partition("## Crash points")[2].splitlines() if line.startswith("| `")]

    assert rows == [f"| `{name}` | {meaning} |" for name, meaning in POINTS.items()]
