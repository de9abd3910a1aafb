"""No text of a stranger steers the terminal that it is shown on, nor turns the direction of what is read there."""

import io
import json
import re
import time
import unicodedata
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from rich.console import Console

from coatcheck.broker import Message
from coatcheck.cli import dead, output, requests, show
from coatcheck.cli.dead import Letter, read_letter
from coatcheck.cli.dev_screen import Screen, read_line
from coatcheck.cli.output import Terminal, read_blob
from coatcheck.store import encode
from coatcheck.worker import logs
from coatcheck.worker.redaction import clean, clean_json
from coatcheck.worker.settings import LogFormat

STEERING = (
    "\x1b]0;title\x07", "\x1b[2J", "\x9b2J", "\x08\x08", "\rOverwritten", "\x7f", "\x85",
    "\u202eesrever", "\u2066x\u2069",
    "\u200f", "\u061c", "\u2028", "\u200b", "\ufeff", "\U000e0041",
)  # fmt: skip
HOSTILE = "owls" + "".join(STEERING)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""What we write ourselves, and rich and structlog for us."""


def steering_in(shown: str) -> list[str]:
    """What may steer a terminal in a text, apart from our own colours, newlines and tabs."""
    rest = COLOURS.sub("", shown)
    return [each for each in rest if unicodedata.category(each) in {"Cc", "Cf", "Zl", "Zp"} and each not in "\n\t"]


Shown = Callable[[], str]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shown:
    """What a terminal in place of stdout and stderr was told."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, highlight=False, soft_wrap=True)
    monkeypatch.setattr(output, "stdout", lambda: console)
    monkeypatch.setattr(output, "stderr", lambda: console)
    return lambda: "".join((stream.getvalue(), *capsys.readouterr()))


def letter() -> Letter:
    message = Message(
        json.dumps(HOSTILE, ensure_ascii=False).encode(),
        correlation_id=HOSTILE,
        reply_to=HOSTILE,
        type=HOSTILE,
        message_id=HOSTILE,
        content_type="application/json",
        headers={"cc-reason": HOSTILE, "cc-detail": HOSTILE, "cc-queue": HOSTILE},
    )
    return read_letter(message)


def in_a_log(log_format: LogFormat) -> None:
    render = logs._renderer(log_format, has_colors=True)
    event = {"event": HOSTILE, HOSTILE: HOSTILE, "type": HOSTILE, "correlation_id": f"two words {HOSTILE}"}
    more: dict[str, Any] = {"list": [HOSTILE], "nested": {HOSTILE: HOSTILE}, "error": ValueError(HOSTILE)}
    print(render(None, "info", logs._protect(None, "info", {**event, **more, "exception": f"a\nb {HOSTILE}"})))


def on_the_dev_screen() -> None:
    lines = Screen(Terminal(file=output.stdout().file, force_terminal=True, width=100))
    lines.add("worker")
    lines.show("worker", read_line(f"printed {HOSTILE}".encode()))
    lines.show("worker", read_line(f"{'long ' * 2000}{HOSTILE}".encode()))
    for value in (HOSTILE, [HOSTILE], {HOSTILE: HOSTILE}):
        lines.show("worker", read_line(json.dumps({"event": HOSTILE, "level": "error", "peer": value}).encode()))


PLACES: dict[str, Callable[[], object]] = {
    "a line": lambda: output.say(HOSTILE),
    "a block": lambda: output.say_block(HOSTILE),
    "facts": lambda: output.say_facts([("type", HOSTILE)]),
    "a table": lambda: output.say_table(("ID", "TASK"), [[HOSTILE, HOSTILE]]),
    "JSON": lambda: output.emit_json({"type": HOSTILE, HOSTILE: [HOSTILE]}),
    "JSON on stderr": lambda: output.emit_json({"type": HOSTILE}, err=True),
    "a value": lambda: print(output.pretty({HOSTILE: HOSTILE})),
    "a dead letter": lambda: dead._print_letter(letter(), limit=2000),
    "a dead letter whole": lambda: dead._print_letter(letter(), limit=None),
    "a dead letter as JSON": lambda: output.emit_json(dead._document(letter())),
    "a list of dead letters": lambda: output.say_table(("#", "ID"), [dead._row(1, letter())[:2]]),
    "a block of show": lambda: show._print_block("Result", HOSTILE),
    "a result": lambda: requests._print_result(uuid4(), HOSTILE, as_json=False),
    "a result of bytes": lambda: requests._print_result(uuid4(), HOSTILE.encode(), as_json=False),
    "a result as JSON": lambda: requests._print_result(uuid4(), {HOSTILE: HOSTILE}, as_json=True),
    "a log for people": lambda: in_a_log(LogFormat.CONSOLE),
    "a log for programs": lambda: in_a_log(LogFormat.JSON),
    "the screen of dev": on_the_dev_screen,
}


@pytest.mark.parametrize("place", PLACES)
def test_text_of_a_stranger_does_not_steer_the_terminal(place: str, shown: Shown):
    PLACES[place]()

    text = shown()
    assert "owls" in text
    assert steering_in(text) == []


def test_what_was_spelled_out_can_be_told_apart():
    assert clean("a\x1b\u202e\U000e0041b") == "a\\x1b\\u202e\\U000e0041b"
    assert clean("a tab\t, a\nnewline, an é, a\u3000wide space") == "a tab\t, a\nnewline, an é, a\u3000wide space"


def test_programs_read_the_same_from_json_that_is_clean():
    document = json.dumps({HOSTILE: [HOSTILE]}, ensure_ascii=False)

    assert steering_in(clean_json(document.encode())) == []
    assert json.loads(clean_json(document.encode())) == {HOSTILE: [HOSTILE]}


def test_fact_of_several_lines_does_not_look_like_the_next_fact(shown: Shown):
    output.say_facts([("type", "echo\nstate  done"), ("state", "failed")])

    assert COLOURS.sub("", shown()).splitlines() == ["type   echo", "       state  done", "state  failed"]


def test_cell_of_several_lines_stays_in_its_row(shown: Shown):
    output.say_table(("ID", "TASK"), [["1", "echo\n2   forged"]])

    assert len(shown().splitlines()) == 2


def test_stored_value_does_not_steer_either(shown: Shown):
    print(read_blob(encode({"detail": HOSTILE})).as_text(2000))

    assert steering_in(shown()) == []


@pytest.mark.parametrize("at", ["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "9999-12-31T23:59:59Z"])
@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "Etc/GMT+12"])
def test_letter_from_the_ends_of_time_is_shown(
    shown: Shown, monkeypatch: pytest.MonkeyPatch, at: str, zone: str
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        forged = read_letter(Message(b"{}", message_id="forged", headers={"cc-dead-at": at}))

        dead._print_letter(forged, limit=100)
        output.say_table(("NR", "ID"), [dead._row(1, forged)[:2]])
        output.emit_json(dead._document(forged))
    finally:
        monkeypatch.undo()
        time.tzset()

    assert "forged" in shown()


@pytest.mark.parametrize(
    "at", ["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "9999-12-31T23:59:59", "2026-01-01"]
)
def test_line_from_the_ends_of_time_is_shown_by_dev(at: str) -> None:
    """A handler may print what it was sent."""
    stream = io.StringIO()
    screen = Screen(Terminal(file=stream, force_terminal=True, width=100))
    screen.add("worker")

    for stamp in ("2026-01-01T00:00:00Z", at, "2026-01-01T00:00:00Z"):
        screen.show("worker", read_line(json.dumps({"event": "forged", "level": "info", "timestamp": stamp}).encode()))

    assert "forged" in stream.getvalue()
