"""What is shown of a scene: on a terminal of any width, and in plain lines; and the story, told from log lines."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from coatcheck.cli.demo import Performance
from coatcheck.cli.processes.crew import Life
from coatcheck.demo.books import AskerBooks
from coatcheck.demo.scene import Chronicle, DemoScene, LogEvent, ReplicaState, read_events
from coatcheck.demo.stage import Caretaker
from coatcheck.demo.survey import DemoPlan
from coatcheck.demo.view import Display, make_console, make_display, render

TASK = "770626c4-0000-4000-8000-000000000000"
BEGAN_S = 1000.0


def happened(at_s: float, who: str, name: str, **facts: object) -> LogEvent:
    return LogEvent(who, BEGAN_S + at_s, name, {"task_id": TASK, **facts})


def claimed(at_s: float, who: str, peer: str, *, kind: str = "result", verdict: str = "recorded") -> LogEvent:
    return happened(at_s, who, "reply_claimed", peer=f"demo-1-{peer}", kind=kind, verdict=verdict)


BEFORE = [happened(1.0, "w2", "survey_began"), happened(1.1, "w2", "task_parked", checkpoint=2)]
AFTER = [
    claimed(1.5, "w3", "library"),
    claimed(1.6, "w3", "library", verdict="duplicate"),
    claimed(1.7, "w3", "press", kind="progress"),
    claimed(1.9, "w1", "oracle", kind="timeout", verdict="granted"),
    happened(1.9, "w1", "task_resumed"),
    happened(2.0, "w1", "task_parked", checkpoint=3),
    claimed(2.5, "w4", "library", verdict="granted"),
    happened(2.5, "w4", "task_resumed"),
    happened(2.6, "w4", "task_finished"),
]
STORY = [
    "begun on w2",
    "checkpointed on w2: from here on it is rows, in no RAM",
    "w2 is killed with -9",
    "library's reply claimed by w3",
    "oracle's timeout claimed by w1, the last one: resumed on w1",
    "checkpointed on w1",
    "library's reply claimed by w4, the last one: resumed on w4",
    "done on w4",
]


@pytest.fixture
def scene() -> DemoScene:
    """A run in its middle."""
    made = DemoScene(DemoPlan(300, 3, seed=1), Chronicle("demo-1-"), began_at_s=BEGAN_S, servers="embedded Postgres")
    for name in ("w1", "w2", "w3"):
        made.add_replica(name)
        made.note(LogEvent(name, BEGAN_S, "worker_started"))
    made.add_replica("w4", is_late=True)
    for event in BEFORE:
        made.note(event)
    made.replicas["w2"].change(ReplicaState.KILLED, BEGAN_S + 1.2)
    made.chronicle.begin(TASK, victim="w2", killed_at_s=BEGAN_S + 1.2)
    for event in AFTER:
        made.note(event)
    made.note(LogEvent("w4", BEGAN_S + 1.4, "worker_started"))
    made.note(LogEvent("library", BEGAN_S + 1.4, "question_came"))
    made.replicas["w1"].rss = 78_000_000
    made.asked, made.answered, made.now_s = 120, 75, BEGAN_S + 3
    return made


def shown(scene: DemoScene, *, width: int) -> list[str]:
    output = io.StringIO()
    Console(file=output, width=width, force_terminal=False, color_system=None).print(render(scene, "", width=width))
    return [line.rstrip() for line in output.getvalue().splitlines()]


def test_view_fits_a_small_terminal(scene):
    lines = shown(scene, width=80)

    assert len(lines) < 24
    assert lines[0].split() == ["coatcheck", "demo", "embedded", "Postgres", "3.0s"]
    table = {line.split()[0]: line.split()[1:] for line in lines if line.startswith(("w", "replica"))}
    assert table["replica"] == ["started", "parked", "resumed", "finished", "memory"]
    assert table["w1"] == ["working", "0", "1", "1", "0", "78", "MB"]
    assert table["w2"] == ["killed", "-9", "at", "1.2s", "1", "1", "0", "0", "-"]
    assert table["w4"] == ["joined", "at", "1.4s", "0", "0", "1", "1", "-"]
    assert any("75/300 answered, 45 waiting" in line and "━" in line for line in lines)
    assert any("library 0/1" in line and "oracle 0/0" in line for line in lines)


@pytest.fixture
def beginning() -> DemoScene:
    """A run that has not asked for anything yet."""
    made = DemoScene(DemoPlan(300, 3, seed=1), Chronicle("demo-1-"), began_at_s=BEGAN_S, now_s=BEGAN_S + 3)
    made.begin("Postgres")
    made.ready["Postgres"] = BEGAN_S + 1.5
    made.begin("tables")
    made.begin("replicas", "w1", "w2", "w3")
    for name in ("w1", "w2", "w3"):
        made.add_replica(name)
    made.note(LogEvent("w2", BEGAN_S + 2.5, "worker_started"))
    return made


def test_beginning_shows_what_is_being_started_and_counts_nothing(beginning):
    lines = [line.split(maxsplit=1) for line in shown(beginning, width=80) if line]

    rows = {words[0]: " ".join(words[1].split()) for words in lines}
    assert rows["Postgres"] == "ready at 1.5s"
    assert rows["tables"] == "starting"
    assert rows["replicas"] == "1 of 3 ready starting w1 w3"
    assert "replica" not in rows
    assert "peers" not in rows


@pytest.mark.parametrize("width", [24, 40, 80])
def test_beginning_fits_the_terminal(beginning, width):
    beginning.begin("peers", *(f"peer-with-a-long-name-{number}" for number in range(20)))

    lines = shown(beginning, width=width)

    assert max(len(line) for line in lines) <= width
    assert len(lines) < 24


def test_plain_lines_tell_once_what_is_ready(beginning):
    output = io.StringIO()
    display = Display(make_console(output, is_plain=True))

    display.show(beginning)
    for name in ("w1", "w3"):
        beginning.note(LogEvent(name, BEGAN_S + 2.8, "worker_started"))
    display.show(beginning)
    display.show(beginning)

    assert output.getvalue().splitlines() == ["   1.5s  ready: Postgres", "   2.8s  ready: replicas w1, w2, w3"]


def test_story_is_told_in_the_view(scene):
    lines = shown(scene, width=80)

    begin = lines.index("the story of one task  770626c4")
    assert [line.split(maxsplit=1)[1] for line in lines[begin + 1 :]] == STORY


@pytest.mark.parametrize("width", [24, 40, 50, 63, 64, 79, 200])
def test_no_line_is_wider_than_the_terminal_and_nothing_of_the_table_is_cut(scene, width):
    lines = shown(scene, width=width)

    assert max(len(line) for line in lines) <= width
    assert not any("…" in line for line in lines if line.startswith(("w", "replica")) and width >= 40)


def test_story_follows_a_task_that_the_victim_had_just_put_down():
    chronicle = Chronicle("demo-1-")
    other = "11111111-0000-4000-8000-000000000000"
    for event in [*BEFORE, LogEvent("w2", BEGAN_S + 2, "survey_began", {"task_id": other})]:
        chronicle.add(event)

    assert chronicle.find_survivor("w2") == TASK
    assert chronicle.find_survivor("w1") is None


def test_story_follows_any_unfinished_task_of_the_victim_if_there_is_no_better_one():
    chronicle = Chronicle("demo-1-")
    for event in [*BEFORE, *AFTER[:-1]]:
        chronicle.add(event)

    assert chronicle.find_survivor("w2") == TASK
    chronicle.add(AFTER[-1])
    assert chronicle.find_survivor("w2") is None


def test_plain_lines_tell_the_past_at_once_and_the_rest_as_it_happens(scene):
    output = io.StringIO()
    scene.chronicle.lines, later = scene.chronicle.lines[:3], scene.chronicle.lines[3:]
    display = Display(make_console(output, is_plain=True))

    display.say(scene, "w2 was killed")
    display.show(scene)
    scene.chronicle.lines += later
    display.show(scene)

    first, past, counts, *rest = output.getvalue().splitlines()
    assert first == "   3.0s  w2 was killed"
    assert past.startswith("   3.0s  task 770626c4: begun on w2 (1.0s) -> checkpointed on w2")
    assert past.endswith("-> w2 is killed with -9 (1.2s)")
    assert counts == "   3.0s  asked 120 of 300, answered 75, waiting 45"
    assert [line.partition(": ")[2] for line in rest] == STORY[3:]
    assert rest[-1].startswith("   2.6s")


def test_plain_console_writes_no_control_codes_whatever_the_environment_says(scene, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    output = io.StringIO()

    display = make_display(make_console(output, is_plain=False))
    display.say(scene, "[bold]text[/bold]")
    display.show(scene)

    assert type(display) is Display
    assert "[bold]text[/bold]" in output.getvalue()
    assert "\x1b" not in output.getvalue()


def test_events_are_read_from_logs_and_the_rest_is_for_people():
    def line(event: str) -> str:
        return json.dumps({"event": event, "timestamp": "2025-01-01T00:00:01Z", "task_id": TASK}) + "\n"

    log = line("first") + "Traceback: not ours\n" + "[]\n" + '{"event": "no time"}\n' + line("second")

    found = read_events("w1", log.encode())

    assert [(event.who, event.name, event.task_id) for event in found] == [
        ("w1", "first", TASK),
        ("w1", "second", TASK),
    ]
    assert found[0].at_s == 1735689601


async def test_logs_are_kept_whole_and_told_in_the_order_of_time(tmp_path: Path):
    told = io.StringIO()
    books = AskerBooks(tmp_path / "ledger.jsonl")
    display = make_display(make_console(told, is_plain=True))
    caretaker = cast("Caretaker", None)
    performance = Performance(DemoPlan(300, 3, seed=1), display, caretaker=caretaker, logs=tmp_path, books=books)
    lines = [f'{{"event": "worker_started", "timestamp": "2025-01-01T00:00:0{n}Z"}}\n'.encode() for n in (3, 1)]

    for name, line in zip(("w1", "w2"), lines, strict=True):
        await performance.on_output(cast("Life", SimpleNamespace(name=name)), line, descriptor=1)
    performance._look()
    books.close()

    assert list(performance.scene.ready) == ["w2", "w1"]
    assert [(tmp_path / f"{name}.log").read_bytes() for name in ("w1", "w2")] == lines
