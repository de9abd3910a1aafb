"""What became of every fuzzed message: watched where the replica takes it, decides about it and settles it.

Nothing here changes what the replica does. Whatever runs on behalf of a message knows its number, by context.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from typing import Any
from unittest.mock import patch

import structlog
from tests.fuzz.messages import Fuzzed, find_mark

from coatcheck.broker.amqp.session import AmqpDelivery
from coatcheck.broker.memory import MemoryDelivery
from coatcheck.broker.port import Delivery
from coatcheck.store import Store
from coatcheck.worker import Sweeper
from coatcheck.worker.arrivals import Replies, UnderWay
from coatcheck.worker.executor import Executor
from coatcheck.worker.requests import Requests

CURRENT: ContextVar[int | None] = ContextVar("fuzzed message", default=None)

EXPECTED_ERRORS = frozenset({"handler_stayed_unknown", "message_buried", "task_failed", "task_held"})
"""What a person should look at, and what bad input is meant to cause."""
ALARMING_WARNINGS = frozenset(
    {
        "consumer_lost", "dead_letter_not_sent", "order_interrupted", "reply_interrupted", "request_interrupted",
        "settling_interrupted", "store_lost", "sweep_interrupted",
    }
)  # fmt: skip


class Book:
    """One line for each message: what was decided about it, how often it was acked, buried, handed back."""

    def __init__(self) -> None:
        self.sent: dict[int, Fuzzed] = {}
        self.decisions: dict[int, list[str]] = defaultdict(list)
        self.buried: dict[int, list[str]] = defaultdict(list)
        self.acks: Counter[int] = Counter()
        self.requeues: Counter[int] = Counter()
        self.rulings: Counter[str] = Counter()
        """What the rows decided, about other messages too."""
        self.complaints: list[tuple[int | None, str]] = []

    # --- what is watched ---

    def decide(self, decision: str, number: int | None = None) -> None:
        number = CURRENT.get() if number is None else number
        if number is not None:
            self.decisions[number].append(decision)

    def complain(self, what: str) -> None:
        self.complaints.append((CURRENT.get(), what))

    def on_log(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
        """A structlog processor: what should not be said in a healthy world is remembered, nothing is printed."""
        name = event["event"]
        is_error = method in {"error", "critical"} and name not in EXPECTED_ERRORS
        if is_error or name in ALARMING_WARNINGS:
            error = sys.exc_info()[1] if event.get("exc_info") is True else event.get("exc_info")
            facts = {key: value for key, value in event.items() if key not in {"event", "exc_info"}}
            self.complain(f"{name} {facts} {error!r}" if error else f"{name} {facts}")
        raise structlog.DropEvent

    def on_loop_error(self, loop: Any, context: dict[str, Any]) -> None:
        self.complain(f"{context.get('message')}: {context.get('exception')!r} {context.get('task')!r}")

    # --- what it comes to ---

    @property
    def unsettled(self) -> list[int]:
        return [number for number in self.sent if not self.acks[number]]

    def fates(self) -> Counter[str]:
        """How many of the messages to each queue ended how."""
        return Counter(f"{self.sent[number].queue}: {self.fate(number)}" for number in self.sent)

    def fate(self, number: int) -> str:
        if self.buried[number]:
            return f"buried as {self.buried[number][0]}"
        return self.decisions[number][-1] if self.decisions[number] else "gone without a trace"

    def violations(self) -> Iterator[tuple[int | None, str]]:
        """Everything that is wrong, with the message that did it, as far as it can be told."""
        yield from self.complaints
        for number in self.sent:
            said, buried = self.decisions[number], self.buried[number]
            if self.acks[number] != 1:
                yield number, f"acked {self.acks[number]} times; decided {said}, buried {buried}"
            elif self.requeues[number]:
                yield number, f"handed back {self.requeues[number]} times; decided {said}, buried {buried}"
            elif len(buried) > 1:
                yield number, f"buried more than once: {buried}"
            elif buried and set(said) - {"claim: unknown", "accept: conflict"}:
                yield number, f"buried as {buried}, and yet {said}"
            elif not buried and not said:
                yield number, "acked, and nobody decided anything about it"


@contextmanager
def watching(book: Book) -> Iterator[None]:
    """Write down what all replicas and sweepers of this process do."""
    known = structlog.get_config()
    with ExitStack() as stack:
        for owner, name, wrap in _hooks(book):
            stack.enter_context(patch.object(owner, name, wrap(getattr(owner, name))))
        structlog.configure(
            processors=[book.on_log],
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            cache_logger_on_first_use=False,
        )
        try:
            yield
        finally:
            structlog.configure(**known)


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def _hooks(book: Book) -> Iterator[tuple[type, str, Wrap]]:
    yield UnderWay, "take", _knowing
    yield Sweeper, "_on_hint", functools.partial(_hinting, book)
    for kind in (MemoryDelivery, AmqpDelivery):
        yield kind, "ack", functools.partial(_settling, book.acks)
        yield kind, "requeue", functools.partial(_settling, book.requeues)
    for name in ("claim", "accept", "resume", "cancel"):
        yield Store, name, functools.partial(_ruling, book, name)
    yield Executor, "execute", functools.partial(_running, book)
    yield Requests, "_joins", functools.partial(_joining, book)
    yield Replies, "_reattaches", functools.partial(_joining, book)
    yield Requests, "_refuse", functools.partial(_refusing, book)


def _knowing(take: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(take)
    def taken(under_way: UnderWay, receive: Any, delivery: Delivery) -> None:
        context = copy_context()
        context.run(CURRENT.set, find_mark(delivery.message))
        context.run(take, under_way, receive, delivery)

    return taken


def _hinting(book: Book, on_hint: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(on_hint)
    def hinted(sweeper: Sweeper, delivery: Delivery) -> None:
        on_hint(sweeper, delivery)
        number = find_mark(delivery.message)
        if number is not None:
            book.decide("hint", number)

    return hinted


def _settling(counts: Counter[int], settle: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(settle)
    def settled(delivery: Delivery) -> None:
        number = find_mark(delivery.message)
        if number is not None and not delivery.is_settled and not delivery.queue.endswith(".dead"):
            counts[number] += 1
        settle(delivery)

    return settled


def _ruling(book: Book, name: str, ask: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(ask)
    async def ruled(*args: Any) -> Any:
        ruling = await ask(*args)
        book.rulings[f"{name}: {ruling.verdict.value}"] += 1
        book.decide(f"{name}: {ruling.verdict.value}")
        return ruling

    return ruled


def _running(book: Book, execute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(execute)
    async def executed(executor: Executor, live: Any, **options: Any) -> bool:
        is_ours: bool = await execute(executor, live, **options)
        if is_ours:
            book.decide("run")
        return is_ours

    return executed


def _joining(book: Book, joins: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(joins)
    def joined(*args: Any) -> bool:
        is_joined: bool = joins(*args)
        if is_joined:
            book.decide("joined a run")
        return is_joined

    return joined


def _refusing(book: Book, refuse: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(refuse)
    async def refused(requests: Requests, delivery: Delivery, birth: Any, document: dict[str, Any]) -> None:
        await refuse(requests, delivery, birth, document)
        book.decide(f"answered: {document['code']}")

    return refused
