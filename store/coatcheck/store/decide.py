"""The rules of the protocol, each written once: what an event does to a task, given what the rows say.

    event ─► the store reads what it is about ─► decide ─► the store writes it, if what was read still stands

Nothing here does I/O or reads a clock, and nothing here waits. A store only loads, applies and scans: Postgres and the
in-memory store apply the same decisions, so the simulation proves the rules that ship. Two things are left to the
moment of writing, because only the locked rows know them:

- whether a group is met: a `Plan` names the tasks to grant *if* their wait is over, and the store counts their calls;
- what a row has learnt while a run was on its way (its trigger, its addresses): `Standing` says what to make of them.

Times leave as intervals. The store's clock, which is Postgres's, turns them into instants.

The events of a batch are decided in their order, each on the result of the one before: four replies of one task may
come in one batch, and take four numbers of its sequence.

What triggered a run is named in its row: a call's id, `request`, or `resume:EPOCH`. A message that comes back and is
that trigger takes the run over, because its holder is dead or has lost it. A plain duplicate never does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, auto
from typing import NamedTuple, assert_never

from msgspec.structs import replace

from coatcheck.store import history
from coatcheck.store.chain import HistoryEntry
from coatcheck.store.history import Author
from coatcheck.store.kinds import KINDS
from coatcheck.store.rows import (
    MOST_ADDRESSES,
    Again,
    Arrival,
    CallId,
    CallState,
    CancelAsk,
    Chain,
    Finish,
    Going,
    Group,
    HistoryLevel,
    Hold,
    NewCall,
    NewEntry,
    NewHistory,
    Park,
    Peer,
    Put,
    Recorded,
    Request,
    Ruling,
    Task,
    TaskId,
    TaskState,
    Unsent,
    Value,
    Verdict,
    Wake,
)

REQUEST_TRIGGER = "request"
RESEND_AFTER = timedelta(seconds=60)
"""How long a call or final reply may stand unmarked before the sweeper sends it again."""
PAUSED_FOR = timedelta(days=3650)
"""A paused task has a due time too, as far away as the longest wait. Nothing happens then but a look."""
LONGEST_AGAIN = timedelta(hours=1)
SHORTEST_RESEND = timedelta(seconds=2)
LONGEST_RESEND = timedelta(minutes=5)
HASTENED_FROM = timedelta(seconds=10)
"""So old is an unsent message at least that is hastened. A younger one may have left, and not be marked yet."""

TASK_STATES: Mapping[str, TaskState] = {one.value: one for one in TaskState}  # a tenth of the time of the enum's own
HISTORY_LEVELS = tuple(HistoryLevel)
NO_CHAIN = Chain()
Version = int
"""Which state of a row was read, for a store that writes only where it still stands."""


# --- replies, resumes and requests ------------------------------------------------------------------------------


class Called(NamedTuple):
    """What the rows say of a call that a reply names, and of its task."""

    call_id: CallId
    task_id: TaskId
    kind: str
    peer: str
    state: str
    is_due: bool | None
    version: Version
    service: str
    task_state: str
    seq: int
    trigger: str | None
    key: str = ""
    epoch: int = 0
    history: int = 0
    entry_count: int = 0
    head: bytes | None = None

    @property
    def chain(self) -> Chain:
        return Chain(HISTORY_LEVELS[self.history], self.entry_count, self.head)


class Found(NamedTuple):
    """A task's row, whether its time is over, and which version of it was read."""

    task: Task
    is_due: bool | None
    version: Version = 0


class Closing(NamedTuple):
    """A call to be closed: in this state, at this place of its task's order, with this value."""

    call_id: CallId
    state: CallState
    seq: int
    value: bytes


class Grant(NamedTuple):
    """Which event of the batch gets the task, and what it is called as a trigger."""

    event: int
    trigger: str


@dataclass(slots=True)
class Telling:
    """What a batch appends to the history of one task, which stands at `chain`. The last entry tells of a grant."""

    chain: Chain
    epoch: int
    drafts: list[NewHistory] = field(default_factory=list)
    if_granted: NewHistory | None = None

    def entries(self, task_id: TaskId, author: Author, *, is_granted: bool) -> tuple[list[HistoryEntry], Chain]:
        """What is appended, and where the chain stands then."""
        entries, chain = author.tell(task_id, self.drafts, at=self.chain, epoch=self.epoch)
        if not is_granted or self.if_granted is None:
            return entries, chain
        grant, chain = author.tell(task_id, [self.if_granted], at=chain, epoch=self.epoch + 1)
        return entries + grant, chain


@dataclass(slots=True)
class Plan:
    """What the events of one batch come to. `rulings` has an answer for each event, in their order.

    A store writes all of one task or nothing, and turns the ruling of a grant that it wrote into GRANTED.
    """

    rulings: list[Ruling | None] = field(default_factory=list)
    """None: there is no row that could answer."""
    versions: dict[TaskId, Version] = field(default_factory=dict)
    """The tasks to be written."""
    seqs: dict[TaskId, int] = field(default_factory=dict)
    """The last place of each task's order that is taken now."""
    closing: dict[CallId, Closing] = field(default_factory=dict)
    progress: dict[CallId, tuple[int, Arrival]] = field(default_factory=dict)
    """Calls that get on: their due time moves. One that is closed in the same batch needs it no more."""
    grants: dict[TaskId, Grant] = field(default_factory=dict)
    if_met: dict[TaskId, Grant] = field(default_factory=dict)
    """Parked tasks: granted if a group is met, to the last of the replies that ended the wait."""
    joined: dict[TaskId, Task] = field(default_factory=dict)
    """Tasks that have one more requester to answer."""
    came_back: dict[int, TaskId] = field(default_factory=dict)
    """Messages that were delivered before: what their tasks have perhaps never sent is looked up."""
    telling: dict[TaskId, Telling] = field(default_factory=dict)
    """The tasks whose histories get longer."""
    has_values: bool = False
    """Histories tell values in full."""

    def take_over(self, index: int, seen: Called | Task, version: Version, *, trigger: str | None) -> None:
        """A message came back. The run that it triggered, if there is one, is its own now."""
        self.came_back[index] = seen.task_id
        if trigger is not None:
            self.grant(index, seen, version, trigger=trigger)

    def grant(self, index: int, seen: Called | Task, version: Version, *, trigger: str) -> None:
        """Grant a task to the first event that gets it."""
        task_id = seen.task_id
        if task_id not in self.grants:
            self.versions[task_id] = version
            self.grants[task_id] = Grant(index, trigger)
            self.tell_grant(seen, trigger=trigger)

    def tell_grant(self, seen: Called | Task, *, trigger: str, key: str | None = None) -> None:
        """Have the task's history tell of its grant, if that comes about and its level is high enough."""
        chain = seen.chain
        was = TASK_STATES[seen.task_state] if isinstance(seen, Called) else seen.state
        draft = history.of_grant(chain.level, trigger=trigger, was=was, key=key)
        if draft is not None:
            self._telling(seen, chain).if_granted = draft

    def tell_claim(self, call: Called, arrival: Arrival, state: CallState) -> None:
        chain = call.chain
        if chain.level is HistoryLevel.FULL:
            draft = history.of_claim(state, arrival.value, peer=call.peer, key=call.key, has_values=self.has_values)
            self._telling(call, chain).drafts.append(draft)

    def _telling(self, seen: Called | Task, chain: Chain) -> Telling:
        return self.telling.setdefault(seen.task_id, Telling(chain, seen.epoch))


def claim(found: Mapping[CallId, Called], arrivals: Sequence[Arrival], *, has_values: bool = False) -> Plan:
    """Decide replies, progress and timeouts."""
    plan = Plan(has_values=has_values)
    for index, arrival in enumerate(arrivals):
        call = found.get(arrival.call_id)
        if call is None or arrival.service not in ("", call.service):
            plan.rulings.append(Ruling(Verdict.UNKNOWN))  # of another service, its code could not run the task
        else:
            plan.rulings.append(_claim(plan, index, arrival, call))
    for call_id in plan.progress.keys() & plan.closing.keys():
        del plan.progress[call_id]
    return plan


def _claim(plan: Plan, index: int, arrival: Arrival, call: Called) -> Ruling:
    call_id, task_id = call.call_id, call.task_id
    verdict = Verdict.DUPLICATE if call_id in plan.closing else judge_arrival(arrival, call)
    if verdict is not Verdict.RECORDED:
        if arrival.is_redelivered:
            is_mine = call.task_state == TaskState.RUNNING and call.trigger == str(call_id)
            plan.take_over(index, call, call.version, trigger=str(call_id) if is_mine else None)
    elif arrival.state is None:
        plan.progress[call_id] = (index, arrival)
    else:
        state = CallState.OK if KINDS[call.kind].rings else arrival.state
        plan.versions[task_id] = call.version
        seq = plan.seqs[task_id] = plan.seqs.get(task_id, call.seq) + 1
        plan.closing[call_id] = Closing(call_id, state, seq, arrival.value)
        plan.tell_claim(call, arrival, state)
        if call.task_state == TaskState.PARKED:
            plan.if_met[task_id] = Grant(index, str(call_id))
            plan.tell_grant(call, trigger=str(call_id), key=call.key)
    return Ruling(verdict, name=call.peer, task_id=task_id, state=TASK_STATES[call.task_state])


def judge_arrival(arrival: Arrival, call: Called) -> Verdict:
    """Tell what a reply, progress or timeout finds. RECORDED: the call is open for it."""
    if not KINDS[call.kind].is_awaited:
        return Verdict.LATE  # no run ever waited for it, and its place in the order must not move
    if call.state != CallState.OPEN:
        is_answered = call.state in (CallState.OK, CallState.FAILED)
        return Verdict.DUPLICATE if is_answered and arrival.state is not CallState.TIMED_OUT else Verdict.LATE
    if arrival.state is CallState.TIMED_OUT and not call.is_due:
        return Verdict.EARLY
    return Verdict.RECORDED


RESUMABLE = frozenset({TaskState.RUNNING, TaskState.RETRYING, TaskState.HELD})


def resume(found: Mapping[TaskId, Found], wakes: Sequence[Wake]) -> Plan:
    """Decide resumes: a task whose lease or pause is over is granted, if it stands at the epoch the message names."""
    plan = Plan()
    for index, one in enumerate(wakes):
        task_id, trigger = one.task_id, f"resume:{one.epoch}"
        seen = found.get(task_id)
        if seen is None or one.service not in ("", seen.task.service):
            plan.rulings.append(Ruling(Verdict.UNKNOWN))
            continue
        task, is_due, version = seen
        if task.state not in RESUMABLE or task.epoch != one.epoch:
            plan.rulings.append(_ended_or_known(task))
            if one.is_redelivered:
                _take_task_over(plan, index, seen, trigger=trigger)
            continue
        plan.rulings.append(Ruling(Verdict.EARLY, task))
        if is_due:
            plan.grant(index, task, version, trigger=trigger)
    return plan


def accept(found: Mapping[TaskId, Found], requests: Sequence[Request]) -> Plan:
    """Decide requests whose tasks have a row, or had one: a birth is the store's to try first."""
    plan = Plan()
    for index, one in enumerate(requests):
        task_id = one.birth.task_id
        if (seen := found.get(task_id)) is None:
            plan.rulings.append(None)
            continue
        seen = seen._replace(task=plan.joined.get(task_id, seen.task))
        plan.rulings.append(ruling := _accept(plan, index, one, seen))
        if seen.task.wants(one.birth) and ruling.verdict in (Verdict.DUPLICATE, Verdict.FINISHED):
            plan.joined[task_id] = replace(seen.task, addresses=(*seen.task.addresses, one.birth.address))
    return plan


def _accept(plan: Plan, index: int, one: Request, seen: Found) -> Ruling:
    task = seen.task
    if task.digest != one.birth.digest and task.request:  # a tombstone has no request to differ from
        return Ruling(Verdict.CONFLICT, task)
    if task.wants(one.birth) and len(task.addresses) >= MOST_ADDRESSES:
        return Ruling(Verdict.CROWDED, task)
    if one.is_redelivered:
        _take_task_over(plan, index, seen, trigger=REQUEST_TRIGGER)
    return _ended_or_known(task)


def _ended_or_known(task: Task) -> Ruling:
    return Ruling(Verdict.FINISHED if task.state.is_final else Verdict.DUPLICATE, task)


def _take_task_over(plan: Plan, index: int, seen: Found, *, trigger: str) -> None:
    task = seen.task
    is_mine = task.state is TaskState.RUNNING and task.trigger == trigger
    plan.take_over(index, task, seen.version, trigger=trigger if is_mine else None)


def first_pickups(requests: Iterable[Request]) -> dict[TaskId, tuple[Request, int]]:
    """The requests that may become rows, one for each task, and the pick-ups that each begins with.

    A request that was delivered before may have run before, without a row, and have ended its process. Of several
    copies the first one counts: it is the one that is granted.
    """
    first: dict[TaskId, tuple[Request, int]] = {}
    for one in requests:
        first.setdefault(one.birth.task_id, (one, 2 if one.is_redelivered else 1))
    return first


def granted(task: Task, grant: Grant, *, seq: int) -> Task:
    """A row as a grant leaves it, but for its times: running, in an epoch of its own that fences every earlier run."""
    return replace(
        task,
        state=TaskState.RUNNING,
        epoch=task.epoch + 1,
        pickups=task.pickups + 1,
        trigger=grant.trigger,
        seq=seq,
    )


# --- cancels ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class CancelPlan:
    """What the cancels of one batch come to. Of several asks for one task the first one counts."""

    buried: dict[TaskId, CancelAsk] = field(default_factory=dict)
    """Tasks without a row: each gets a tombstone, which answers its request when that comes."""
    ending: dict[TaskId, tuple[Task, CancelAsk]] = field(default_factory=dict)
    ended: dict[TaskId, Task] = field(default_factory=dict)
    """Tasks that had ended before. A cancelled one whose peers were perhaps never told is told of again."""


def cancel(found: Mapping[TaskId, Task], asked: Iterable[tuple[TaskId, CancelAsk]]) -> CancelPlan:
    """Decide cancels: the first commit wins, and a task of another service is left alone."""
    plan = CancelPlan()
    for target, ask in asked:
        task = found.get(target)
        if task is None:
            plan.buried.setdefault(target, ask)
        elif task.service == ask.service:
            if task.state.is_final:
                plan.ended.setdefault(target, task)
            else:
                plan.ending.setdefault(target, (task, ask))
    return plan


def tells_peers_again(task: Task) -> bool:
    """Tell whether a crash may have come between the commit of a cancel and the cancels to its peers."""
    return task.state is TaskState.CANCELLED and not task.is_final_sent


def answer_cancel(plan: CancelPlan, target: TaskId, ask: CancelAsk, cancels: Sequence[Peer]) -> Ruling:
    """RECORDED: cancelled now; FINISHED: it had ended before; UNKNOWN: a tombstone, or a task of another service."""
    if target in plan.ended and plan.ended[target].service == ask.service:
        task = plan.ended[target]
        is_unsent = bool(task.addresses) and not task.is_final_sent
        return Ruling(Verdict.FINISHED, task, cancels=tuple(cancels), unsent=Unsent((), is_unsent))
    if target not in plan.ending or plan.ending[target][0].service != ask.service:
        return Ruling(Verdict.UNKNOWN)
    task, first = plan.ending[target]
    told = replace(task, state=TaskState.CANCELLED, epoch=task.epoch + 1, value=first.failure(target))
    if ask is first:
        return Ruling(Verdict.RECORDED, told, cancels=tuple(cancels), unsent=Unsent((), True))
    return Ruling(Verdict.FINISHED, told)  # the ask before this one, in the same batch, did it and tells everyone


# --- what a run writes ------------------------------------------------------------------------------------------


class Fence(Enum):
    """What a put meets at its row."""

    WRITE = auto()
    """It follows the row as it stands, or is the birth of a row that is not there."""
    REFUSED = auto()
    """Another replica owns the task, or it has ended."""
    PERHAPS_IN = auto()
    """The row stands where this write leaves it: `is_in` tells by its traces whether it was committed before."""


def fence(put: Put, task: Task | None) -> Fence:
    """Let a write through only where it follows the row as it stands."""
    if task is None:
        return Fence.REFUSED if put.birth is None else Fence.WRITE
    if (
        put.birth is None
        and task.state is TaskState.RUNNING
        and (task.epoch, task.checkpoint) == (put.epoch, put.follows)
    ):
        return Fence.WRITE
    is_next = (task.epoch, task.checkpoint) == (put.epoch or 1, put.follows + 1)
    return Fence.PERHAPS_IN if is_next else Fence.REFUSED


def is_in(put: Put, task: Task, *, keys: Sequence[str], calls: Collection[CallId]) -> bool:
    """Tell whether this very put was committed before, when its run could not know: its traces are in the rows.

    `keys` and `calls` are what the row's last checkpoint recorded and opened. The ids of calls are random, so they
    prove it. Without any, its end must be what the row shows; for a birth that proves nothing (a duplicate of the
    request may have run elsewhere), unless it is the same final state.
    """
    if list(keys) != [entry.key for entry in put.changes.entries]:
        return False
    if wanted := {call.call_id for call in opens(put)}:
        return wanted <= set(calls)
    if isinstance(put.end, Finish):
        return task.state is put.end.state and task.value == put.end.value
    return put.birth is None and _shows(task, put.end)


def _shows(task: Task, end: Park | Going | Again | Hold) -> bool:
    match end:
        case Park():
            return task.state in (TaskState.PARKED, TaskState.RUNNING, TaskState.PAUSED)
        case Going(is_detached=is_detached):
            is_going = task.state is TaskState.RUNNING and not (is_detached and task.trigger is not None)
            return is_going or task.state is TaskState.PAUSED
        case Again(failure=failure):
            return task.state in (TaskState.RETRYING, TaskState.PAUSED) and task.value == failure
        case Hold(failure=failure):
            return task.state in (TaskState.HELD, TaskState.PAUSED) and task.value == failure
        case _:
            assert_never(end)


class Standing(Value, frozen=True):
    """How a row stands after a put. What is due after `due` is looked at then; None: its calls are its wakers."""

    state: TaskState
    due: timedelta | None
    is_detached: bool = False
    """No unacked trigger looks after the task any more."""
    value: bytes | None = None
    traceback: str | None = None
    groups: tuple[Group, ...] = ()

    @property
    def ends_attempt(self) -> bool:
        """Whether the next run is another attempt; that of a task which is paused instead of tried again is, too."""
        is_failed = self.state is TaskState.PAUSED and self.traceback is not None
        return self.state is TaskState.RETRYING or is_failed

    def trigger_after(self, trigger: str | None) -> str | None:
        """Make of the row's trigger what the put leaves. A finished task keeps it: its message may come back."""
        return trigger if self.state.is_final or not self.is_detached else None

    def look_after(self, trigger: str | None) -> timedelta | None:
        """When the sweeper looks at the row. It sends only a final reply that nothing else would bring back; the row
        knows best, for it may have lost its trigger while the end was on its way.
        """
        if not self.state.is_final:
            return self.due
        return RESEND_AFTER if self.is_detached or trigger is None else None


def standing(put: Put, *, is_parked: bool, is_pausing: bool = False) -> Standing:
    """Say how the row of a task stands once this write of its run is in. One that is to be paused is, unless it ends:
    its run is put down as if it were parked.
    """
    if is_pausing and not isinstance(put.end, Finish):
        failure = put.end.failure if isinstance(put.end, Again | Hold) else None
        traceback = put.end.traceback if isinstance(put.end, Again) else None
        return Standing(TaskState.PAUSED, PAUSED_FOR, True, failure, printable(traceback))
    match put.end:
        case Park(groups) if is_parked:
            return Standing(TaskState.PARKED, None, is_detached=True, groups=groups)
        case Park(lease=lease):
            return Standing(TaskState.RUNNING, lease)  # a group is met already: the run goes on with the news
        case Going(lease, is_detached):
            return Standing(TaskState.RUNNING, lease, is_detached)
        case Finish(state, value, keep, traceback, is_detached):
            return Standing(state, keep, is_detached, value, printable(traceback))
        case Again(delay, failure, traceback):
            return Standing(TaskState.RETRYING, delay, True, failure, printable(traceback))
        case Hold(delay, failure):
            return Standing(TaskState.HELD, delay, True, failure)
        case end:
            assert_never(end)


def printable(words: str | None) -> str | None:
    """Text for people as Postgres takes it: a NUL or half a surrogate in a message must not keep a task from ending."""
    return None if words is None else words.encode("utf-8", "replace").decode().replace("\0", "?")


@dataclass(slots=True)
class Writing:
    """A put on its way into the rows: what it closes, records and opens, each at its place in the task's order.

    `seen` is the sequence number its row must have, `chain` where its history stands. `news` begins with what ended
    since the run last looked.
    """

    put: Put
    seen: int
    is_parked: bool
    news: list[Recorded] = field(default_factory=list)
    seq: int = 0
    closes: list[tuple[CallId, int]] = field(default_factory=list)
    entries: list[tuple[NewEntry, int, bool]] = field(default_factory=list)
    """Each with its place, and whether the retry that follows forgets it."""
    opens: list[tuple[NewCall, int | None]] = field(default_factory=list)
    """A send counts as done from the moment its row exists, so it has its place at once."""
    chain: Chain = NO_CHAIN
    is_pausing: bool = False
    """A person wants the task paused."""

    def __post_init__(self) -> None:
        self.is_parked = self.is_parked or (self.is_pausing and not isinstance(self.put.end, Finish))
        put, seq = self.put, self.seen
        for call_id in put.changes.closes:
            seq += 1
            self.closes.append((call_id, seq))
        forgets = forgotten(put)
        for entry in put.changes.entries:
            seq += 1
            self.entries.append((entry, seq, not entry.is_ok and entry.key in forgets))
            state = CallState.OK if entry.is_ok else CallState.FAILED
            self.news.append(Recorded(entry.key, entry.kind, entry.name, entry.digest, seq, state, entry.value))
        for call in opens(put):
            is_awaited = call.kind.is_awaited
            seq += not is_awaited
            self.opens.append((call, None if is_awaited else seq))
        self.seq = seq

    @property
    def checkpoint(self) -> int:
        return self.put.follows + 1

    @property
    def epoch(self) -> int:
        return self.put.epoch or 1

    def signatures(self, replica: str) -> Iterator[tuple[int, str | None]]:
        """The epoch and replica for each row that the put makes. The first row names the replica for all of them: a
        name on each of four calls would make a parked task a twentieth larger.
        """
        yield self.epoch, replica
        while True:
            yield self.epoch, None

    @property
    def standing(self) -> Standing:
        return standing(self.put, is_parked=self.is_parked, is_pausing=self.is_pausing)

    def history(self, author: Author) -> list[HistoryEntry]:
        """What it appends to its task's history; `chain` stands after it then."""
        drafts = history.of_put(
            self.put, self.chain.level, opens=opens(self.put), is_parked=self.is_parked, has_values=author.has_values
        )
        entries, self.chain = author.tell(self.put.task_id, drafts, at=self.chain, epoch=self.epoch)
        return entries


def is_put_down(task: Task) -> bool:
    """Tell whether a run whose write is in is to be put down."""
    return task.state in (TaskState.PARKED, TaskState.PAUSED)


def opens(put: Put) -> Sequence[NewCall]:
    """What a put opens. An end that closes all calls opens none, save the sends, which leave all the same."""
    if isinstance(put.end, Finish):
        return [call for call in put.changes.opens if not call.kind.is_awaited]
    return put.changes.opens


def forgotten(put: Put) -> Collection[str]:
    """The failures that a retry forgets, so that their work is done anew."""
    return put.end.forget if isinstance(put.end, Again) else ()


def shows_progress(put: Put) -> bool:
    """Tell whether a run has shown that it does not kill its worker. One that only renews its lease has not."""
    return bool(put.changes.entries or put.changes.opens) or not isinstance(put.end, Going)


def waits_for(put: Put) -> Sequence[CallId]:
    """The calls that a put-down waits for and that were opened before it; () if it waits for none of them."""
    if put.birth is not None or not isinstance(put.end, Park):
        return ()
    opened = {call.call_id for call in put.changes.opens}
    members = [call_id for group in put.end.groups for call_id in group.calls]
    return members if any(call_id not in opened for call_id in members) else ()


def may_park(put: Put, states: Mapping[CallId, CallState]) -> bool:
    """Tell whether a put-down holds, given the states of calls that were opened before. One that is missing is open.

    By the rows and not by the news alone: a live run may have been told of a reply already, out of turn, without having
    come to it before it asked to be put down.
    """
    return isinstance(put.end, Park) and not any(group.is_met(states) for group in put.end.groups)


# --- what the sweeper looks at ----------------------------------------------------------------------------------


def look_at_call_again(
    *, waits: timedelta | None, since: timedelta, is_sent: bool, again: timedelta
) -> timedelta | None:
    """When the sweeper looks at an open call next. `waits`: how long until it is due, None: it never is; `since`: how
    long it has been open.
    """
    if waits is not None and waits <= timedelta():
        return _pause(-waits, again)
    if is_sent:
        return waits
    resend = _resend(since, again)
    return resend if waits is None else min(waits, resend)


def look_at_task_again(
    *, is_final: bool, waits: timedelta | None, since: timedelta, again: timedelta
) -> timedelta | None:
    """When the sweeper looks at a task next. A final reply is tried until its task's time to be kept is over, and once
    more; then the row may go. `since`: how long ago it ended.
    """
    overdue = timedelta() if waits is None else -waits
    if not is_final:
        return _pause(overdue, again)
    return None if waits is not None and overdue >= timedelta() else _resend(since, again)


def _pause(overdue: timedelta, again: timedelta) -> timedelta:
    """`again`, or as long as it has been due. What was emitted lies in a durable queue; where no worker takes it from
    there, saying so every half minute would fill the queue, and not help.
    """
    return max(again, min(overdue, LONGEST_AGAIN))


def _resend(since: timedelta, again: timedelta) -> timedelta:
    """Half as long as it has waited: a queue that refuses a message may do so for hours, or have room in a moment."""
    return max(min(again, SHORTEST_RESEND), min(since / 2, LONGEST_RESEND))
