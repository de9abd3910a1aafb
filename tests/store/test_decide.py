"""The rules, without any store: what an event finds, and what becomes of it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from msgspec import structs
from tests.store.kit import all_of, birth, call, calls, done, entry, going, parking, send

from coatcheck.store import decide
from coatcheck.store.decide import Called, Fence, Found, Grant
from coatcheck.store.kinds import Kind
from coatcheck.store.rows import (
    MOST_ADDRESSES,
    Address,
    Again,
    Arrival,
    CallState,
    Changes,
    Hold,
    Put,
    Request,
    Task,
    TaskState,
    Verdict,
    Wake,
)

SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)


def called(**facts: Any) -> Called:
    one = call()
    usual: dict[str, Any] = {
        "call_id": one.call_id, "task_id": birth().task_id, "kind": Kind.CALL, "peer": "peer", "state": "open",
        "is_due": False, "version": 7, "service": "svc", "task_state": "parked", "seq": 4, "trigger": None,
    }  # fmt: skip
    return Called(**(usual | facts))


def task(**facts: Any) -> Task:
    born = birth()
    usual: dict[str, Any] = {
        "task_id": born.task_id, "service": "svc", "handler": "h", "version": "1", "state": TaskState.RUNNING,
        "epoch": 3, "checkpoint": 2, "seq": 5, "attempt": 1, "pickups": 1, "trigger": "request", "identity": None,
        "digest": born.digest, "correlation_id": None, "request": b"x", "addresses": (), "traceparent": None,
        "tracestate": None, "value": None, "traceback": None, "is_final_sent": False, "progress": None, "due_at": None,
        "created_at": None, "updated_at": None, "finished_at": None,
    }  # fmt: skip
    return Task(**(usual | facts))


def claim_one(seen: Called, arrival: Arrival) -> decide.Plan:
    return decide.claim({seen.call_id: seen}, [arrival])


# --- replies ---


@pytest.mark.parametrize(
    ("facts", "state", "verdict"),
    [
        ({}, CallState.OK, Verdict.RECORDED),
        ({}, None, Verdict.RECORDED),
        ({"state": "ok"}, CallState.OK, Verdict.DUPLICATE),
        ({"state": "failed"}, CallState.OK, Verdict.DUPLICATE),
        ({"state": "ok"}, CallState.TIMED_OUT, Verdict.LATE),
        ({"state": "timed_out"}, CallState.OK, Verdict.LATE),
        ({"state": "closed"}, CallState.OK, Verdict.LATE),
        ({}, CallState.TIMED_OUT, Verdict.EARLY),
        ({"is_due": True}, CallState.TIMED_OUT, Verdict.RECORDED),
        ({"kind": Kind.SEND}, CallState.OK, Verdict.LATE),
    ],
)
def test_reply_finds_its_call_open_or_not(facts: dict[str, Any], state: CallState | None, verdict: Verdict) -> None:
    seen = called(**facts)

    plan = claim_one(seen, Arrival(seen.call_id, state, b""))

    assert [ruling and ruling.verdict for ruling in plan.rulings] == [verdict]


def test_timer_that_is_due_has_rung() -> None:
    seen = called(kind=Kind.TIMER, is_due=True)

    plan = claim_one(seen, Arrival(seen.call_id, CallState.TIMED_OUT, b""))

    assert plan.closing[seen.call_id].state is CallState.OK


def test_replies_of_one_task_take_numbers_in_their_order_and_the_last_one_may_wake_it() -> None:
    first, other = called(), called()
    other = other._replace(task_id=first.task_id)
    arrivals = [Arrival(one.call_id, CallState.OK, b"") for one in (first, other, first)]

    plan = decide.claim({first.call_id: first, other.call_id: other}, arrivals)

    assert [closing.seq for closing in plan.closing.values()] == [5, 6]
    assert plan.seqs == {first.task_id: 6}
    assert plan.if_met == {first.task_id: Grant(1, str(other.call_id))}
    assert [ruling and ruling.verdict for ruling in plan.rulings] == ["recorded", "recorded", "duplicate"]


def test_reply_of_another_service_is_unknown() -> None:
    seen = called()

    plan = claim_one(seen, Arrival(seen.call_id, CallState.OK, b"", service="another"))

    assert plan.rulings[0] is not None
    assert plan.rulings[0].verdict is Verdict.UNKNOWN
    assert not plan.versions


@pytest.mark.parametrize("is_redelivered", [True, False])
@pytest.mark.parametrize("is_trigger", [True, False])
def test_only_the_redelivered_trigger_takes_a_run_over(is_redelivered: bool, is_trigger: bool) -> None:
    seen = called(state="ok", task_state="running")
    seen = seen._replace(trigger=str(seen.call_id) if is_trigger else "request")

    plan = claim_one(seen, Arrival(seen.call_id, CallState.OK, b"", is_redelivered=is_redelivered))

    assert (seen.task_id in plan.grants) is (is_redelivered and is_trigger)
    assert bool(plan.came_back) is is_redelivered


# --- resumes and requests ---


@pytest.mark.parametrize(
    ("facts", "is_due", "verdict", "is_granted"),
    [
        ({}, True, Verdict.EARLY, True),  # the store makes it GRANTED once it is written
        ({}, False, Verdict.EARLY, False),
        ({"epoch": 4}, True, Verdict.DUPLICATE, False),
        ({"state": TaskState.PARKED}, True, Verdict.DUPLICATE, False),
        ({"state": TaskState.HELD}, True, Verdict.EARLY, True),
        ({"state": TaskState.RETRYING}, True, Verdict.EARLY, True),
        ({"state": TaskState.DONE}, True, Verdict.FINISHED, False),
    ],
)
def test_resume_needs_its_epoch_and_a_time_that_is_over(
    facts: dict[str, Any], is_due: bool, verdict: Verdict, is_granted: bool
) -> None:
    found = task(**facts)

    plan = decide.resume({found.task_id: Found(found, is_due)}, [Wake(found.task_id, 3)])

    assert [ruling and ruling.verdict for ruling in plan.rulings] == [verdict]
    assert (found.task_id in plan.grants) is is_granted


def test_two_resumes_of_one_batch_are_granted_once() -> None:
    found = task()

    plan = decide.resume({found.task_id: Found(found, True)}, [Wake(found.task_id, 3)] * 2)

    assert plan.grants == {found.task_id: Grant(0, "resume:3")}


def test_same_identity_with_another_body_is_a_conflict_but_not_for_a_tombstone() -> None:
    born = birth()
    known = task(task_id=born.task_id, digest=b"another")
    tombstone = task(task_id=born.task_id, digest=b"", request=b"", state=TaskState.CANCELLED, epoch=0)

    verdicts = [
        ruling and ruling.verdict
        for found in (known, tombstone)
        for ruling in decide.accept({born.task_id: Found(found, False)}, [Request(born)]).rulings
    ]

    assert verdicts == [Verdict.CONFLICT, Verdict.FINISHED]


def test_requesters_join_up_to_the_limit() -> None:
    born = birth()
    addresses = tuple(Address("q", str(number)) for number in range(MOST_ADDRESSES - 1))
    found = task(task_id=born.task_id, digest=born.digest, addresses=addresses)
    copies = [Request(structs.replace(born, address=Address("new", str(number)))) for number in range(2)]

    plan = decide.accept({born.task_id: Found(found, False)}, copies)

    assert [ruling and ruling.verdict for ruling in plan.rulings] == [Verdict.DUPLICATE, Verdict.CROWDED]
    assert plan.joined[born.task_id].addresses == (*addresses, Address("new", "0"))


# --- writes of a run ---


def put(end: Any, **facts: Any) -> Put:
    changes = Changes(**{name: facts.pop(name) for name in ("entries", "opens", "closes") if name in facts})
    usual: dict[str, Any] = {"task_id": birth().task_id, "epoch": 3, "follows": 2, "seen": 5}
    return Put(**(usual | facts), changes=changes, end=end)


@pytest.mark.parametrize(
    ("found", "fence"),
    [
        (task(), Fence.WRITE),
        (None, Fence.REFUSED),
        (task(epoch=4), Fence.REFUSED),
        (task(checkpoint=3), Fence.PERHAPS_IN),
        (task(checkpoint=4), Fence.REFUSED),
        (task(state=TaskState.CANCELLED), Fence.REFUSED),
    ],
)
def test_write_follows_the_row_as_it_stands(found: Task | None, fence: Fence) -> None:
    assert decide.fence(put(going()), found) is fence


def test_birth_meets_no_row_or_is_refused() -> None:
    newborn = put(going(), epoch=0, follows=0, birth=birth())

    assert decide.fence(newborn, None) is Fence.WRITE
    assert decide.fence(newborn, task(epoch=1, checkpoint=0)) is Fence.REFUSED
    assert decide.fence(newborn, task(epoch=1, checkpoint=1)) is Fence.PERHAPS_IN


def test_write_is_known_again_by_its_calls() -> None:
    one, other = call(), call()
    write = put(going(), opens=(one,))

    assert decide.is_in(write, task(checkpoint=3), keys=[], calls={one.call_id})
    assert not decide.is_in(write, task(checkpoint=3), keys=[], calls={other.call_id})
    assert not decide.is_in(write, task(checkpoint=3), keys=["a#1"], calls={one.call_id})


def test_places_in_the_order_are_closes_then_entries_then_sends() -> None:
    closed, sent, asked = call(), send(), call()
    writing = decide.Writing(put(going(), closes=(closed.call_id,), entries=(entry(),), opens=(asked, sent)), 5, False)

    assert writing.closes == [(closed.call_id, 6)]
    assert [seq for _, seq, _ in writing.entries] == [7]
    assert [place for _, place in writing.opens] == [None, 8]
    assert (writing.seq, [one.seq for one in writing.news]) == (8, [7])


def test_end_opens_nothing_but_sends() -> None:
    sent = send()

    assert list(decide.opens(put(done(), opens=(call(), sent)))) == [sent]


def test_put_down_looks_at_its_groups() -> None:
    members = calls(2)
    write = put(parking(all_of(members)))

    assert decide.may_park(write, {members[0].call_id: CallState.OK})
    assert not decide.may_park(write, {one.call_id: CallState.OK for one in members})
    assert not decide.may_park(put(going()), {})


def test_detached_task_has_no_trigger_but_a_finished_one_keeps_it() -> None:
    held = decide.standing(put(Hold(HOUR, b"f")), is_parked=False)
    ended = decide.standing(put(done()), is_parked=False)

    assert (held.trigger_after("request"), held.look_after("request")) == (None, HOUR)
    assert (ended.trigger_after("request"), ended.look_after("request")) == ("request", None)
    assert ended.look_after(None) == decide.RESEND_AFTER


def test_traceback_is_made_fit_for_the_row() -> None:
    standing = decide.standing(put(Again(SECOND, b"f", "a\0b\udc80")), is_parked=False)

    assert standing.traceback == "a?b?"


# --- the sweeper ---


@pytest.mark.parametrize(
    ("waits", "since", "is_sent", "pause"),
    [
        (HOUR, SECOND, True, HOUR),  # it is sent, and not due
        (HOUR, 60 * SECOND, False, 30 * SECOND),  # to be sent again: half as long as it has waited
        (HOUR, SECOND, False, 2 * SECOND),
        (3 * SECOND, HOUR, False, 3 * SECOND),  # but it is due before that
        (None, 24 * HOUR, False, 5 * 60 * SECOND),
        (-SECOND, HOUR, True, 30 * SECOND),  # due: emitted now, and again if that does not help
        (-600 * SECOND, HOUR, True, 600 * SECOND),
        (-24 * HOUR, HOUR, True, HOUR),
    ],
)
def test_sweeper_looks_at_a_call_again(waits: Any, since: timedelta, is_sent: bool, pause: timedelta) -> None:
    assert decide.look_at_call_again(waits=waits, since=since, is_sent=is_sent, again=30 * SECOND) == pause


def test_final_reply_is_tried_until_its_task_may_go() -> None:
    def look(waits: timedelta) -> timedelta | None:
        return decide.look_at_task_again(is_final=True, waits=waits, since=60 * SECOND, again=30 * SECOND)

    assert (look(HOUR), look(-SECOND)) == (30 * SECOND, None)
