from __future__ import annotations

from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.worker import ids

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    ("header", "flags"),
    [
        (PARENT, 1),
        (f"00-{TRACE}-{SPAN}-00", 0),
        (f"00-{TRACE}-{SPAN}-ff", 3),
        (f"cc-{TRACE}-{SPAN}-01", 1),
        (f"cc-{TRACE}-{SPAN}-01-what-comes-next", 1),
        (f" {PARENT} ", 1),
    ],
)
def test_valid_traceparent_is_read(header, flags):
    assert ids.parse_traceparent(header) == ids.TraceParent(TRACE, SPAN, flags)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "garbage",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-extra",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"{PARENT}\n",
        f"cc-{TRACE}-{SPAN}-01-{'x' * 600}",
    ],
)
def test_invalid_traceparent_is_none_and_starts_a_new_trace(header):
    assert ids.parse_traceparent(header) is None
    assert ids.trace_id_of(header) is None
    started = ids.parse_traceparent(ids.child_traceparent(header))
    assert started is not None
    assert started.trace_id != TRACE


@given(st.text())
def test_any_text_parses_or_is_none(text):
    found = ids.parse_traceparent(text)

    assert found is None or str(found).split("-")[1] in text


def test_child_keeps_trace_and_flags_and_changes_span():
    first, second = (ids.parse_traceparent(ids.child_traceparent(f"00-{TRACE}-{SPAN}-00")) for _ in range(2))

    assert first is not None
    assert second is not None
    assert (first.trace_id, first.flags) == (TRACE, 0)
    assert len({first.span_id, second.span_id, SPAN}) == 3


def test_child_of_a_call_is_the_same_each_time_and_does_not_reveal_the_call_id():
    call_id = uuid4()

    header = ids.child_traceparent(PARENT, call_id=call_id)

    assert header == ids.child_traceparent(PARENT, call_id=call_id)
    assert header != ids.child_traceparent(PARENT, call_id=uuid4())
    assert header.split("-")[2] not in call_id.hex


def test_new_trace_is_named_after_its_task():
    task_id = uuid4()

    assert ids.trace_id_of(ids.child_traceparent(None, task_id=task_id)) == task_id.hex
    assert ids.parse_traceparent(ids.child_traceparent(None, task_id=UUID(int=0))) is not None
