"""What `coatcheck dev` makes of the lines of its processes, and how it notices changes of the code."""

from __future__ import annotations

import io
import json
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from coatcheck.cli.dev_screen import Screen, read_line
from coatcheck.cli.dev_sources import find_root, look, watch
from coatcheck.cli.output import Terminal
from coatcheck.worker.settings import LogLevel

TASK = "5f0c6a55-7a0e-5c0e-9d3f-0d6f2b1c4a11"


def line(event: str, level: str = "info", **facts: Any) -> bytes:
    return json.dumps({"event": event, "level": level, "timestamp": "2026-01-02T03:04:05.678Z", **facts}).encode()


def shown(*lines: bytes, label: str = "w1", level: LogLevel = LogLevel.INFO, **console: Any) -> str:
    file = io.StringIO()
    screen = Screen(Terminal(file=file, highlight=False, soft_wrap=True, **console), level=level)
    screen.add("w1", "sweeper")
    for each in lines:
        screen.show(label, read_line(each))
    return file.getvalue()


@pytest.fixture(autouse=True)
def _no_color_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


# --- lines ---


def test_an_event_is_told_with_its_time_its_task_and_its_facts():
    text = shown(line("task_parked", task_id=TASK, handler="quote", checkpoint=1, service="shop", attempt=1))

    assert text.startswith("w1      │ ")
    assert text.endswith(":04:05 task_parked    5f0c6a55 quote  checkpoint=1\n")


def test_what_is_the_same_every_day_is_shown_when_it_is_not():
    assert "attempt" not in shown(line("task_resumed", task_id=TASK, attempt=1))
    assert "attempt=2" in shown(line("task_resumed", task_id=TASK, attempt=2))
    assert shown(line("swept", timeouts=1, resumes=0)).endswith("swept           timeouts=1\n")


def test_warnings_that_everybody_repeats_are_shown_once_and_counted():
    lost = [line("consumer_lost", "warning", queue=f"shop.{number}") for number in range(30)]
    failed = [line("broker_connect_failed", "warning", attempt=number) for number in range(1, 11)]
    later = json.loads(lost[0]) | {"timestamp": "2026-01-02T03:04:16Z"}

    during = shown(*lost, *failed)
    after = shown(*lost, *failed, line("worker_started"), json.dumps(later).encode())

    assert [row.split()[3] for row in during.splitlines()] == ["consumer_lost", "broker_connect_failed"]
    assert after.startswith(during)
    summary, started, again = after.removeprefix(during).splitlines()
    assert summary.endswith("│ and 38 more: consumer_lost 29, broker_connect_failed 9")
    assert "worker_started" in started
    assert "consumer_lost" in again
    assert len(shown(*lost, level=LogLevel.DEBUG).splitlines()) == 30


def test_nothing_about_a_task_and_no_error_is_ever_collapsed():
    retried = [line("task_retried", "warning", task_id=TASK)] * 3
    errors = [line("delivery_surprised", "error")] * 3

    assert len(shown(*retried, *errors).splitlines()) == 6


def test_the_level_decides_and_debug_hides_nothing():
    noise, settings = line("broker_connected", role="consume"), line("worker_started", settings={"grace": "3s"})

    assert shown(noise) == ""
    assert "broker_connected  role=consume" in shown(noise, level=LogLevel.DEBUG)
    assert "grace" not in shown(settings)
    assert '{"grace":"3s"}' in shown(settings, level=LogLevel.DEBUG)
    assert shown(line("final_reply_had_no_route", level="warning", reply_to="coatcheck.private.1f")) == ""
    private = ["coatcheck.private.1f", "coatcheck.private.2e"]
    assert shown(line("final_reply_had_no_route", level="warning", reply_to=private)) == ""
    assert "reply_to=coatcheck.private.1f,mine" in shown(
        line("final_reply_had_no_route", level="warning", reply_to=[private[0], "mine"])
    )
    assert "reply_to=mine" in shown(line("final_reply_had_no_route", level="warning", reply_to="mine"))
    assert shown(line("task_parked"), level=LogLevel.WARNING) == ""
    assert "oh" in shown(line("oh", level="critical"), level=LogLevel.ERROR)


def test_a_failed_task_comes_with_the_command_that_tells_its_story():
    text = shown(line("task_failed", level="error", task_id=TASK, handler="quote", exception="ValueError"))

    assert text.endswith("exception=ValueError  → coatcheck show 5f0c6a55\n")


def test_a_traceback_keeps_its_lines_under_the_prefix():
    text = shown(line("sweep_surprised", level="error", exception="Traceback:\n  File x\nOops"), label="sweeper")

    assert [each.partition(" │ ")[2] for each in text.splitlines()[1:]] == ["Traceback:", "  File x", "Oops"]
    assert all(each.startswith("sweeper │ ") for each in text.splitlines())


def test_a_handlers_traceback_is_shown_where_it_failed():
    trace = 'Traceback (most recent call last):\n  File "service.py", line 7, in quote\nValueError: no coat\n'
    text = shown(line("task_failed", level="error", task_id=TASK, exception="ValueError", traceback=trace))

    first, *rest = text.splitlines()
    assert first.endswith("exception=ValueError  → coatcheck show 5f0c6a55")
    assert [each.partition(" │ ")[2] for each in rest] == trace.splitlines()


@pytest.mark.parametrize("raw", [b"hello", b"{not json", b'{"no": "event"}', b'{"event": 5}', b"[]"])
def test_what_is_no_event_is_shown_as_it_came(raw: bytes):
    assert shown(raw) == f"w1      │ {raw.decode()}\n"


def test_bytes_that_are_no_text_are_shown_too():
    assert shown(b"caf\xe9") == "w1      │ caf\ufffd\n"


def test_nothing_printed_moves_the_cursor():
    assert shown(b"\x1b[31mred\x1b[0m \x1b[2J\x07") == "w1      │ red \\x1b[2J\\x07\n"
    assert "\\x1b[2J" in shown(line("said", text="\x1b[2J"))


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch):
    printed, event = b"\x1b[31mred\x1b[0m", line("task_failed", level="error")

    assert "\x1b[31mred" in shown(printed, force_terminal=True, color_system="standard")
    assert "\x1b[1;31mtask_failed" in shown(event, force_terminal=True, color_system="standard")
    assert "\x1b" not in shown(printed, event)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "31m" not in shown(printed, event, force_terminal=True, color_system="standard")


def test_words_of_our_own_stay_together():
    file = io.StringIO()
    screen = Screen(Terminal(file=file))
    screen.add("w1", "w2-of-long-name")

    screen.say("one\ntwo")

    assert file.getvalue() == "dev             │ one\ndev             │ two\n"


def test_a_reader_that_left_is_noticed_once_and_for_all():
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    heard: list[str] = []
    screen = Screen(Terminal(file=Gone()))
    screen.on_deaf = lambda: heard.append("left")

    screen.say("hello")
    screen.say("is anybody there")

    assert screen.is_deaf
    assert heard == ["left"]


# --- sources ---


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path in ("app.py", "pkg/mod.py", ".venv/lib/x.py", "env/y.py", "node_modules/z.py", "__pycache__/app.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("one = 1\n")
    (tmp_path / "env/pyvenv.cfg").touch()
    (tmp_path / "notes.txt").touch()
    return tmp_path


def test_only_the_projects_own_code_is_looked_at(tree: Path):
    seen = look([tree, tree / "pkg"])

    assert {str(path.relative_to(tree)) for path in seen.stamps} == {"app.py", "pkg/mod.py"}
    assert seen.directories == {tree, tree / "pkg"}


async def test_changes_are_told_by_file_also_in_directories_that_are_new(tree: Path):
    async with aclosing(watch([tree], since=look([tree]))) as changes:
        (tree / "app.py").write_text("one = 22\n")
        assert await anext(changes) == [tree / "app.py"]

        (tree / "notes.txt").write_text("no code")
        (tree / "new").mkdir()
        (tree / "new/deep.py").touch()
        assert await anext(changes) == [tree / "new/deep.py"]

        (tree / "new/deep.py").write_text("two = 2\n")
        assert await anext(changes) == [tree / "new/deep.py"]

        (tree / "pkg/mod.py").unlink()
        assert await anext(changes) == [tree / "pkg/mod.py"]


def test_the_root_is_where_the_module_is_imported_from(tree: Path):
    (tree / "pkg/__init__.py").touch()

    assert find_root("app:app", tree) == tree
    assert find_root("pkg.mod:app", tree) == tree
    assert find_root("nowhere_at_all:app", tree) is None
    assert find_root(":app", tree) is None
    assert find_root("pytest", tree) == Path(pytest.__file__).parent
