"""The books: what they say of a right run, and that nothing false passes."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from coatcheck.demo.books import AskerBooks, DemoVerdict, judge
from coatcheck.demo.peer import SourceAnswer
from coatcheck.demo.survey import DemoPlan, Question, Survey

QUESTION = Question("topic 1", ["library", "press", "oracle"], patience_s=2.5)
ANSWER = Survey(
    topic="topic 1",
    found={"library": SourceAnswer("topic 1: a", 0.5), "press": SourceAnswer("topic 1: b", 3.5, progress_count=8)},
    again=SourceAnswer("topic 1, according to 2 sources: c", 0.4),
    missing=["oracle"],
    began_on="w2",
    ended_on="w1",
)


@pytest.fixture
def books(tmp_path: Path):
    """One task was asked for, and the replica that began it was killed."""
    ledger = AskerBooks(tmp_path / "ledger.jsonl")
    ledger.note_asked("1", QUESTION)
    ledger.note_killed("w2")
    yield ledger
    ledger.close()


def answer(
    books: AskerBooks, number: str = "1", *, body: Any = None, reply_id: str = "a", is_error: bool = False
) -> None:
    books.note_answered(number, reply_id=reply_id, is_error=is_error, body=asdict(ANSWER) if body is None else body)


def complaints(books: AskerBooks) -> str:
    return "; ".join(judge(books.path).complaints)


def test_right_answer_leaves_nothing_to_complain_about(books):
    answer(books)

    assert judge(books.path) == DemoVerdict(
        asked=1, answered=1, finished_elsewhere=1, killed="w2", survivors=1, kept_by_progress=1, timeouts=1
    )
    assert complaints(books) == ""


def test_same_answer_again_is_a_repeated_delivery(books):
    answer(books)
    answer(books)

    verdict = judge(books.path)

    assert (verdict.answered, verdict.repeated, verdict.complaints) == (1, 1, [])


def test_task_without_an_answer_is_lost(books):
    books.note_asked("2", QUESTION)
    answer(books)

    assert complaints(books) == "1 lost, for example 2"


@pytest.mark.parametrize(
    "second", [{"reply_id": "b"}, {"body": asdict(replace(ANSWER, missing=[]))}, {"body": {}, "is_error": True}]
)
def test_two_different_answers_are_noticed(books, second):
    answer(books)
    answer(books, **second)

    assert complaints(books) == "1 answered twice, for example 1"


@pytest.mark.parametrize(
    "changed",
    [
        {"topic": "topic 2"},
        {"missing": []},
        {"missing": ["oracle", "library"]},
        {"missing": [], "found": {**ANSWER.found, "oracle": SourceAnswer("topic 1: o", 0.1)}},
        {"again": SourceAnswer("topic 2: c", 0.4)},
        {"found": {"library": SourceAnswer("topic 7: a", 0.5)}, "missing": ["press", "oracle"]},
    ],
)
def test_answer_that_does_not_fit_is_noticed(books, changed):
    answer(books, body=asdict(replace(ANSWER, **changed)))

    assert "1 answered wrongly, for example 1" in complaints(books)


@pytest.mark.parametrize("body", [None, [], {}, "done", {**asdict(ANSWER), "found": 1}])
def test_answer_that_is_none_is_noticed(books, body):
    books.note_answered("1", reply_id="a", is_error=False, body=body)

    assert "1 answered wrongly" in complaints(books)


def test_error_is_no_answer(books):
    answer(books, body={"code": "handler_failed"}, is_error=True)

    assert "1 answered wrongly" in complaints(books)


def test_answer_to_what_was_never_asked_is_noticed(books):
    answer(books)
    answer(books, "9")

    assert complaints(books) == "1 answered wrongly, for example 9"


def test_source_that_a_busy_machine_made_late_is_a_timeout_and_nothing_wrong(books):
    late = replace(ANSWER, found={"press": ANSWER.found["press"]}, missing=["library", "oracle"])
    answer(books, body=asdict(late))

    verdict = judge(books.path)

    assert (verdict.timeouts, verdict.late, verdict.complaints) == (1, 1, [])


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"ended_on": "w2"}, "no task was finished by another replica"),
        (
            {"found": {**ANSWER.found, "press": SourceAnswer("topic 1: b", 2.0)}},
            "no slow call was kept alive by progress",
        ),
    ],
)
def test_run_that_does_not_show_the_point_fails(books, changed, complaint):
    answer(books, body=asdict(replace(ANSWER, **changed)))

    assert complaint in complaints(books)


def test_books_without_a_kill_or_a_timeout_fail(tmp_path: Path):
    ledger = AskerBooks(tmp_path / "ledger.jsonl")
    question = Question("topic 1", ["library"])
    ledger.note_asked("1", question)
    survey = replace(ANSWER, found={"library": SourceAnswer("topic 1: a", 0.5)}, missing=[])
    ledger.note_answered("1", reply_id="a", is_error=False, body=asdict(survey))
    ledger.close()

    assert {"no replica was killed", "no silent call timed out"} <= set(judge(ledger.path).complaints)


def test_empty_books_fail(tmp_path: Path):
    (tmp_path / "ledger.jsonl").touch()

    assert "nothing was asked" in judge(tmp_path / "ledger.jsonl").complaints


def test_answer_before_the_kill_is_no_survivor(tmp_path: Path):
    ledger = AskerBooks(tmp_path / "ledger.jsonl")
    ledger.note_asked("1", QUESTION)
    answer(ledger)
    ledger.note_killed("w2")
    answer(ledger)  # delivered again
    ledger.close()

    assert judge(ledger.path).survivors == 0


def test_books_are_lines_of_json_that_others_can_read(books):
    answer(books)

    lines = [json.loads(line) for line in books.path.read_text().splitlines()]

    assert [line["event"] for line in lines] == ["asked", "killed", "answered"]
    assert lines[0]["question"] == asdict(QUESTION)


@pytest.mark.parametrize("count", [10, 11, 30, 300])
def test_plan_has_questions_for_every_source_and_is_the_same_for_the_same_seed(count: int):
    plan = DemoPlan(count, 3, seed=7)
    questions = list(plan.questions())

    assert len(questions) == count
    assert questions == list(DemoPlan(count, 3, seed=7).questions())
    assert sum("press" in question.sources for question in questions) == count // 10
    assert sum("oracle" in question.sources for question in questions) == count // 10
    assert plan.victim in plan.replicas
    assert plan.successor not in plan.replicas


def test_seeds_differ():
    assert len({DemoPlan(10, 3, seed).victim for seed in range(20)}) == 3
    assert list(DemoPlan(30, 3, 1).questions()) != list(DemoPlan(30, 3, 2).questions())
