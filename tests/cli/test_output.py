"""The two ways output looks, and that foreign text stays text."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from coatcheck.broker import Message
from coatcheck.cli import output
from coatcheck.cli.output import duration, from_now, plain_table, pretty, read_blob, read_message, read_problem
from coatcheck.store import Codec, encode
from coatcheck.store.blobs import pack
from coatcheck.worker.redaction import clean

NOW = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.34, "340ms"),
        (12.9, "12s"),
        (60, "1m"),
        (200, "3m 20s"),
        (14_700, "4h 5m"),
        (183_600, "2d 3h"),
        (-5, "0s"),
    ],
)
def test_durations_show_their_two_largest_units(seconds: float, text: str):
    assert duration(timedelta(seconds=seconds)) == text


def test_due_times_say_in_or_ago():
    assert from_now(NOW + timedelta(seconds=20), NOW) == "in 20s"
    assert from_now(NOW - timedelta(minutes=3), NOW) == "3m ago"
    assert from_now(None, NOW) == ""


def test_plain_tables_keep_one_line_per_row_and_cut_nothing():
    long = "x" * 500
    header, first, second = plain_table(("ID", "WHAT"), [["1", f"two\nlines {long}"], ["22", ""]])

    assert header == "ID  WHAT"
    assert first == f"1   two lines {long}"
    assert second == "22  -"


def test_control_characters_are_spelled_out():
    assert clean("a\x1b[2Jb\x07\nc\tä") == "a\\x1b[2Jb\\x07\nc\tä"


def test_long_values_say_how_to_see_the_rest():
    assert pretty(["abcdef"], 8) == '[\n  "abc… (more of its 10 bytes with --full)'
    assert pretty("abcd", 6) == '"abcd"'


def test_on_a_terminal_ids_stay_whole_and_markup_is_text(monkeypatch: pytest.MonkeyPatch):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60, color_system=None)
    monkeypatch.setattr(output, "stdout", lambda: console)

    output.say_table(("ID", "WHAT"), [["a" * 36, "[bold]not markup[/bold] " * 5]])

    assert "a" * 36 in screen.getvalue()
    assert "[bold]" in screen.getvalue()
    assert max(len(line.rstrip()) for line in screen.getvalue().splitlines()) <= 60


def test_blobs_of_every_kind_are_readable_or_say_why_not():
    assert read_blob(encode({"a": 1})).value == {"a": 1}
    assert read_blob(pack(Codec.TEXT, b"text")).as_text() == '"text"'
    assert read_blob(encode(b"\x00\xff")).as_text() == "2 bytes: 00 ff"
    assert "cannot be read" in read_blob(b"rubbish").as_text()
    assert "checksum" in str(read_blob(encode("x")[:-1] + b"?").as_json()["error"])


def test_messages_that_cannot_be_read_say_why():
    assert read_message(Message(b"{", content_type="application/json")).error is not None
    assert read_message(Message(b"plain")).value == "plain"


def test_failures_that_are_no_documents_become_some():
    assert read_problem(None) is None
    assert read_problem(encode("oops")) == {"code": "unknown", "detail": "oops"}
    assert (read_problem(b"rubbish") or {})["code"] == "damaged_value"
