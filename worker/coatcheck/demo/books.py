"""The asker and its books: a JSON-lines file with every question that was asked and every answer that came back.

The verdict is read from that file alone. What the workers, the broker or the database say does not count.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from coatcheck.broker import Body, Broker, Delivery, Outgoing, ReplyKind, Routing, make_request, parse_reply
from coatcheck.demo.peer import ORACLE, PRESS
from coatcheck.demo.survey import Question, Survey

PREFETCH = 1000


class AskerBooks:
    """Appends to the file, and counts for the display."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked = 0
        self._answered: set[str] = set()
        self._file = path.open("a", encoding="utf-8")

    @property
    def answered(self) -> int:
        return len(self._answered)

    def note_asked(self, number: str, question: Question) -> None:
        self._write({"event": "asked", "id": number, "question": asdict(question)})
        self.asked += 1

    def note_answered(self, number: str, *, reply_id: str, is_error: bool, body: Any) -> None:
        self._write({"event": "failed" if is_error else "answered", "id": number, "reply_id": reply_id, "body": body})
        self._answered.add(number)

    def note_killed(self, replica: str) -> None:
        self._write({"event": "killed", "id": replica})

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps({"at": round(time.time(), 3), **line}) + "\n")
        self._file.flush()


class Asker:
    """Asks a service questions and sees every message that comes back, a repeated one too.

    An application would use `coatcheck.worker.Client`, which hands each result out once.
    """

    def __init__(self, broker: Broker, books: AskerBooks, *, service: str, reply_to: str) -> None:
        self._broker = broker
        self._books = books
        self._service = service
        self._reply_to = reply_to

    @classmethod
    async def start(cls, broker: Broker, books: AskerBooks, *, service: str) -> Asker:
        asker = cls(broker, books, service=service, reply_to=await broker.declare_private())
        await broker.consume(asker._reply_to, asker._on_delivery, prefetch=PREFETCH)
        return asker

    async def ask(self, question: Question) -> bool:
        """Write the question down, then ask; tell whether the service has a queue.

        The question's identity makes a repeated request the same task.
        """
        number = str(uuid.uuid4())
        request = make_request(Body.of(asdict(question)), number, reply_to=self._reply_to, identity=number)
        self._books.note_asked(number, question)
        (routing,) = await self._broker.publish([Outgoing(self._service, request)])
        return routing is not Routing.NO_ROUTE

    def _on_delivery(self, delivery: Delivery) -> None:
        reply = parse_reply(delivery.message)
        is_error = reply.kind is ReplyKind.ERROR
        if reply.kind is not ReplyKind.PROGRESS:
            self._books.note_answered(
                reply.correlation_id or "",
                reply_id=str(delivery.message.headers.get("cc-id")),
                is_error=is_error,
                body=reply.problem if is_error else reply.body.decode(),
            )
        delivery.ack()


@dataclass(slots=True)
class DemoVerdict:
    """What the books say at the end."""

    asked: int = 0
    answered: int = 0
    lost: list[str] = field(default_factory=list)
    answered_twice: list[str] = field(default_factory=list)
    """Tasks with two different answers. The same answer again, under the same id, is only a repeated delivery."""
    answered_wrongly: list[str] = field(default_factory=list)
    repeated: int = 0
    finished_elsewhere: int = 0
    """By another replica than the one that began."""
    killed: str | None = None
    survivors: int = 0
    """Begun by the replica that was killed, answered after its death."""
    kept_by_progress: int = 0
    """Answered by a source that took longer than it may be silent, and said so on the way."""
    timeouts: int = 0
    """Answers that are partial because a source was silent for too long."""
    late: int = 0
    """Of those, answers that miss a source which does answer: this machine was too busy."""

    @property
    def complaints(self) -> list[str]:
        """Everything that should not be; empty if the demo showed what it promised."""
        wrong = {
            "lost": self.lost,
            "answered twice": self.answered_twice,
            "answered wrongly": self.answered_wrongly,
        }
        missing = {
            "nothing was asked": self.asked,
            "no replica was killed": self.killed,
            "no task was finished by another replica than the one that began it": self.finished_elsewhere,
            "no slow call was kept alive by progress": self.kept_by_progress,
            "no silent call timed out": self.timeouts,
        }
        return [
            *(f"{len(ids)} {what}, for example {ids[0]}" for what, ids in wrong.items() if ids),
            *(text for text, figure in missing.items() if not figure),
        ]


def judge(path: Path) -> DemoVerdict:
    """Read the books and compare every answer with its question."""
    questions: dict[str, Question] = {}
    answers: dict[str, list[dict[str, Any]]] = defaultdict(list)
    after_kill: set[str] = set()
    verdict = DemoVerdict()
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        match line["event"]:
            case "asked":
                questions[line["id"]] = msgspec.convert(line["question"], Question)
            case "killed":
                verdict.killed = line["id"]
            case _:
                if verdict.killed is not None and line["id"] not in answers:
                    after_kill.add(line["id"])
                answers[line["id"]].append(line)
    verdict.asked = len(questions)
    verdict.answered = len(questions.keys() & answers.keys())
    verdict.lost = [number for number in questions if number not in answers]
    for number, lines in answers.items():
        survey = _judge_task(verdict, number, question=questions.get(number), lines=lines)
        if survey is not None and number in after_kill:
            verdict.survivors += survey.began_on == verdict.killed
    return verdict


def _judge_task(
    verdict: DemoVerdict, number: str, *, question: Question | None, lines: list[dict[str, Any]]
) -> Survey | None:
    """Count one task; returns its answer if it is a right one."""
    first, *more = lines
    verdict.repeated += len(more)
    if any((line["reply_id"], line["body"]) != (first["reply_id"], first["body"]) for line in more):
        verdict.answered_twice.append(number)
    survey = None if first["event"] == "failed" else _find_survey(first["body"])
    if question is None or survey is None or not _fits(question, survey):
        verdict.answered_wrongly.append(number)
        return None
    verdict.finished_elsewhere += survey.began_on != survey.ended_on
    verdict.timeouts += bool(survey.missing)
    verdict.late += bool(set(survey.missing) - {ORACLE.name})
    slow = survey.found.get(PRESS.name)
    verdict.kept_by_progress += slow is not None and slow.took_s > question.patience_s
    return survey


def _find_survey(body: Any) -> Survey | None:
    try:
        return msgspec.convert(body, Survey)
    except msgspec.ValidationError:
        return None


def _fits(question: Question, survey: Survey) -> bool:
    """Tell whether an answer is about its question, and every source stands in it once: as found or as missing.

    A source that answers may be missing too, on a machine so busy that it was silent for too long. The silent one can
    only be missing.
    """
    return (
        survey.topic == question.topic
        and sorted([*survey.found, *survey.missing]) == sorted(question.sources)
        and ORACLE.name not in survey.found
        and all(answer.text.startswith(survey.topic) for answer in [*survey.found.values(), survey.again])
    )
