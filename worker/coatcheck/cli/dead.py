"""`coatcheck dead ls | show | redrive | drop`: messages that could not be dealt with, and what to do with them.

A letter is redriven in this order: published to the queue it was on, confirmed by the broker, then acked off the dead
queue. After a crash in between it is in both places, and redriving it again is harmless: it keeps its message_id, so it
is the same request.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import click

from coatcheck.broker import connect
from coatcheck.broker.headers import DEAD_AT, DETAIL, QUEUE, REASON, SIZE
from coatcheck.broker.port import Broker, Delivery, Message, Outgoing, Routing
from coatcheck.broker.topology import Names
from coatcheck.broker.wire import revive
from coatcheck.cli.options import CONNECT_BUDGET, Command, broker_option, json_option, load_settings
from coatcheck.cli.output import duration, emit_json, moment, read_message, say, say_block, say_facts, say_table
from coatcheck.errors import MalformedMessage, UsageError
from coatcheck.worker import servers
from coatcheck.worker.redaction import clean

LARGEST_BODY = 128 * 1024 * 1024
"""A message may be dead because it was over the limit; redriving it must not fail for the same reason here."""
LONGEST_BODY = 2_000
MOST_LISTED = 10
MOST_SEARCHED = 10_000
BATCH_SIZE = 500


@click.group()
def dead() -> None:
    """Look after messages that no service could deal with.

    A message that breaks the contract (malformed, too large, of an unknown kind) goes to the dead-letter queue of its
    service, with the reason. It stays there until you redrive it, after the cause is gone, or drop it.

    \b
    Example:
      coatcheck dead ls research
      coatcheck dead redrive research --all --reason undecodable
    """


# --- looking ---


@dead.command("ls")
@click.argument("service")
@click.option(
    "--limit", type=click.IntRange(1, MOST_SEARCHED), default=50, metavar="N", help="At most so many.  [default: 50]"
)
@broker_option
@json_option
def ls(service: str, limit: int, broker: str | None, as_json: bool) -> None:
    """List the dead letters of SERVICE, the oldest first.

    \b
    Example:
      coatcheck dead ls research --json
    """

    async def run() -> tuple[int, list[Letter]]:
        async with _connected(broker) as connection:
            return await count_letters(connection, service), await read_letters(connection, service, limit=limit)

    total, found = asyncio.run(run())
    if as_json:
        emit_json({"service": service, "total": total, "letters": [_document(letter) for letter in found]})
        return
    if found:
        titles = ("#", "ID", "REASON", "DETAIL", "QUEUE", "AGE", "BYTES")
        say_table(titles, [_row(number, letter) for number, letter in enumerate(found, start=1)])
    more = f"; the first {len(found)} are shown, see --limit" if total > len(found) else ""
    say(f"{total} dead letter{'' if total == 1 else 's'}{more}", err=True, style="dim")


@dead.command("show", short_help="Show one dead letter.")
@click.argument("service")
@click.argument("letter")
@click.option("--full", is_flag=True, help="Cut nothing off, however long.")
@broker_option
@json_option
def show(*, service: str, letter: str, full: bool, broker: str | None, as_json: bool) -> None:
    """Show one dead letter of SERVICE: why it is dead, its properties, its body.

    LETTER is its id, the beginning of it, or its number in `coatcheck dead ls`.

    \b
    Example:
      coatcheck dead show research 1
    """

    async def run() -> list[Letter]:
        async with _connected(broker) as connection:
            await count_letters(connection, service)
            return await read_letters(connection, service, limit=MOST_SEARCHED)

    found = _pick(asyncio.run(run()), letter)
    if as_json:
        message = found.message
        emit_json(_document(found) | {"headers": dict(message.headers), "body": read_message(message).as_json()})
    else:
        _print_letter(found, limit=None if full else LONGEST_BODY)


def _pick(found: Sequence[Letter], written: str) -> Letter:
    """The letter meant: by whole id, by number, or by a beginning that fits no other."""
    for letter in found:
        if letter.letter_id == written:
            return letter
    if written.isdecimal() and 1 <= int(written) <= len(found):
        return found[int(written) - 1]
    fitting = {letter.letter_id: letter for letter in found if letter.letter_id.startswith(written)}
    if len(fitting) > 1:
        listed = "\n".join(f"  {clean(letter_id)}" for letter_id in list(fitting)[:MOST_LISTED])
        raise click.UsageError(f"{written!r} fits more than one dead letter:\n{listed}")
    if not fitting:
        raise click.ClickException(f"there is no dead letter {written!r}; `coatcheck dead ls` lists them")
    return next(iter(fitting.values()))


def _print_letter(letter: Letter, *, limit: int | None) -> None:
    message = letter.message
    say_facts(
        [
            ("id", letter.letter_id),
            ("reason", letter.reason or "(unknown)"),
            ("detail", letter.detail),
            ("queue", letter.queue or "(unknown: it cannot be redriven)"),
            ("dead since", moment(letter.dead_at)),
            ("type", message.type),
            ("correlation id", message.correlation_id),
            ("reply to", message.reply_to),
            ("content type", message.content_type),
            ("encoding", message.content_encoding),
            *((name, str(value)) for name, value in sorted(message.headers.items())),
        ]
    )
    size, kept = message.headers.get(SIZE), len(message.body)
    whole = f"the first {kept} of {str(size)[:20]}" if size is not None else str(kept)
    say(f"\nBody ({whole} bytes)", style="bold")
    payload = read_message(message)
    if payload.error is not None:  # it may well be what the letter died of
        say_block(payload.error)
        shown = message.body if limit is None else message.body[:limit]
        say_block(f"{shown.decode('utf-8', 'backslashreplace')}{' …' if len(shown) < len(message.body) else ''}")
    else:
        say_block(payload.as_text(limit))


def _row(number: int, letter: Letter) -> list[str]:
    age = "" if letter.dead_at is None else duration(datetime.now(UTC) - letter.dead_at)
    return [
        str(number),
        letter.letter_id,
        letter.reason,
        letter.detail,
        letter.queue,
        age,
        str(len(letter.message.body)),
    ]


def _document(letter: Letter) -> dict[str, Any]:
    message = letter.message
    return {
        "id": letter.letter_id,
        "reason": letter.reason or None,
        "detail": letter.detail or None,
        "queue": letter.queue or None,
        "dead_at": letter.dead_at,
        "bytes": len(message.body),
        "type": message.type,
        "correlation_id": message.correlation_id,
        "reply_to": message.reply_to,
        "content_type": message.content_type,
    }


# --- acting ---


def _choosing(command: Command) -> Command:
    """Add what redrive and drop have in common: which letters, and whether to ask first."""
    options: list[Callable[[Command], Command]] = [
        click.argument("service"),
        click.argument("ids", nargs=-1, metavar="[ID]…"),
        click.option("--all", "takes_all", is_flag=True, help="All of them, instead of naming IDs."),
        click.option("--reason", metavar="CODE", help="With --all: only those that are dead for this reason."),
        click.option("--yes", is_flag=True, help="Do not ask first."),
        broker_option,
        json_option,
    ]
    for option in reversed(options):
        command = option(command)
    return command


@dead.command("redrive")
@_choosing
def redrive(**options: Any) -> None:
    """Send dead letters back to the queues they came from.

    Do it when what killed them is fixed. Each is confirmed by the broker before it leaves the dead-letter queue; killed
    half way, nothing is lost, and redriving again does no harm.

    \b
    Example:
      coatcheck dead redrive research --all --reason oversized --yes
    """
    _act(redrive_letters, "Redrive", "redriven", **options)


@dead.command("drop")
@_choosing
def drop(**options: Any) -> None:
    """Delete dead letters for good.

    \b
    Example:
      coatcheck dead drop research 5c1f0c52e7b04d1f9d6a-17
    """
    _act(drop_letters, "Drop", "dropped", **options)


def _act(
    action: Action,
    verb: str,
    done: str,
    *,
    service: str,
    ids: tuple[str, ...],
    takes_all: bool,
    reason: str | None,
    yes: bool,
    broker: str | None,
    as_json: bool,
) -> None:
    if takes_all == bool(ids):
        raise click.UsageError("name the ids of dead letters, or say --all")
    if reason is not None and not takes_all:
        raise click.UsageError("--reason goes with --all")

    async def count() -> int:
        async with _connected(broker) as connection:
            return await count_letters(connection, service)

    async def run() -> list[LetterOutcome]:
        async with _connected(broker) as connection:
            return await settle_letters(connection, service, lambda letter: _is_meant(letter, ids, reason), action)

    if not yes:
        which = f"{len(ids)} of" if ids else (f"all with reason {reason} among" if reason else "all of")
        _confirm(f"{verb} {which} the {asyncio.run(count())} dead letters of {service}?")
    outcomes = asyncio.run(run())
    _report(outcomes, ids, done=done, as_json=as_json)


def _is_meant(letter: Letter, ids: tuple[str, ...], reason: str | None) -> bool:
    if ids:
        return letter.letter_id in ids
    return reason is None or letter.reason == reason


def _confirm(question: str) -> None:
    """Ask; anything but yes leaves with 1."""
    try:
        is_sure = click.confirm(question, err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        raise click.UsageError("there is no terminal to confirm on; add --yes") from None
    if not is_sure:
        raise click.ClickException("nothing was done")


def _report(outcomes: Sequence[LetterOutcome], ids: tuple[str, ...], *, done: str, as_json: bool) -> None:
    """Say what happened; letters that stayed or were not found make the exit code 1."""
    gone = [outcome for outcome in outcomes if outcome.trouble is None]
    stayed = [outcome for outcome in outcomes if outcome.trouble is not None]
    missing = sorted(set(ids) - {outcome.letter_id for outcome in outcomes})
    if as_json:
        kept = [{"id": outcome.letter_id, "trouble": outcome.trouble} for outcome in stayed]
        emit_json({done: [outcome.letter_id for outcome in gone], "kept": kept, "not_found": missing})
    else:
        say(f"{len(gone)} {done}.")
        for outcome in stayed:
            say(f"Error: {outcome.letter_id} stays: {outcome.trouble}", err=True)
        for letter_id in missing:
            say(f"Error: there is no dead letter {letter_id}", err=True)
    if stayed or missing:
        click.get_current_context().exit(1)


@asynccontextmanager
async def _connected(url: str | None) -> AsyncIterator[Broker]:
    settings = await servers.settle(load_settings(broker=url))
    async with connect(settings.broker, connect_budget=CONNECT_BUDGET, max_body=LARGEST_BODY) as connection:
        yield connection


# --- letters ---


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead message and why it is dead."""

    letter_id: str
    """Its message_id; a message without one is named by a digest of it."""
    message: Message
    reason: str
    detail: str
    queue: str
    dead_at: datetime | None
    service: str = ""
    """Whose dead letter it is."""


@dataclass(frozen=True, slots=True)
class LetterOutcome:
    """What became of a chosen letter. `trouble`: why it is still there; None: it is gone from the dead queue."""

    letter_id: str
    reason: str
    queue: str
    trouble: str | None


Action = Callable[[Broker, Sequence[Letter]], Awaitable[list[str | None]]]
"""Acts on letters and says for each what the trouble is, or None: then it may be acked."""


async def count_letters(broker: Broker, service: str) -> int:
    """How many dead letters a service has. Raises UsageError if it has no queue for them."""
    queue = Names(service).dead
    depth = await broker.depth(queue)
    if depth is None:
        raise UsageError(f"there is no queue {queue!r} on this broker; a worker of {service!r} makes it when it starts")
    return depth


async def read_letters(broker: Broker, service: str, *, limit: int) -> list[Letter]:
    """Read up to `limit` letters, the oldest first, and leave them where they are."""
    async with broker.browse(Names(service).dead, limit) as deliveries:
        letters = [read_letter(delivery.message, service) for delivery in deliveries]
    never = datetime.max.replace(tzinfo=UTC)
    return sorted(letters, key=lambda letter: (letter.dead_at or never, letter.letter_id))


async def settle_letters(
    broker: Broker, service: str, choose: Callable[[Letter], bool], act: Action
) -> list[LetterOutcome]:
    """Act on every letter that is chosen, among those that are there now; the rest stay.

    Batches with letters that stay are kept until the end, or the same ones would come up again. What arrives meanwhile
    (a redriven message may die again at once) is left for the next time.
    """
    left_count = await count_letters(broker, service)
    outcomes: list[LetterOutcome] = []
    async with AsyncExitStack() as kept:
        while left_count > 0:
            async with AsyncExitStack() as batch:
                browsing = broker.browse(Names(service).dead, min(left_count, BATCH_SIZE))
                deliveries = await batch.enter_async_context(browsing)
                if not deliveries:
                    break
                left_count -= len(deliveries)
                outcomes += await _settle_batch(broker, service, deliveries, choose=choose, act=act)
                if not all(delivery.is_settled for delivery in deliveries):
                    deliveries.clear()  # lets go of their bodies; the broker knows what it gets back
                    kept.push_async_callback(batch.pop_all().aclose)
    return outcomes


async def _settle_batch(
    broker: Broker, service: str, deliveries: Sequence[Delivery], *, choose: Callable[[Letter], bool], act: Action
) -> list[LetterOutcome]:
    chosen = [(delivery, letter) for delivery in deliveries if choose(letter := read_letter(delivery.message, service))]
    troubles = await act(broker, [letter for _, letter in chosen]) if chosen else []
    for (delivery, _), trouble in zip(chosen, troubles, strict=True):
        if trouble is None:
            delivery.ack()
    return [
        LetterOutcome(letter.letter_id, letter.reason, letter.queue, trouble)
        for (_, letter), trouble in zip(chosen, troubles, strict=True)
    ]


async def redrive_letters(broker: Broker, letters: Sequence[Letter]) -> list[str | None]:
    """Publish letters to the queues they were on; those that have no way back are told apart.

    Any user who may publish can forge a letter, and we would publish it with an operator's rights. So a way back leads
    to a queue of the service itself; only what the service sent in vain goes elsewhere, to a peer's queue.
    """
    troubles: list[str | None] = [None] * len(letters)
    ways: dict[int, Outgoing] = {}
    for index, letter in enumerate(letters):
        try:
            way = revive(letter.message)
        except MalformedMessage as error:
            troubles[index] = error.detail
            continue
        if letter.reason == "no_route" or not letter.service or way.to in Names(letter.service).queues:
            ways[index] = way
        else:
            troubles[index] = f"{way.to!r} is no queue of {letter.service}, so it cannot have been there"
    routings = await broker.publish(list(ways.values()))
    for index, routing in zip(ways, routings, strict=True):
        if routing is Routing.NO_ROUTE:
            troubles[index] = f"its queue {ways[index].to!r} is gone"
        elif routing is Routing.REFUSED:
            troubles[index] = f"its queue {ways[index].to!r} does not take it: it is full, or away"
    return troubles


async def drop_letters(broker: Broker, letters: Sequence[Letter]) -> list[str | None]:
    """Let letters go for good."""
    return [None] * len(letters)


def read_letter(message: Message, service: str = "") -> Letter:
    """Read a dead letter; what it does not say is empty."""
    return Letter(
        letter_id=message.message_id or f"sha-{_digest(message)}",
        message=message,
        reason=_header_text(message, REASON),
        detail=_header_text(message, DETAIL),
        queue=_header_text(message, QUEUE),
        dead_at=_instant(_header_text(message, DEAD_AT)),
        service=service,
    )


def _header_text(message: Message, header: str) -> str:
    value = message.headers.get(header)
    return "" if value is None else str(value)


def _instant(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
        return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None


def _digest(message: Message) -> str:
    parts = (message.body, *(str(it).encode() for it in (message.correlation_id, message.reply_to, message.type)))
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
