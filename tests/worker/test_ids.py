"""Ids of tasks and calls."""

import time
import uuid
from uuid import RFC_4122

import pytest

from coatcheck.worker.ids import derived_id, new_call_id, new_id, parse_id


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


def test_derived_ids_are_those_of_the_standard_library():
    namespace = uuid.uuid4()

    derived = derived_id(namespace, "research\0é")

    assert derived == uuid.uuid5(namespace, "research\0é")
    assert hash(derived) == hash(uuid.UUID(str(derived)))


def test_new_ids_are_random_uuids():
    made = {new_id() for _ in range(100)}

    assert len(made) == 100
    assert {(one.version, one.variant) for one in made} == {(4, RFC_4122)}


@pytest.mark.parametrize("text", ["", "x", "no-uuid" * 5, "é" * 36, "0" * 31, "0" * 37])
def test_what_is_no_id_is_refused(text):
    with pytest.raises(ValueError, match="UUID"):
        parse_id(text)
