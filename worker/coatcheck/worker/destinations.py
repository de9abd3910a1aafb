"""Queues that refuse what they are sent: each is left alone for a while, then tried with one message at a time.

    taking ──refused──► refusing, for a pause ──over──► one message is tried ──taken──► taking
                           ▲                                     │
                           └──────── refused: a longer pause ────┘

A full queue is a property of that queue. While it refuses, what goes there is refused here, at once: it costs no
message on the wire, and holds nothing else up. Known to this process alone, and forgotten with it.
"""

from __future__ import annotations

import random
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass

from coatcheck.broker.port import Routing
from coatcheck.log import get_logger
from coatcheck.worker.metrics import Metrics

log = get_logger(__name__)

SHORTEST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 30.0
FORGOTTEN_AFTER_S = 600.0
"""A queue that nothing was sent to for so long is not known to refuse any more."""
MOST_KNOWN = 10_000
MOST_LABELS = 100
REPLIES = "replies"
"""The label of all reply queues together: each requester may bring one along."""


@dataclass(slots=True)
class _Refusing:
    label: str
    since_s: float
    refused_s: float
    pause_s: float
    next_s: float
    is_tried: bool = False


class Destinations:
    """The queues that refuse at the moment. False as a truth value: none does."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._refusing: OrderedDict[str, _Refusing] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._took_again: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._refusing)

    def is_refusing(self, to: str) -> bool:
        return to in self._refusing

    def may_try(self, to: str) -> bool:
        """Whether a queue that refuses may be sent one message now. The caller says when that has ended."""
        entry = self._refusing[to]
        if entry.is_tried or time.monotonic() < entry.next_s:
            return False
        entry.is_tried = True
        return True

    def end_try(self, to: str) -> None:
        """The one message has a fate, or the broker was away."""
        if to in self._refusing:
            self._refusing[to].is_tried = False

    def note(self, to: str, routing: Routing, label: str) -> None:
        """What became of a message that was sent there."""
        entry = self._refusing.get(to)
        if routing is Routing.REFUSED:
            self.count_refused(label)
            self._refuse(to, entry, label)
        elif entry is not None:
            self._forget(to)
            if len(self._took_again) < MOST_KNOWN:
                self._took_again.add(to)
            log.info("destination_took_again", queue=to[:64], refused_s=round(time.monotonic() - entry.since_s, 1))

    def take_open(self) -> set[str]:
        """The queues that have begun to take messages again since this was last asked."""
        opened, self._took_again = self._took_again, set()
        return {to for to in opened if to not in self._refusing}  # it may be full again by now

    def count_refused(self, label: str, count: int = 1) -> None:
        self._metrics.refused.labels(self._known(label)).inc(count)

    def forget_old(self) -> None:
        """Forget queues that nothing is sent to any more."""
        long_ago_s = time.monotonic() - FORGOTTEN_AFTER_S
        while self._refusing and next(iter(self._refusing.values())).refused_s < long_ago_s:
            self._forget(next(iter(self._refusing)))

    def _refuse(self, to: str, entry: _Refusing | None, label: str) -> None:
        now_s = time.monotonic()
        if entry is None:
            entry = self._refusing[to] = _Refusing(self._known(label), now_s, now_s, SHORTEST_PAUSE_S, now_s)
            self._count(entry.label, 1)
            log.warning("destination_refused", queue=to[:64])
        elif entry.is_tried:
            entry.pause_s = min(entry.pause_s * 2, LONGEST_PAUSE_S)
        else:
            return  # it was under way when the first one was refused
        entry.is_tried, entry.refused_s = False, now_s
        entry.next_s = now_s + entry.pause_s * random.uniform(0.5, 1.0)
        self._refusing.move_to_end(to)
        if len(self._refusing) > MOST_KNOWN:
            self._forget(next(iter(self._refusing)))

    def _forget(self, to: str) -> None:
        self._count(self._refusing.pop(to).label, -1)

    def _count(self, label: str, by: int) -> None:
        self._counts[label] += by
        self._metrics.refusing.labels(label).set(self._counts[label])

    def _known(self, label: str) -> str:
        """Labels are peers, and those are few; where names are made up at run time they stay few."""
        if label not in self._counts and len(self._counts) >= MOST_LABELS:
            return "others"
        self._counts[label] += 0
        return label
