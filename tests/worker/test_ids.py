"""Ids of calls."""

import time
from uuid import RFC_4122

from coatcheck.worker.ids import new_call_id


def test_ids_are_uuids_that_differ_in_more_than_their_time(monkeypatch):
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_123_456_789)

    made = [new_call_id() for _ in range(1000)]

    assert len(set(made)) == 1000
    assert {(one.version, one.variant, one.int >> 80) for one in made} == {(7, RFC_4122, 1_700_000_000_123)}
    varying = 0
    for one in made:
        varying |= one.int ^ made[0].int
    assert varying.bit_count() == 74


def test_later_ids_are_greater(monkeypatch):
    first = new_call_id()
    later = time.time_ns() + 1_000_000_000
    monkeypatch.setattr(time, "time_ns", lambda: later)

    assert new_call_id() > first
