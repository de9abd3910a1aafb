"""What our log events mean is written down, for every one that an operator may see."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from coatcheck.log import get_logger
from coatcheck.worker import log_events as events
from coatcheck.worker import logs

ROOT = Path(__file__).parents[2]
LEVELS = {"info": "info", "warning": "warning", "_warn_once": "warning", "error": "error", "exception": "error"}
KNOWN = {"info": events.INFOS, "warning": events.WARNINGS, "error": events.ERRORS}


def logged() -> Iterator[tuple[str, str, str]]:
    """Every event in the code: its name, its level, its place."""
    for root in ("worker", "broker", "store"):
        for path in (ROOT / root).rglob("*.py"):
            if "get_logger(" not in path.read_text(encoding="utf-8"):
                continue  # the embedded server's own processes write sentences to a file of theirs
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS:
                    owner = ast.unparse(node.func.value)
                    first = node.args[0] if node.args else None
                    if owner in {"log", "self.log", "self"} and isinstance(first, ast.Constant):
                        yield str(first.value), LEVELS[node.func.attr], f"{path.name}:{node.lineno}"


def test_every_event_is_explained_at_its_level():
    unknown = [(name, level, place) for name, level, place in logged() if name not in KNOWN[level]]

    assert unknown == [], "say what they mean in worker/coatcheck/worker/log_events.py"


def test_nothing_is_explained_that_is_not_logged():
    assert set(events.EVENTS) - {name for name, *_ in logged()} - {"log_lines_lost"} == set()


def test_documented_table_is_the_one_in_the_code():
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- events:.*?-->\n(.*)<!-- /events -->", text, re.DOTALL)

    assert found is not None
    assert found[1] == events.describe_events()


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    levels = {name: logging.getLogger(name).level for name in logs.QUIET_LOGGERS}
    stream = io.StringIO()
    logs.configure(stream=stream)
    yield stream
    root.handlers, root.level = handlers, level
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)
    logging.captureWarnings(False)
    structlog.reset_defaults()


def test_warnings_and_errors_say_in_words_what_they_mean(stream: io.StringIO):
    log = get_logger("x")

    log.warning("store_lost", error="refused")
    log.error("of_the_user")
    log.info("task_parked")

    warning, error, info = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert "nothing is lost" in warning["about"]
    assert "about" not in error
    assert "about" not in info
