"""The table of settings in `docs/operations.md`, made from the code.

`python -m tests.docs.settings_table` writes it.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

from coatcheck.worker.settings import ENVIRONMENT, PREFIX, Settings

PAGE = Path(__file__).parents[2] / "docs/operations.md"
_BETWEEN = re.compile(r"(?<=<!-- settings: )(?P<note>[^\n]*? -->\n)(?P<table>.*?)(?=<!-- /settings -->)", re.DOTALL)


def make_table() -> str:
    lines = ["| variable | default | what it is |", "|---|---|---|"]
    lines += [f"| `{variable}` | {_default(variable)} | {about} |" for variable, about in ENVIRONMENT.items()]
    return "\n".join(lines) + "\n"


def read_table() -> str:
    found = _BETWEEN.search(PAGE.read_text())
    assert found is not None, f"{PAGE.name} has no place for the table"
    return found["table"]


def _default(variable: str) -> str:
    name = variable.removeprefix(PREFIX).lower()
    value: Any = Settings(request_prefetch=1).describe()[name]
    (written,) = [field.default for field in dataclasses.fields(Settings) if field.name == name]
    if isinstance(written, int) and not isinstance(written, bool):
        value = written  # as it is written: a prefetch of 0 means something else
    return "unset" if value is None else f"`{value}`"


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(_BETWEEN.sub(lambda found: found["note"] + make_table(), text))
