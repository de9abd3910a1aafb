"""What the peers and clients of a trial need of a broker: declare and consume, send, and notice that it is gone.

    amqp_wires   plain AMQP, in two libraries: peers use aio-pika, clients use pika. Nothing of Coatcheck is imported
    port_wires   Coatcheck's own broker port, for brokers that speak no protocol of their own

A wire is one connection. Once it is broken it stays so: whoever used it closes it and opens another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

CONNECT_S = 10.0


@dataclass(frozen=True)
class Letter:
    """A message as peers and clients see it, whatever carried it."""

    body: bytes
    correlation_id: str | None = None
    reply_to: str | None = None
    content_type: str | None = None
    type: str | None = None
    message_id: str | None = None
    headers: Mapping[str, Any] = field(default_factory=dict)


Ack = Callable[[], Awaitable[None]]
OnLetter = Callable[[Letter, Ack], Coroutine[Any, Any, None]]


class PeerWire(Protocol):
    """A peer's connection. Whatever is not acked when it is closed comes again."""

    broken: asyncio.Event

    async def open(self) -> None: ...

    async def consume(self, queue: str, *, on_request: OnLetter, on_control: OnLetter) -> None:
        """Make a peer's queue and its control queue, and have both delivered."""

    async def send(self, to: str, letter: Letter) -> None:
        """Return when the broker has taken it over, persistent; raise if there is no such queue."""

    async def close(self) -> None: ...


class ClientWire(Protocol):
    """A client's connection, which blocks. It is open, and its replies are consumed, from when it is made."""

    def send(self, to: str, letter: Letter) -> None:
        """As a peer's."""

    def pump(self, for_s: float) -> None:
        """Hand over the replies that have come, and ack each after that; raise if the connection is gone."""

    def close(self) -> None: ...


OnReply = Callable[[Letter], None]


@dataclass(frozen=True)
class Wires:
    """One kind of them, and what each raises when its connection cannot be had or is gone."""

    make_peer: Callable[[str], PeerWire]
    make_client: Callable[[str, str, OnReply], ClientWire]
    peer_lost: tuple[type[Exception], ...]
    client_lost: tuple[type[Exception], ...]


def wires_for(url: str) -> Wires:
    """The wires to a broker, by the scheme of its address. Only what is needed is imported."""
    if urlsplit(url).scheme == "amqp":
        from tests.chaos import amqp_wires

        return amqp_wires.WIRES
    from tests.chaos import port_wires

    return port_wires.WIRES
