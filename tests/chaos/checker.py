"""Reads the evidence of a trial and says what is wrong with it. It imports nothing of Coatcheck.

    python -m tests.chaos.checker DIRECTORY [--store URL --broker URL]

With the addresses it reads the final rows and queues first and keeps them beside the books, so that later it can be run
on the directory alone. It exits with 1 if anything is wrong, and says which task and by what evidence.

    facts.json            names of queues, settings, addresses are not in it
    client-*.jsonl        send (before each), confirmed, again, cancel, reply
    peer-*.jsonl          asked, answered, failed, strayed
    ledger-*.jsonl        begin and end of every run of a handler, every effect of a step
    events.jsonl          what the trial did to its processes, and unfinished tasks it found without a waker
    rows-*.jsonl          task, call, journal, history: the final rows
    queues.json, dead.jsonl
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import struct
import sys
import uuid
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pika

Line = dict[str, Any]

# --- what is right ---

MODULUS = 100_003
COMPLAINTS = ("orphans_repaired", "broker_task_crashed", "sweep_surprised")
KINDS_WITHOUT_A_ROW = ("plain", "bad")
ENDS = ("done", "failed", "cancelled")


def f(n: int) -> int:
    return (n * n + 7) % MODULUS


VALUES: dict[str, Callable[[int], int]] = {
    "plain": f,
    "deduplicated": f,
    "fan1": f,
    "fan4": lambda n: f(n) + f(n + 1) + f(n + 2) + f(n + 3),
    "first": lambda n: f(n) + f(n + 1),
    "quorum": lambda n: 2 * f(n),
    "branches": lambda n: f(f(n)) + f(n),
    "beside": lambda n: n + 1 + 2 * f(n),
    "steps": lambda n: f(f(n + 1) + 1) + 1,
    "flaky": lambda n: n + 1 + f(n) + 3,
    "retried": f,
    "progressing": f,
    "sleepy": f,
    "silent": lambda n: -f(n),
    "refused": lambda n: -n,
    "long": lambda n: f(n + 1),
    "calling_itself": lambda n: f(f(n + 1) + 1) + 1 if n % 2 else f(n),
    "sending": f,
}
ERRORS = {"failed": "handler_failed", "killer": "crashed_repeatedly", "bad": "malformed_message"}


@dataclass(frozen=True)
class Violation:
    """One thing that must not be."""

    rule: str
    task: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.task}: {self.text}"


# --- evidence ---


@dataclass
class Evidence:
    """Everything that was written down, by whom."""

    facts: Line
    clients: list[Line]
    peers: list[Line]
    ledger: list[Line]
    events: list[Line]
    tasks: list[Line]
    calls: list[Line]
    journal: list[Line]
    queues: dict[str, int]
    dead: list[Line]
    logged: list[str] = field(default_factory=list)
    history: list[Line] = field(default_factory=list)

    @classmethod
    def load(cls, directory: Path) -> Evidence:
        return cls(
            facts=json.loads((directory / "facts.json").read_text()),
            clients=_lines(directory, "client-*.jsonl"),
            peers=_lines(directory, "peer-*.jsonl"),
            ledger=_lines(directory, "ledger-*.jsonl"),
            events=_lines(directory, "events.jsonl"),
            tasks=_lines(directory, "rows-task.jsonl"),
            calls=_lines(directory, "rows-call.jsonl"),
            journal=_lines(directory, "rows-journal.jsonl"),
            queues=json.loads((directory / "queues.json").read_text()),
            dead=_lines(directory, "dead.jsonl"),
            logged=_complaints(directory),
            history=_lines(directory, "rows-history.jsonl"),
        )

    @cached_property
    def sends(self) -> dict[str, Line]:
        return {line["id"]: line for line in self.clients if line["what"] == "send"}

    @cached_property
    def confirmed(self) -> set[str]:
        return {line["id"] for line in self.clients if line["what"] == "confirmed"}

    @cached_property
    def cancelled(self) -> set[str]:
        return {line["id"] for line in self.clients if line["what"] == "cancel"}

    @cached_property
    def replies(self) -> dict[str, list[Line]]:
        found = defaultdict(list)
        for line in self.clients:
            if line["what"] == "reply":
                found[line["correlation_id"]].append(line)
        return found

    @cached_property
    def task_by_identity(self) -> dict[str, Line]:
        return {task["identity"]: task for task in self.tasks if task["identity"]}

    @cached_property
    def task_by_id(self) -> dict[str, Line]:
        return {task["id"]: task for task in self.tasks}

    @cached_property
    def identity_by_task(self) -> dict[str, str]:
        known = {task["id"]: task["identity"] or task["id"] for task in self.tasks}
        return known | {line["task"]: line["identity"] for line in self.ledger if line.get("identity")}

    @cached_property
    def call_by_id(self) -> dict[str, Line]:
        return {call["id"]: call for call in self.calls}

    @cached_property
    def calls_of(self) -> dict[str, list[Line]]:
        return _grouped(self.calls, "task_id")

    @cached_property
    def journal_of(self) -> dict[str, list[Line]]:
        return _grouped(self.journal, "task_id")

    @cached_property
    def history_of(self) -> dict[str, list[Line]]:
        return _grouped(sorted(self.history, key=lambda line: line["number"]), "task_id")

    @cached_property
    def answers(self) -> dict[str, set[str]]:
        """The tokens of every answer a peer gave, by call."""
        found = defaultdict(set)
        for line in self.peers:
            if line["what"] == "answered":
                found[line["call"]].add(line["token"])
        return found

    @cached_property
    def effects(self) -> list[Line]:
        return [line for line in self.ledger if line["what"] == "effect"]

    @cached_property
    def last_cut_off(self) -> set[str]:
        """Tasks whose last run began and never left: its process was killed under it."""
        ended = {line["run"] for line in self.ledger if line["what"] == "end"}
        last: dict[str, Line] = {}
        for line in self.ledger:
            if line["what"] == "begin" and line["at"] >= last.get(line["task"], line)["at"]:
                last[line["task"]] = line
        return {task for task, line in last.items() if line["run"] not in ended}

    def name(self, task_id: str) -> str:
        return self.identity_by_task.get(task_id, task_id)


def _grouped(lines: Iterable[Line], by: str) -> dict[str, list[Line]]:
    found = defaultdict(list)
    for line in lines:
        found[line[by]].append(line)
    return found


def _lines(directory: Path, pattern: str) -> list[Line]:
    found: list[Line] = []
    for path in sorted(directory.glob(pattern)):
        for line in path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue  # its writer was killed in the middle of it
    return found


def _complaints(directory: Path) -> list[str]:
    """What processes logged and never should: a task that nothing would have moved, a loop of theirs that ended."""
    return [
        f"{path.name}: {line}"
        for path in sorted(directory.glob("*.log"))
        for line in path.read_text(errors="replace").splitlines()
        if any(event in line for event in COMPLAINTS)
    ]


# --- rules ---


def check_results(evidence: Evidence) -> Iterator[Violation]:
    """One distinct result for each accepted request, and the right one."""
    for identity, send in evidence.sends.items():
        replies = evidence.replies.get(identity, [])
        if not replies:
            if identity in evidence.confirmed:
                yield Violation("lost", identity, f"{send['kind']} was accepted and never answered")
            continue
        distinct = {(it["task"], it["kind"], it["content_type"], it["body"]) for it in replies}
        if len(distinct) > 1:
            yield Violation("two_results", identity, f"{send['kind']} has {len(distinct)} results: {sorted(distinct)}")
        for task, kind, _, body in sorted(distinct, key=str):
            yield from _check_result(evidence, send, task=task, kind=kind, body=body)
    for identity in evidence.replies.keys() - evidence.sends.keys():
        yield Violation("unasked_result", identity, "a reply to a request that nobody sent")


def _check_result(evidence: Evidence, send: Line, *, task: str, kind: str, body: str) -> Iterator[Violation]:
    identity, wanted = send["id"], send["kind"]
    try:
        found = json.loads(body)
    except json.JSONDecodeError:
        yield Violation("wrong_value", identity, f"{wanted} was answered with what is not JSON: {body[:200]}")
        return
    if kind == "error":
        code = found.get("code")
        may_be_cancelled = identity in evidence.cancelled and code == "cancelled"
        if code != ERRORS.get(wanted) and not may_be_cancelled and not _was_killed_each_time(evidence, task):
            yield Violation("wrong_value", identity, f"{wanted} must not fail with {code}: {body[:300]}")
        return
    value = VALUES[wanted](send["n"]) if wanted in VALUES else None
    if not isinstance(found, dict) or found.get("value") != value:
        yield Violation("wrong_value", identity, f"{wanted}({send['n']}) is {value}, not {body[:200]}")
    elif wanted == "refused" and found.get("code") != "no_route":
        yield Violation("wrong_value", identity, f"a call to no queue failed with {found.get('code')}, not no_route")
    else:
        yield from _check_origin(evidence, identity, task, found["tokens"])


def _was_killed_each_time(evidence: Evidence, task: str) -> bool:
    """Whether a task that kills nobody was rightly failed as if it did: its process died under it as often as it may,
    the last time while it ran alone. So was one that called such a task, of its own service.
    """
    row = evidence.task_by_id.get(task, {"epoch": 0})
    if task in evidence.last_cut_off and row["epoch"] > evidence.facts["max_pickups"]:
        return True
    inner = [evidence.task_by_identity.get(call["id"]) for call in evidence.calls_of.get(task, ())]
    return any(it is not None and it["state"] == "failed" and _was_killed_each_time(evidence, it["id"]) for it in inner)


def _check_origin(evidence: Evidence, identity: str, task: str, tokens: list[str]) -> Iterator[Violation]:
    """What went into a result is what the rows recorded, each once."""
    if len(set(tokens)) != len(tokens):
        yield Violation("applied_twice", identity, f"one answer went into the result twice: {tokens}")
    values = [row["value"] or "" for row in [*evidence.calls_of.get(task, ()), *evidence.journal_of.get(task, ())]]
    row = evidence.task_by_identity.get(identity)
    recorded = "\n".join([*values, (row or {}).get("value") or ""])
    for token in tokens:
        if token not in recorded:
            yield Violation("not_recorded", identity, f"the result holds {token}, which no row of task {task} recorded")


def check_rows_agree(evidence: Evidence) -> Iterator[Violation]:
    """What a client was told is what its task's row says."""
    for identity, replies in evidence.replies.items():
        # A task that was cancelled before it began has a row that knows no identity.
        row = evidence.task_by_identity.get(identity) or evidence.task_by_id.get(replies[0]["task"])
        send = evidence.sends.get(identity)
        if row is None:
            if send is not None and send["kind"] not in KINDS_WITHOUT_A_ROW:
                yield Violation("row_disagrees", identity, f"{send['kind']} was answered and has no row")
            continue
        for reply in replies:
            is_error = reply["kind"] == "error"
            if reply["task"] != row["id"] and reply["task"] is not None:
                yield Violation("row_disagrees", identity, f"answered as task {reply['task']}, its row is {row['id']}")
            elif is_error is not (row["state"] in ("failed", "cancelled")):
                yield Violation("row_disagrees", identity, f"answered with {reply['kind']}, its row is {row['state']}")
            elif not is_error and json.loads(reply["body"]) != _parsed(row["value"]):
                yield Violation("row_disagrees", identity, f"answered with {reply['body']}, its row has {row['value']}")


def check_sequences(evidence: Evidence) -> Iterator[Violation]:
    """Each reply is applied at most once: every entry of a task has a place of its own in its order."""
    for task in evidence.tasks:
        entries = [*evidence.journal_of.get(task["id"], ()), *evidence.calls_of.get(task["id"], ())]
        places = Counter(entry["seq"] for entry in entries if entry["seq"] is not None)
        twice = sorted(place for place, count in places.items() if count > 1)
        if twice:
            yield Violation("applied_twice", evidence.name(task["id"]), f"places {twice} are taken twice")
        beyond = sorted(place for place in places if not 1 <= place <= task["seq"])
        if beyond:
            yield Violation("applied_twice", evidence.name(task["id"]), f"places {beyond} of {task['seq']}")
        keys = Counter(entry["key"] for entry in entries if not entry["is_forgotten"])
        again = sorted(key for key, count in keys.items() if count > 1)
        if again:
            yield Violation("applied_twice", evidence.name(task["id"]), f"recorded twice under one key: {again}")


def check_answers(evidence: Evidence) -> Iterator[Violation]:
    """A call that succeeded holds an answer that a peer gave to that very call."""
    for call in evidence.calls:
        if call["kind"] != "call" or call["state"] != "ok" or call["peer"] == evidence.facts["service"]:
            continue
        given = evidence.answers.get(call["id"], set())
        if not any(token in (call["value"] or "") for token in given):
            text = f"call {call['id']} to {call['peer']} holds {call['value']}, its peer gave {sorted(given)}"
            yield Violation("foreign_answer", evidence.name(call["task_id"]), text)


def check_steps(evidence: Evidence) -> Iterator[Violation]:
    """A step that is recorded is never run again, and what is recorded was run.

    A run that was granted before the record was made may not know of it (a frozen process, one that lost its
    connections): what it does was cut off, not recorded. A run begins within its lease, or not at all. So one that
    began more than a lease after the record has no excuse.
    """
    recorded = {(row["task_id"], row["key"]): row for row in evidence.journal if row["kind"] == "step"}
    begun = {line["run"]: line["at"] for line in evidence.ledger if line["what"] == "begin"}
    in_one_run: Counter[tuple[str, str]] = Counter()
    tokens = set()
    for effect in evidence.effects:
        tokens.add(effect["token"])
        in_one_run[effect["run"], effect["key"]] += 1
        if in_one_run[effect["run"], effect["key"]] == 2:
            yield Violation("step_again", evidence.name(effect["task"]), f"{effect['key']} ran twice in one run")
        row = recorded.get((effect["task"], effect["key"]))
        late_s = begun[effect["run"]] - row["recorded_at"] if row is not None else 0.0
        if row is not None and late_s > evidence.facts["lease_s"] and effect["token"] not in row["value"]:
            text = f"{effect['key']} ran again, in a run that began {late_s:.3f} s after it was recorded"
            yield Violation("step_again", evidence.name(effect["task"]), text)
    for (task, key), row in recorded.items():
        value = _parsed(row["value"])
        if row["is_ok"] and not (isinstance(value, dict) and set(value.get("tokens", ())) <= tokens):
            yield Violation("effect_missing", evidence.name(task), f"{key} is recorded, and no effect is in the ledger")


def check_wire(evidence: Evidence) -> Iterator[Violation]:
    """No call leaves before its row is committed, and what was recorded to be sent one way arrives."""
    arrived = set()
    for line in evidence.peers:
        if line["what"] != "asked":
            continue
        arrived.add(line["id"])
        call = evidence.call_by_id.get(line["id"])
        if call is None or line["call"] not in (line["id"], None):
            task = evidence.name(line["task"])
            yield Violation("call_without_row", task, f"a peer was asked {line['id']}, and no row knows that call")
    for call in evidence.calls:
        is_over = call["kind"] == "send" and call["state"] == "ok"
        if is_over and call["id"] not in arrived:
            yield Violation("send_lost", evidence.name(call["task_id"]), f"{call['id']} never came to {call['peer']}")


def check_ended(evidence: Evidence) -> Iterator[Violation]:
    """Nothing is unfinished, and no task was run for nobody."""
    for task in evidence.tasks:
        name = evidence.name(task["id"])
        if task["state"] not in ENDS:
            yield Violation("unfinished", name, f"{task['handler']} is {task['state']}, epoch {task['epoch']}")
        asked = task["identity"] in evidence.sends or task["identity"] in evidence.call_by_id
        if not asked and not (task["identity"] is None and task["state"] == "cancelled"):
            yield Violation("unasked_task", name, f"{task['handler']} has a row, and nobody asked for it")
    for call in evidence.calls:
        if call["state"] == "open":
            text = f"call {call['id']} to {call['peer']} is open"
            yield Violation("unfinished", evidence.name(call["task_id"]), text)


def check_processes(evidence: Evidence) -> Iterator[Violation]:
    """No unfinished task was ever without a waker, and no process ended by a fault of its own."""
    for event in evidence.events:
        if event["what"] == "without_waker":
            for task_id in event["tasks"]:
                yield Violation("no_waker", evidence.name(task_id), f"nothing would have moved it at {event['at']:.3f}")
        if event["what"] == "surprise":
            yield Violation("surprise", event["name"], f"ended by itself with {event['code']}: {event['tail'][-500:]}")
    for line in evidence.logged:
        rule = "no_waker" if COMPLAINTS[0] in line else "surprise"
        yield Violation(rule, line.partition(":")[0], f"it logged: {line[:300]}")


def check_queues(evidence: Evidence) -> Iterator[Violation]:
    """Queues are empty, and each dead letter is one that somebody meant to be one."""
    for queue, count in evidence.queues.items():
        if count and queue != evidence.facts["dead"]:
            yield Violation("queue_not_empty", queue, f"{count} messages are left")
    strays = {line["call"] for line in evidence.peers if line["what"] == "strayed"}
    bad = {identity for identity, send in evidence.sends.items() if send["kind"] == "bad"}
    buried = set()
    for letter in evidence.dead:
        subject, reason = letter["correlation_id"], letter["reason"]
        buried.add(subject)
        is_explained = (subject in strays and reason == "unknown_call") or (subject in bad and reason == "undecodable")
        if not is_explained:
            yield Violation("dead_unexplained", str(subject), f"a dead letter says {reason}: {letter['detail']}")
    taken = {line["call"] for line in evidence.peers if line["what"] == "stray_taken"} | (bad & evidence.confirmed)
    for subject in sorted(taken - buried):
        yield Violation("not_buried", subject, "a bad message was taken and is not in the dead letters")


def check_chains(evidence: Evidence) -> Iterator[Violation]:
    """Each history is a chain in which no entry is altered, missing, out of order or added; its task's row says how
    many there are and with which hash they end.
    """
    for task_id, entries in evidence.history_of.items():
        previous = bytes(32)
        for number, entry in enumerate(entries, start=1):
            data = None if entry["data"] is None else bytes.fromhex(entry["data"])
            is_whole = data is None or hashlib.sha256(data).hexdigest() == entry["digest"]
            previous = _hash_of(entry, previous)
            if entry["number"] != number or not is_whole or previous.hex() != entry["hash"]:
                text = f"entry {number} ({entry['kind']}) does not follow from the one before it"
                yield Violation("chain_broken", evidence.name(task_id), text)
                break
    for task in evidence.tasks:
        entries = evidence.history_of.get(task["id"], [])
        stands = (len(entries), entries[-1]["hash"] if entries else None)
        if stands != (task["entry_count"], task["head"]):
            text = f"its row knows {task['entry_count']} entries up to {task['head']}, there are {stands[0]}"
            yield Violation("chain_broken", evidence.name(task["id"]), f"{text} up to {stands[1]}")


def _hash_of(entry: Line, previous: bytes) -> bytes:
    """SHA-256 over all fields, each after its length in four bytes; a field that is missing has the length 2^32 - 1."""
    told = (entry[name] for name in ("number", "kind", "at_us", "replica", "epoch", "actor", "key"))
    texts = [None if it is None else str(it).encode("utf-8", "surrogatepass") for it in told]
    task_id, digest = uuid.UUID(entry["task_id"]).bytes, bytes.fromhex(entry["digest"])
    fields = [b"coatcheck.history.1", task_id, *texts, digest, previous]
    parts = (b"\xff" * 4 if it is None else struct.pack(">I", len(it)) + it for it in fields)
    return hashlib.sha256(b"".join(parts)).digest()


def check_stories(evidence: Evidence) -> Iterator[Violation]:
    """A history begins once and ends once: `accepted` is first, how the task ended is last. `pruned` follows where
    the row is gone.

    All handlers of the trial keep one. A task that was cancelled before its request came has no handler.
    """
    kept = {task["id"] for task in evidence.tasks if task["identity"] is not None and task["state"] in ENDS}
    for task_id in sorted(kept | evidence.history_of.keys()):
        kinds = [entry["kind"] for entry in evidence.history_of.get(task_id, ())]
        if task_id in evidence.task_by_id and task_id not in kept:
            continue  # it has not ended, which is a violation of its own
        task = evidence.task_by_id.get(task_id)
        story = kinds[:-1] if task is None and kinds[-1:] == ["pruned"] else kinds
        begins = [number for number, kind in enumerate(story, start=1) if kind == "accepted"]
        ends = [number for number, kind in enumerate(story, start=1) if kind in ("finished", "cancelled")]
        if begins != [1] or ends != [len(story)] or (task is None and story == kinds):
            text = f"its history begins at {begins} and ends at {ends}: {' '.join(kinds)}"
            yield Violation("story_wrong", evidence.name(task_id), text)
        if task is not None and ends and (task["state"] == "cancelled") != (story[ends[-1] - 1] == "cancelled"):
            yield Violation("story_wrong", evidence.name(task_id), f"{task['state']}, and its history says {story[-1]}")


RULES = (
    check_results,
    check_rows_agree,
    check_sequences,
    check_answers,
    check_steps,
    check_wire,
    check_ended,
    check_processes,
    check_queues,
    check_chains,
    check_stories,
)


def check(evidence: Evidence) -> list[Violation]:
    """Everything that is wrong."""
    return [violation for rule in RULES for violation in rule(evidence)]


def figures(evidence: Evidence) -> dict[str, int]:
    """What was looked at: a trial in which nothing happened proves nothing."""
    recorded = {(row["task_id"], row["key"]): row for row in evidence.journal if row["kind"] == "step"}
    superfluous = [
        effect
        for effect in evidence.effects
        if (row := recorded.get((effect["task"], effect["key"]))) is not None and effect["token"] not in row["value"]
    ]
    return {
        "requests": len(evidence.sends),
        "requests sent more than once": sum(line["what"] == "again" for line in evidence.clients),
        "cancels": sum(line["what"] == "cancel" for line in evidence.clients),
        "results": len(evidence.replies),
        "results delivered again, unchanged": sum(len(it) - 1 for it in evidence.replies.values()),
        "task rows": len(evidence.tasks),
        "call rows": len(evidence.calls),
        "histories": len(evidence.history_of),
        "entries of histories": len(evidence.history),
        "questions to peers": sum(line["what"] == "asked" for line in evidence.peers),
        "answers of peers": sum(line["what"] in ("answered", "failed") for line in evidence.peers),
        "runs of handlers": sum(line["what"] == "begin" for line in evidence.ledger),
        "step effects": len(evidence.effects),
        "effects cut off before they were recorded": len(superfluous),
        "tasks failed because their process was killed each time": sum(
            task["state"] == "failed" and task["id"] in evidence.last_cut_off for task in evidence.tasks
        ),
        "dead letters, all explained": len(evidence.dead),
    }


# --- reading rows and queues ---

ROWS = {
    "task": """SELECT id::text, identity, handler, state, epoch, checkpoint, seq, value,
                      entry_count, encode(head, 'hex') AS head,
                      extract(epoch FROM finished_at)::float8 AS finished_at FROM coatcheck.task""",
    "call": """SELECT id::text, task_id::text, key, kind, peer, state, seq, value, is_forgotten FROM coatcheck.call""",
    "journal": """SELECT task_id::text, seq, key, kind, is_ok, is_forgotten, value,
                         extract(epoch FROM recorded_at)::float8 AS recorded_at FROM coatcheck.journal""",
    "history": """SELECT task_id::text, number, kind, (extract(epoch FROM at) * 1000000)::bigint AS at_us, replica,
                         epoch, actor, key, encode(data, 'hex') AS data, encode(digest, 'hex') AS digest,
                         encode(hash, 'hex') AS hash FROM coatcheck.history""",
}
WITHOUT_WAKER = """
    SELECT t.id::text FROM coatcheck.task t
     WHERE t.state = 'parked'
       AND NOT EXISTS (SELECT FROM coatcheck.call c WHERE c.task_id = t.id AND c.id = ANY(t.wait_calls)
                                                      AND c.state = 'open' AND c.due_at IS NOT NULL)
        OR t.state IN ('running', 'retrying', 'held') AND t.due_at IS NULL
"""


async def collect(directory: Path, *, store: str, broker: str) -> None:
    """Write the final rows and queues down beside the books."""
    connection = await asyncpg.connect(store)
    try:
        for name, query in ROWS.items():
            with (directory / f"rows-{name}.jsonl").open("w") as file:
                for row in await connection.fetch(query):
                    file.write(json.dumps(dict(row) | {"value": _readable(row.get("value"))}) + "\n")
    finally:
        await connection.close()
    facts = json.loads((directory / "facts.json").read_text())
    if broker.startswith("pg:"):
        queues, dead = await _read_tables(broker, facts)
    else:
        queues, dead = await asyncio.to_thread(_read_queues, broker, facts)
    (directory / "queues.json").write_text(json.dumps(queues))
    (directory / "dead.jsonl").write_text("".join(json.dumps(letter) + "\n" for letter in dead))


def _readable(blob: bytes | None) -> str | None:
    """The text in a stored value: an 8-byte head (version, codec, compression, key, CRC-32), then JSON or text."""
    if blob is None:
        return None
    kinds, checksum = struct.unpack_from(">4sI", blob)
    if zlib.crc32(blob[8:], zlib.crc32(kinds)) != checksum:
        return "a stored value whose checksum does not match"
    return blob[8:].decode(errors="backslashreplace") if kinds[2] == 0 else "compressed"


def _parsed(text: str | None) -> Any:
    try:
        return json.loads(text or "null")
    except json.JSONDecodeError:
        return text


def _read_queues(broker: str, facts: Line) -> tuple[dict[str, int], list[Line]]:
    connection = pika.BlockingConnection(pika.URLParameters(broker))
    channel = connection.channel()
    try:
        depths = {queue: channel.queue_declare(queue, passive=True).method.message_count for queue in facts["queues"]}
        dead: list[Line] = []
        while True:
            method, properties, _ = channel.basic_get(facts["dead"])
            if method is None:
                return depths, dead
            headers = properties.headers or {}
            dead.append(
                {
                    "correlation_id": properties.correlation_id,
                    "reason": headers.get("cc-reason"),
                    "detail": headers.get("cc-detail"),
                }
            )
    finally:
        connection.close()  # nothing was acked: the letters stay where they are


DEPTHS = """
    SELECT queue.name, count(message.id)::integer AS count
      FROM coatcheck_broker.queue LEFT JOIN coatcheck_broker.message ON message.queue_id = queue.id
     WHERE queue.name = ANY($1::text[]) GROUP BY queue.name
"""
DEAD_LETTERS = """
    SELECT message.head, message.reason FROM coatcheck_broker.message
      JOIN coatcheck_broker.queue ON queue.id = message.queue_id WHERE queue.name = $1 ORDER BY message.id
"""


async def _read_tables(broker: str, facts: Line) -> tuple[dict[str, int], list[Line]]:
    """The same where queues are tables. What somebody holds or what is delayed counts: nobody is left to take it."""
    connection = await asyncpg.connect(f"postgresql{broker[broker.index('://') :]}")
    try:
        found = {row["name"]: row["count"] for row in await connection.fetch(DEPTHS, facts["queues"])}
        letters = await connection.fetch(DEAD_LETTERS, facts["dead"])
    finally:
        await connection.close()
    return {queue: found[queue] for queue in facts["queues"]}, [_read_letter(row) for row in letters]


def _read_letter(row: asyncpg.Record) -> Line:
    """A head is a list in MessagePack: six properties, the correlation id first, and a map of headers. The broker
    itself gives its reason in a column.
    """
    correlation_id, *_, headers = msgspec.msgpack.decode(row["head"])
    reason = row["reason"] or headers.get("cc-reason")
    return {"correlation_id": correlation_id, "reason": reason, "detail": headers.get("cc-detail")}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.checker", description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--store", help="read the final rows from this database")
    parser.add_argument("--broker", help="read the final queues from this broker")
    options = parser.parse_args()
    if options.store and options.broker:
        asyncio.run(collect(options.directory, store=options.store, broker=options.broker))
    evidence = Evidence.load(options.directory)
    for name, count in figures(evidence).items():
        print(f"{count:>9,}  {name}")
    violations = check(evidence)
    for violation in violations:
        print(violation)
    print(f"{len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
