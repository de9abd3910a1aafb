"""A port in RAM for one task: rows as the store would keep them, replies as a test wants them.

It follows the rules the store follows: sequence numbers under one lock, news since the last look, groups looked at
again at every put-down, nothing written for an epoch that is over.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from coatcheck.store import blobs
from coatcheck.store.kinds import Kind
from coatcheck.store.rows import (
    CallId,
    CallState,
    Changes,
    Committed,
    Group,
    HistoryLevel,
    Known,
    NewCall,
    OpenCall,
    Recorded,
)
from coatcheck.worker.engine.context import Context
from coatcheck.worker.engine.run import Run
from coatcheck.worker.engine.run_port import Finished, Parked, Raised, Superseded


@dataclass
class Rows:
    """What the store knows of one task."""

    recorded: dict[str, Recorded] = field(default_factory=dict)
    open_calls: dict[str, NewCall] = field(default_factory=dict)
    sent: list[NewCall] = field(default_factory=list)
    groups: tuple[Group, ...] = ()
    seq: int = 0
    epoch: int = 0
    is_parked: bool = False
    commits: list[Changes] = field(default_factory=list)

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def known(self) -> Known:
        calls = tuple(OpenCall(c.call_id, c.key, c.kind, c.name, c.digest, None) for c in self.open_calls.values())
        return Known(tuple(sorted(self.recorded.values(), key=lambda each: each.seq)), calls)

    def end_call(self, key: str, state: CallState, value: bytes = b"") -> Recorded:
        call = self.open_calls.pop(key)
        ended = Recorded(key, call.kind, call.name, call.digest, self.next_seq(), state, value, call.call_id)
        self.recorded[key] = ended
        return ended

    def states(self) -> dict[CallId, CallState]:
        return {each.call_id: each.state for each in self.recorded.values() if each.call_id is not None}

    def is_met(self) -> bool:
        return any(group.is_met(self.states()) for group in self.groups)

    def waited(self) -> list[str]:
        """The keys of open calls that some group waits for."""
        wanted = {call for group in self.groups for call in group.calls}
        return [key for key, call in self.open_calls.items() if call.call_id in wanted]


class FakePort:
    """The port of one run. `parks=False` is the mode that keeps waiting tasks in RAM."""

    def __init__(self, rows: Rows, *, parks: bool = True) -> None:
        self.rows = rows
        self.parks = parks
        self.epoch = rows.epoch = rows.epoch + 1
        self.run: Run | None = None
        self.progressed: list[tuple[Any, ...]] = []
        self.first_effect_count = 0
        self.before_commit: Callable[[Changes], Any] | None = None
        self.during_commit: Callable[[Changes], Any] | None = None
        self.after_commit: Callable[[Changes, Committed], Any] | None = None
        self.first_effect_error: Exception | None = None
        self.is_in_commit = False

    async def before_first_effect(self) -> None:
        self.first_effect_count += 1
        await asyncio.sleep(0)
        if self.first_effect_error is not None:
            raise self.first_effect_error

    async def commit(self, changes: Changes) -> Committed:
        assert not self.is_in_commit, "two commits of one run in flight"
        self.is_in_commit = True
        try:
            return await self._commit(changes)
        finally:
            self.is_in_commit = False

    async def _commit(self, changes: Changes) -> Committed:
        for hook in (self.before_commit, self.during_commit):
            if hook is not None:
                found = hook(changes)
                if asyncio.iscoroutine(found):
                    await found
            await asyncio.sleep(0)
        if self.rows.epoch != self.epoch:
            raise Superseded
        committed = self._write(changes)
        await asyncio.sleep(0)
        if self.after_commit is not None:
            self.after_commit(changes, committed)
        return committed

    def _write(self, changes: Changes) -> Committed:
        rows = self.rows
        rows.commits.append(changes)
        apply(rows, changes)
        is_parked = False
        if changes.waits is not None:
            known = rows.states().keys() | {call.call_id for call in rows.open_calls.values()}
            assert all(call in known for group in changes.waits for call in group.calls), "a wait on an unknown call"
            rows.groups = changes.waits
            is_parked = rows.is_parked = self.parks and not rows.is_met()
        if is_parked:
            return Committed(True)
        return Committed(False, self.news())

    def news(self) -> tuple[Recorded, ...]:
        """What ended since the run last looked, counted from what the run has taken in."""
        assert self.run is not None
        seen = self.run.last_seq
        return tuple(sorted((r for r in self.rows.recorded.values() if r.seq > seen), key=lambda each: each.seq))

    def progress(self, *what: Any) -> None:
        self.progressed.append(what)


def apply(rows: Rows, changes: Changes) -> None:
    """Write entries, new calls and closes."""
    by_id = {call.call_id: key for key, call in rows.open_calls.items()}
    for call_id in changes.closes:
        if call_id in by_id:
            rows.end_call(by_id[call_id], CallState.CLOSED)
    for entry in changes.entries:
        assert entry.key not in rows.recorded, f"{entry.key} is recorded twice"
        assert entry.key not in rows.open_calls
        state = CallState.OK if entry.is_ok else CallState.FAILED
        rows.recorded[entry.key] = Recorded(
            entry.key, entry.kind, entry.name, entry.digest, rows.next_seq(), state, entry.value
        )
    for call in changes.opens:
        assert call.key not in rows.recorded, f"{call.key} is opened again"
        assert call.key not in rows.open_calls, f"{call.key} is opened twice"
        rows.open_calls[call.key] = call
        if call.kind is not Kind.TIMER:
            rows.sent.append(call)
        if call.kind is Kind.SEND:
            rows.end_call(call.key, CallState.OK, blobs.encode(None))


class Desk:
    """One task from its request to its end, over as many runs as it takes."""

    def __init__(
        self, handler: Callable[[Context], Any], *, rows: Rows | None = None, parks: bool = True, log: Any = None,
        history: HistoryLevel = HistoryLevel.OUTCOME,
    ) -> None:  # fmt: skip
        self.history = history
        self.handler = handler
        self.rows = rows if rows is not None else Rows()
        self.parks = parks
        self.task_id = uuid.UUID(int=7)
        self.runs = 0
        self.log = log if log is not None else LogList()
        self.run: Run
        self.port: FakePort

    def begin(self) -> Run:
        """A new run on what the rows know."""
        self.rows.is_parked = False
        self.port = FakePort(self.rows, parks=self.parks)
        self.run = Run(
            task_id=self.task_id, identity="id", attempt=1, version="1", invoke=self.handler,
            known=self.rows.known(), port=self.port, log=self.log, history=self.history,
        )  # fmt: skip
        self.port.run = self.run
        self.runs += 1
        return self.run

    async def once(self) -> Any:
        """Run once more and return the outcome."""
        return await asyncio.wait_for(self.begin().execute(), 20)

    async def parked(self) -> Rows:
        """Run once more; it must be parked then."""
        outcome = await self.once()
        assert outcome == Parked(), outcome
        return self.rows

    async def finished(self) -> Any:
        """Run once more; it must finish. Returns the value."""
        outcome = await self.once()
        assert isinstance(outcome, Finished), outcome
        apply(self.rows, outcome.changes)
        return outcome.value

    async def raised(self) -> BaseException:
        outcome = await self.once()
        assert isinstance(outcome, Raised), outcome
        return outcome.error

    def ok(self, key: str, value: Any = None) -> Recorded:
        """A peer's reply, or a timer's end, is claimed."""
        return self.rows.end_call(key, CallState.OK, blobs.encode(value))

    def fail(self, key: str, **problem: Any) -> Recorded:
        document = {"title": "No", "detail": "it went wrong", "code": "peer_error", "retryable": True, **problem}
        return self.rows.end_call(key, CallState.FAILED, blobs.encode(document))

    def time_out(self, key: str) -> Recorded:
        document = {"title": "The peer did not answer in time", "code": "timed_out", "retryable": True}
        return self.rows.end_call(key, CallState.TIMED_OUT, blobs.encode(document))


class LogList:
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def events(self) -> list[str]:
        return [event for _, event, _ in self.lines]

    def bind(self, **_values: Any) -> LogList:
        return self

    def __getattr__(self, level: str) -> Any:
        if level.startswith("_"):
            raise AttributeError(level)
        return lambda event, **facts: self.lines.append((level, event, facts))


def keys_of(calls: Sequence[NewCall] | dict[str, NewCall]) -> list[str]:
    return [call.key for call in (calls.values() if isinstance(calls, dict) else calls)]
