"""The kinds of durable work, and all that differs between them. Others ask for what differs, not for the kind; only the
engine, which runs steps and makes notes up, tells those two apart.

| kind  | made by            | lives in | published | awaited | when it is due |
|-------|--------------------|----------|-----------|---------|----------------|
| step  | ctx.step           | journal  | no        | no      | never          |
| note  | ctx.now, ctx.uuid… | journal  | no        | no      | never          |
| call  | ctx.call           | call     | yes       | yes     | it has failed  |
| timer | ctx.sleep          | call     | no        | yes     | it has rung    |
| send  | ctx.send           | call     | yes       | no      | never          |
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Kind(StrEnum):
    """What a journal key stands for."""

    STEP = "step"
    NOTE = "note"  # a value the run made up and must see again (now, random)
    CALL = "call"
    TIMER = "timer"
    SEND = "send"

    @property
    def is_entry(self) -> bool:
        """It is recorded once it has ended, in the journal. The others have a row from the moment they begin."""
        return self in _ENTRIES

    @property
    def is_awaited(self) -> bool:
        """A message from outside ends it, and a run may wait for that."""
        return self in _AWAITED

    @property
    def is_published(self) -> bool:
        """A message goes out for it, once its row is committed."""
        return self in _PUBLISHED

    @property
    def has_listener(self) -> bool:
        """Its peer works on it, and should hear that the task has given it up."""
        return self is Kind.CALL

    @property
    def rings(self) -> bool:
        """Its due time is what it waits for. Anything else that is due has timed out."""
        return self is Kind.TIMER


_ENTRIES = frozenset({Kind.STEP, Kind.NOTE})
_AWAITED = frozenset({Kind.CALL, Kind.TIMER})
_PUBLISHED = frozenset({Kind.CALL, Kind.SEND})
KINDS: Mapping[str, Kind] = {one.value: one for one in Kind}
"""By the word in a row: a dict's look-up takes a tenth of an enum's."""
