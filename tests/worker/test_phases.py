"""How far a run can be: which moves there are, and what each phase says of the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import pytest

from coatcheck.broker.port import Delivery, Message
from coatcheck.store.rows import TaskId
from coatcheck.worker.phases import MOVES, Phase
from coatcheck.worker.task_run import TaskRun


class Trigger(Delivery):
    """A message that remembers how it was settled."""

    def __init__(self) -> None:
        super().__init__(Message(), "svc", is_redelivered=False, delivery_count=1)
        self.settled: list[str] = []

    def ack(self) -> None:
        self.settled.append("ack")

    def requeue(self) -> None:
        self.settled.append("requeue")

    @property
    def is_settled(self) -> bool:
        return bool(self.settled)

    @property
    def is_lost(self) -> bool:
        return False


def make_run(phase: Phase = Phase.GRANTED) -> TaskRun:
    runtime: Any = None
    return TaskRun(
        runtime, TaskId(uuid4()), None, None, b"", None, None, None, (), Trigger(), "request", 0.0, 0.0, phase=phase
    )


@pytest.mark.parametrize(
    "way",
    [
        (Phase.RUNNING, Phase.PARKED, Phase.SETTLED),
        (Phase.RUNNING, Phase.ENDING, Phase.ENDED, Phase.SETTLED),
        (Phase.RUNNING, Phase.ENDING, Phase.RUNNING, Phase.ENDING, Phase.SETTLED),
        (Phase.RUNNING, Phase.FENCED, Phase.ENDED, Phase.SETTLED),
        (Phase.RUNNING, Phase.LET_GO, Phase.FENCED, Phase.SETTLED),
    ],
)
def test_a_run_goes_its_way(way: Sequence[Phase]) -> None:
    run = make_run()

    for phase in way:
        run.move(phase)
        run.move(phase)  # repeating it is safe

    assert run.phase is Phase.SETTLED


@pytest.mark.parametrize(
    ("before", "after"),
    [(before, after) for before in Phase for after in Phase if after is not before and after not in MOVES[before]],
)
def test_a_move_that_is_not_drawn_is_refused_with_both_phases(before: Phase, after: Phase) -> None:
    with pytest.raises(AssertionError, match=f"from {before.name} to {after.name}"):
        make_run(before).move(after)


def test_every_phase_but_the_last_leads_to_the_ack() -> None:
    assert [phase for phase in Phase if Phase.SETTLED not in MOVES[phase]] == [Phase.SETTLED]


@pytest.mark.parametrize("phase", [Phase.PARKED, Phase.ENDED, Phase.SETTLED])
def test_a_run_whose_last_write_is_in_cannot_be_fenced_nor_let_go(phase: Phase) -> None:
    run = make_run(phase)

    run.fence()
    run.let_go()

    assert run.phase is phase
    assert not run.has_lease


def test_a_trigger_that_comes_back_joins_until_the_end_is_decided() -> None:
    run = make_run(Phase.RUNNING)
    assert run.is_joinable

    run.end()

    assert not run.is_joinable


def test_a_run_without_its_trigger_is_joined_by_none() -> None:
    run = make_run(Phase.RUNNING)

    run.trigger = None  # as a detach leaves it

    assert not run.is_joinable
    assert run.has_lease


def test_ack_settles_the_trigger_and_its_copies() -> None:
    run, first, back = make_run(Phase.PARKED), Trigger(), Trigger()
    run.trigger = first
    run.attach(back)

    run.ack()

    assert first.settled == back.settled == ["ack"]
    assert run.phase is Phase.SETTLED
