"""The checker must be able to fail: a sound trial passes, and each kind of violation, doctored into it, is caught."""

from __future__ import annotations

import ast
import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.chaos import checker
from tests.chaos.checker import Evidence, check, f, figures
from tests.chaos.crew import ROOT

from coatcheck.broker import Message, Outgoing, connect
from coatcheck.store import chain
from coatcheck.store.rows import NewHistory

SERVICE = "chaos"
TASK, CALL, RUN = "5f0c6a55-0000-4000-8000-000000000001", "call-1", "run-1"
GONE = "5f0c6a55-0000-4000-8000-000000000002"


def sound() -> Evidence:
    """A small trial in which nothing is wrong: a task with steps and calls, and one each that ends otherwise."""
    result = json.dumps({"value": f(f(7 + 1) + 1) + 1, "tokens": ["one", "two", "three", "four", "five"]})
    cancelled = json.dumps({"code": "cancelled"})
    malformed = json.dumps({"code": "malformed_message"})
    story = _history(TASK, "accepted", "recorded", "opened", "finished")
    stands = {"entry_count": len(story), "head": story[-1]["hash"]}
    return Evidence(
        facts={"service": SERVICE, "dead": "chaos.dead", "queues": [], "lease_s": 3.0, "max_pickups": 5},
        clients=[
            *_asked("a", "steps", 7, TASK, reply="result", body=result),
            *_asked("a", "steps", 7, TASK, reply="result", body=result)[2:],
            *_asked("b", "plain", 3, "task-b", reply="result", body=json.dumps({"value": f(3), "tokens": []})),
            *_asked("c", "held", 1, "task-c", reply="error", body=cancelled),
            {"at": 1.0, "what": "cancel", "id": "c"},
            *_asked("d", "bad", 1, None, reply="error", body=malformed),
        ],
        peers=[
            {"at": 2.0, "what": "asked", "call": CALL, "id": CALL, "key": "k", "task": TASK},
            {"at": 2.1, "what": "answered", "call": CALL, "token": "two"},
            {"at": 3.0, "what": "asked", "call": "call-2", "id": "call-2", "key": "k", "task": TASK},
            {"at": 3.1, "what": "answered", "call": "call-2", "token": "four"},
            {"at": 3.2, "what": "asked", "call": None, "id": "send-1", "key": "k", "task": TASK},
            {"at": 3.3, "what": "strayed", "call": "stray"},
            {"at": 3.4, "what": "stray_taken", "call": "stray"},
        ],
        ledger=[
            {"at": 1.0, "what": "begin", "run": RUN, "task": TASK, "identity": "a"},
            {"at": 1.1, "what": "effect", "run": RUN, "task": TASK, "identity": "a", "key": "one", "token": "one"},
            {"at": 1.2, "what": "effect", "run": RUN, "task": TASK, "identity": "a", "key": "three", "token": "three"},
            {"at": 1.3, "what": "effect", "run": RUN, "task": TASK, "identity": "a", "key": "five", "token": "five"},
        ],
        events=[{"at": 1.0, "what": "died", "name": "worker-0", "role": "worker", "why": "killed", "pid": 1}],
        tasks=[_task(TASK, "a", "steps", "done", result) | stands, _task("task-c", None, None, "cancelled", cancelled)],
        calls=[
            _call(CALL, seq=2, value=json.dumps({"tokens": ["two"]})),
            _call("call-2", seq=4, value=json.dumps({"tokens": ["four"]})),
            _call("send-1", seq=6, value=None) | {"kind": "send", "peer": "chaos-sink"},
        ],
        journal=[_entry("one", 1), _entry("three", 3), _entry("five", 5)],
        queues={SERVICE: 0, "chaos.dead": 2},
        dead=[
            {"correlation_id": "stray", "reason": "unknown_call", "detail": ""},
            {"correlation_id": "d", "reason": "undecodable", "detail": ""},
        ],
        history=[*story, *_history(GONE, "accepted", "cancelled", "pruned")],
    )


def _asked(identity: str, kind: str, n: int, task: str | None, *, reply: str, body: str) -> list[dict[str, Any]]:
    content_type = "application/json" if reply == "result" else "application/problem+json"
    return [
        {"at": 1.0, "what": "send", "id": identity, "kind": kind, "n": n, "number": 0},
        {"at": 1.1, "what": "confirmed", "id": identity},
        {
            "at": 9.0,
            "what": "reply",
            "correlation_id": identity,
            "task": task,
            "kind": reply,
            "content_type": content_type,
            "body": body,
        },
    ]


def _task(task: str, identity: str | None, handler: str | None, state: str, value: str) -> dict[str, Any]:
    return {
        "id": task,
        "identity": identity,
        "handler": handler,
        "state": state,
        "epoch": 1,
        "checkpoint": 1,
        "seq": 6,
        "value": value,
        "finished_at": 8.0,
        "entry_count": 0,
        "head": None,
    }


def _history(task: str, *kinds: str) -> list[dict[str, Any]]:
    """A chain as the store makes it, in the words of the checker."""
    at = datetime(2026, 11, 18, 8, 30, 0, 123456, tzinfo=UTC)
    drafts = [NewHistory(kind, "ada" if kind == "accepted" else None, None, kind.encode()) for kind in kinds]
    entries, _ = chain.append(UUID(task), drafts, number=0, head=None, at=at, replica="worker-é", epoch=1)
    return [
        {
            "task_id": task,
            "at_us": int(at.timestamp()) * 1_000_000 + at.microsecond,
            **{name: getattr(one, name) for name in ("number", "kind", "replica", "epoch", "actor", "key")},
            **{name: getattr(one, name).hex() for name in ("data", "digest", "hash")},
        }
        for one in entries
    ]


def _rewrite(evidence: Evidence, *kinds: str) -> None:
    """Replace the history by a chain that holds, and that its row knows."""
    evidence.history[:] = _history(TASK, *kinds)
    evidence.tasks[0] |= {"entry_count": len(kinds), "head": evidence.history[-1]["hash"] if kinds else None}


def _call(call: str, *, seq: int, value: str | None) -> dict[str, Any]:
    about = {"id": call, "task_id": TASK, "key": call, "kind": "call", "peer": "chaos-quick", "state": "ok"}
    return about | {"seq": seq, "value": value, "is_forgotten": False}


def _entry(key: str, seq: int) -> dict[str, Any]:
    value = json.dumps({"value": 1, "tokens": [key]})
    about = {"task_id": TASK, "seq": seq, "key": key, "kind": "step", "is_ok": True, "is_forgotten": False}
    return about | {"value": value, "recorded_at": 1.5}


def _reply(evidence: Evidence, identity: str) -> dict[str, Any]:
    return next(it for it in evidence.clients if it["what"] == "reply" and it["correlation_id"] == identity)


# --- what is doctored, and which rule must see it ---

Doctor = Callable[[Evidence], Any]


def lose_the_reply(it: Evidence) -> None:
    it.clients.remove(_reply(it, "b"))


def answer_otherwise_the_second_time(it: Evidence) -> None:
    it.clients.append(_reply(it, "b") | {"body": json.dumps({"value": 4, "tokens": []})})


def answer_as_another_task(it: Evidence) -> None:
    it.clients.append(_reply(it, "b") | {"task": "task-x"})


def answer_wrongly(it: Evidence) -> None:
    _reply(it, "b")["body"] = json.dumps({"value": f(3) + 1, "tokens": []})


def answer_with_no_json(it: Evidence) -> None:
    _reply(it, "b")["body"] = "{"


def fail_an_innocent(it: Evidence) -> None:
    _reply(it, "b").update(kind="error", body=json.dumps({"code": "crashed_repeatedly"}))


def cancel_what_nobody_cancelled(it: Evidence) -> None:
    it.clients[:] = [line for line in it.clients if line["what"] != "cancel"]


def answer_what_nobody_asked(it: Evidence) -> None:
    it.clients.append(_reply(it, "b") | {"correlation_id": "z"})


def say_otherwise_in_the_row(it: Evidence) -> None:
    it.tasks[0]["value"] = json.dumps({"value": 1, "tokens": ["one", "two", "three", "four", "five"]})


def leave_the_row_failed(it: Evidence) -> None:
    it.tasks[0]["state"] = "failed"


def lose_the_row(it: Evidence) -> None:
    it.tasks.pop(0)


def give_one_place_to_two(it: Evidence) -> None:
    it.calls[1]["seq"] = 2


def go_beyond_the_count(it: Evidence) -> None:
    it.calls[1]["seq"] = 7


def record_a_key_twice(it: Evidence) -> None:
    it.calls[1]["key"] = it.calls[0]["key"]


def use_an_answer_twice(it: Evidence) -> None:
    for line in it.clients:
        if line["what"] == "reply":
            line["body"] = line["body"].replace('"four"', '"two"')


def use_what_was_not_recorded(it: Evidence) -> None:
    it.journal[2]["value"] = json.dumps({"value": 1, "tokens": ["one"]})
    it.tasks[0]["value"] = it.tasks[0]["value"].replace('"five"', '"one"')


def hold_a_foreign_answer(it: Evidence) -> None:
    it.peers[1]["call"] = "call-2"


def run_a_recorded_step_again(it: Evidence) -> None:
    begin = {"at": 9.0, "what": "begin", "run": "run-2", "task": TASK, "identity": "a"}
    it.ledger += [begin, begin | {"at": 9.1, "what": "effect", "key": "one", "token": "again"}]


def run_a_step_twice_in_one_run(it: Evidence) -> None:
    it.ledger.append(it.ledger[1] | {"token": "again"})


def record_what_never_ran(it: Evidence) -> None:
    it.ledger[:] = [line for line in it.ledger if line.get("key") != "three"]


def send_a_call_without_a_row(it: Evidence) -> None:
    it.peers.append(it.peers[0] | {"call": "call-9", "id": "call-9"})


def lose_a_send(it: Evidence) -> None:
    it.peers[:] = [line for line in it.peers if line.get("id") != "send-1"]


def leave_a_task_parked(it: Evidence) -> None:
    it.tasks.append(_task("task-p", "a", "steps", "parked", "null"))


def leave_a_call_open(it: Evidence) -> None:
    it.calls[0]["state"] = "open"


def run_a_task_for_nobody(it: Evidence) -> None:
    it.tasks.append(_task("task-n", "nobody", "steps", "done", "null"))


def find_a_task_without_waker(it: Evidence) -> None:
    it.events.append({"at": 2.0, "what": "without_waker", "tasks": [TASK]})


def have_a_sweeper_repair(it: Evidence) -> None:
    it.logged.append("sweeper-0.log: orphans_repaired")


def go_deaf(it: Evidence) -> None:
    it.logged.append("worker-0.log: broker_task_crashed")


def end_by_itself(it: Evidence) -> None:
    it.events.append({"at": 2.0, "what": "surprise", "name": "worker-0", "code": 1, "tail": "Traceback"})


def leave_a_message(it: Evidence) -> None:
    it.queues[SERVICE] = 1


def bury_what_was_good(it: Evidence) -> None:
    it.dead.append({"correlation_id": "a", "reason": "internal_error", "detail": ""})


def bury_for_another_reason(it: Evidence) -> None:
    it.dead[0]["reason"] = "internal_error"


def lose_a_bad_message(it: Evidence) -> None:
    it.dead.pop()


def lose_a_stray_answer(it: Evidence) -> None:
    it.dead.pop(0)


def alter_an_entry(it: Evidence) -> None:
    it.history[1]["replica"] = "worker-9"


def alter_the_data_of_an_entry(it: Evidence) -> None:
    it.history[1]["data"] = b"another".hex()


def move_the_time_of_an_entry(it: Evidence) -> None:
    it.history[1]["at_us"] += 1


def name_an_actor_where_none_was(it: Evidence) -> None:
    it.history[1]["actor"] = ""


def remove_an_entry(it: Evidence) -> None:
    it.history.pop(1)


def remove_the_first_entry(it: Evidence) -> None:
    it.history.pop(0)


def swap_two_entries(it: Evidence) -> None:
    it.history[1]["number"], it.history[2]["number"] = 3, 2


def insert_an_entry(it: Evidence) -> None:
    it.history.insert(2, it.history[1] | {"kind": "user:approval", "number": 3})
    it.history[3]["number"], it.history[4]["number"] = 4, 5
    it.tasks[0]["entry_count"] = 5


def cut_the_tail_off(it: Evidence) -> None:
    it.history.pop(3)


def remove_the_history(it: Evidence) -> None:
    it.history[:] = []


def take_the_history_of_another(it: Evidence) -> None:
    it.history[:] = [line | {"task_id": TASK} for line in _history(GONE, "accepted", "finished")]
    it.tasks[0] |= {"entry_count": 2, "head": it.history[-1]["hash"]}


def end_without_an_entry(it: Evidence) -> None:
    _rewrite(it, "accepted", "recorded")


def end_twice(it: Evidence) -> None:
    _rewrite(it, "accepted", "finished", "finished")


def go_on_after_the_end(it: Evidence) -> None:
    _rewrite(it, "accepted", "finished", "recorded")


def begin_twice(it: Evidence) -> None:
    _rewrite(it, "accepted", "accepted", "finished")


def begin_with_nothing(it: Evidence) -> None:
    _rewrite(it, "recorded", "finished")


def say_cancelled_of_what_is_done(it: Evidence) -> None:
    _rewrite(it, "accepted", "cancelled")


def keep_no_history(it: Evidence) -> None:
    it.history[:] = []
    it.tasks[0] |= {"entry_count": 0, "head": None}


@pytest.mark.parametrize(
    ("doctor", "rule"),
    [
        (lose_the_reply, "lost"),
        (answer_otherwise_the_second_time, "two_results"),
        (answer_as_another_task, "two_results"),
        (answer_wrongly, "wrong_value"),
        (answer_with_no_json, "wrong_value"),
        (fail_an_innocent, "wrong_value"),
        (cancel_what_nobody_cancelled, "wrong_value"),
        (answer_what_nobody_asked, "unasked_result"),
        (say_otherwise_in_the_row, "row_disagrees"),
        (leave_the_row_failed, "row_disagrees"),
        (lose_the_row, "row_disagrees"),
        (give_one_place_to_two, "applied_twice"),
        (go_beyond_the_count, "applied_twice"),
        (record_a_key_twice, "applied_twice"),
        (use_an_answer_twice, "applied_twice"),
        (use_what_was_not_recorded, "not_recorded"),
        (hold_a_foreign_answer, "foreign_answer"),
        (run_a_recorded_step_again, "step_again"),
        (run_a_step_twice_in_one_run, "step_again"),
        (record_what_never_ran, "effect_missing"),
        (send_a_call_without_a_row, "call_without_row"),
        (lose_a_send, "send_lost"),
        (leave_a_task_parked, "unfinished"),
        (leave_a_call_open, "unfinished"),
        (run_a_task_for_nobody, "unasked_task"),
        (find_a_task_without_waker, "no_waker"),
        (have_a_sweeper_repair, "no_waker"),
        (end_by_itself, "surprise"),
        (go_deaf, "surprise"),
        (leave_a_message, "queue_not_empty"),
        (bury_what_was_good, "dead_unexplained"),
        (bury_for_another_reason, "dead_unexplained"),
        (lose_a_bad_message, "not_buried"),
        (lose_a_stray_answer, "not_buried"),
        (alter_an_entry, "chain_broken"),
        (alter_the_data_of_an_entry, "chain_broken"),
        (move_the_time_of_an_entry, "chain_broken"),
        (name_an_actor_where_none_was, "chain_broken"),
        (remove_an_entry, "chain_broken"),
        (remove_the_first_entry, "chain_broken"),
        (swap_two_entries, "chain_broken"),
        (insert_an_entry, "chain_broken"),
        (cut_the_tail_off, "chain_broken"),
        (remove_the_history, "chain_broken"),
        (take_the_history_of_another, "chain_broken"),
        (end_without_an_entry, "story_wrong"),
        (end_twice, "story_wrong"),
        (go_on_after_the_end, "story_wrong"),
        (begin_twice, "story_wrong"),
        (begin_with_nothing, "story_wrong"),
        (say_cancelled_of_what_is_done, "story_wrong"),
        (keep_no_history, "story_wrong"),
        (lose_the_row, "story_wrong"),
    ],
)
def test_doctored_evidence_is_caught(doctor: Doctor, rule: str) -> None:
    evidence = sound()

    doctor(evidence)

    assert rule in {violation.rule for violation in check(evidence)}


def test_sound_evidence_passes() -> None:
    assert check(sound()) == []


def test_cancelled_result_needs_a_cancel() -> None:
    evidence = sound()
    _reply(evidence, "b").update(kind="error", body=json.dumps({"code": "cancelled"}))
    assert "wrong_value" in {violation.rule for violation in check(evidence)}

    evidence.clients.append({"at": 1.0, "what": "cancel", "id": "b"})

    assert check(Evidence(**vars(sound()) | {"clients": evidence.clients})) == []


def test_task_killed_as_often_as_it_may_be_is_rightly_failed_and_one_killed_less_often_is_not() -> None:
    evidence = sound()
    body = json.dumps({"code": "crashed_repeatedly"})
    for reply in evidence.clients[2:4]:
        reply.update(kind="error", body=body)
    evidence.tasks[0] |= {"state": "failed", "value": body, "epoch": 5}
    assert {violation.rule for violation in check(evidence)} == {"wrong_value"}

    evidence.tasks[0]["epoch"] = 6
    assert check(Evidence(**{name: vars(evidence)[name] for name in vars(sound())})) == []

    evidence.ledger.append({"at": 1.4, "what": "end", "run": RUN, "task": TASK, "identity": "a"})
    assert "wrong_value" in {
        violation.rule for violation in check(Evidence(**{k: vars(evidence)[k] for k in vars(sound())}))
    }


def test_step_of_a_run_from_before_the_record_was_cut_off_not_repeated() -> None:
    evidence = sound()
    begin = {"at": 1.4, "what": "begin", "run": "run-2", "task": TASK, "identity": "a"}
    evidence.ledger += [begin, begin | {"at": 2.0, "what": "effect", "key": "one", "token": "zombie"}]

    assert check(evidence) == []
    assert figures(evidence)["effects cut off before they were recorded"] == 1


def test_checker_imports_nothing_of_coatcheck() -> None:
    tree = ast.parse(Path(checker.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    loaded = "import sys, tests.chaos.checker; print([it for it in sys.modules if it.startswith('coatcheck')])"

    said = subprocess.run([sys.executable, "-c", loaded], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert not {name for name in imported if name.split(".")[0] in ("coatcheck", "tests", "examples")}
    assert said.strip() == "[]"


def test_checker_runs_alone_on_a_directory_and_says_what_is_wrong(tmp_path: Path) -> None:
    _write(sound(), tmp_path)
    command = [sys.executable, "-m", "tests.chaos.checker", str(tmp_path)]
    passed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    broken = sound()
    lose_the_reply(broken)
    _write(broken, tmp_path)
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert (passed.returncode, passed.stdout.splitlines()[-1]) == (0, "0 violations")
    assert failed.returncode == 1
    assert "lost: b: plain was accepted and never answered" in failed.stdout


async def test_queues_in_tables_are_read_as_they_are_also_what_somebody_holds(store_url: str, tmp_path: Path) -> None:
    broker_url = f"pg{store_url[store_url.index('://') :]}"
    queues = [SERVICE, f"{SERVICE}.replies", f"{SERVICE}.control", f"{SERVICE}.dead"]
    (tmp_path / "facts.json").write_text(json.dumps({"queues": queues, "dead": f"{SERVICE}.dead"}))
    buried = Message(b"?", correlation_id="stray", headers={"cc-reason": "unknown_call", "cc-detail": "why"})
    held = asyncio.Event()
    async with connect(broker_url) as broker:
        await broker.declare_service(SERVICE)
        await broker.publish([Outgoing(f"{SERVICE}.dead", buried), Outgoing(SERVICE, Message(b"x"))])
        await broker.consume(SERVICE, lambda _: held.set(), prefetch=1)
        await held.wait()

        await checker.collect(tmp_path, store=store_url, broker=broker_url)

    counted = json.loads((tmp_path / "queues.json").read_text())
    letters = [json.loads(line) for line in (tmp_path / "dead.jsonl").read_text().splitlines()]
    assert counted == dict.fromkeys(queues, 0) | {SERVICE: 1, f"{SERVICE}.dead": 1}
    assert letters == [{"correlation_id": "stray", "reason": "unknown_call", "detail": "why"}]


def test_peers_and_clients_on_rabbitmq_import_nothing_of_coatcheck() -> None:
    modules = "tests.chaos.peer, tests.chaos.client, tests.chaos.amqp_wires"
    loaded = f"import sys, {modules}; print([it for it in sys.modules if it.startswith('coatcheck')])"

    said = subprocess.run([sys.executable, "-c", loaded], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert said.strip() == "[]"


def _write(evidence: Evidence, directory: Path) -> None:
    books = {
        "client-0": evidence.clients,
        "peer-quick-0": evidence.peers,
        "ledger-1-1": evidence.ledger,
        "events": evidence.events,
        "rows-task": evidence.tasks,
        "rows-call": evidence.calls,
        "rows-journal": evidence.journal,
        "rows-history": evidence.history,
        "dead": evidence.dead,
    }
    for name, lines in books.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "facts.json").write_text(json.dumps(evidence.facts))
    (directory / "queues.json").write_text(json.dumps(evidence.queues))
