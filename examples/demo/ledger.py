"""The requester's own books: a JSON-lines file with every question that was asked and every answer that came back.

The verdict is read from that file alone. What the workers, the broker or the database say does not count.
"""

import asyncio
import json
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Ledger:
    """Appends to the file, and counts for the display."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked = 0
        self._answered: set[str] = set()
        self._came_in = asyncio.Event()
        self._file = path.open("x", encoding="utf-8")

    @property
    def answered(self) -> int:
        return len(self._answered)

    def note_asked(self, number: str, question: dict[str, Any]) -> None:
        self._write({"event": "asked", "id": number, "question": question})
        self.asked += 1

    def note_answered(self, number: str, *, reply_id: str, is_error: bool, body: Any) -> None:
        self._write({"event": "failed" if is_error else "answered", "id": number, "reply_id": reply_id, "body": body})
        self._answered.add(number)
        self._came_in.set()

    def note_killed(self, replica: str) -> None:
        self._write({"event": "killed", "id": replica})

    async def wait_for_answers(self, count: int) -> None:
        """Return when at least `count` tasks are answered."""
        while self.answered < count:
            self._came_in.clear()
            await self._came_in.wait()

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps({"at": round(time.time(), 3), **line}) + "\n")
        self._file.flush()


@dataclass(slots=True)
class Verdict:
    """What the books say at the end."""

    asked: int = 0
    answered: int = 0
    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    """Tasks with two different answers. The same answer again, under the same id, is only a repeated delivery."""
    repeated: int = 0
    wrong: list[str] = field(default_factory=list)
    moved: int = 0
    """Finished by another replica than the one that began."""
    survived: int = 0
    """Begun by the replica that was killed, answered after its death."""
    partial: int = 0
    partial_expected: int = 0

    @property
    def complaints(self) -> list[str]:
        """Everything that should not be; empty if the demo showed what it promised."""
        found = [
            f"{len(ids)} {what}, for example {ids[0]}"
            for what, ids in (("lost", self.lost), ("answered twice", self.twice), ("answered wrongly", self.wrong))
            if ids
        ]
        if not self.moved:
            found.append("no task was finished by another replica than the one that began it")
        if self.partial != self.partial_expected:
            found.append(f"{self.partial} partial answers, expected {self.partial_expected}")
        return found


def judge(path: Path, *, silent: str) -> Verdict:
    """Read the books and compare every answer with its question."""
    questions: dict[str, dict[str, Any]] = {}
    answers: dict[str, list[dict[str, Any]]] = defaultdict(list)
    killed: str | None = None
    verdict = Verdict()
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        match line["event"]:
            case "asked":
                questions[line["id"]] = line["question"]
            case "killed":
                killed = line["id"]
            case _:
                answers[line["id"]].append(line)
                verdict.survived += line["event"] == "answered" and line["body"]["began_on"] == killed
    verdict.asked, verdict.answered = len(questions), len(answers)
    verdict.lost = [number for number in questions if number not in answers]
    for number, lines in answers.items():
        judge_task(verdict, number, question=questions.get(number), lines=lines, silent=silent)
    verdict.partial_expected = sum(silent in question["sources"] for question in questions.values())
    return verdict


def judge_task(
    verdict: Verdict, number: str, *, question: dict[str, Any] | None, lines: list[dict[str, Any]], silent: str
) -> None:
    first, *more = lines
    verdict.repeated += len(more)
    if any((line["reply_id"], line["body"]) != (first["reply_id"], first["body"]) for line in more):
        verdict.twice.append(number)
    if question is None or first["event"] == "failed" or not fits(question, first["body"], silent=silent):
        verdict.wrong.append(number)
        return
    body = first["body"]
    verdict.moved += body["began_on"] != body["ended_on"]
    verdict.partial += bool(body["missing"])


def fits(question: dict[str, Any], body: dict[str, Any], *, silent: str) -> bool:
    """Tell whether an answer has everything its question asked for, except what the silent source kept to itself."""
    topic, sources = question["topic"], question["sources"]
    heard = [source for source in sources if source != silent]
    return bool(
        body["topic"] == topic
        and set(body["found"]) == {*heard, "again"}
        and all(found[0].startswith(topic) for found in body["found"].values())
        and body["missing"] == [source for source in sources if source == silent]
    )
