"""One AMQP connection (`AmqpLink`), its address, and the supervisor that always has the next one ready (`AmqpUplink`).

    down ──connect, with back-off──► up ──socket closed, heartbeats missed, or abort()──► down …
                                      └── blocked by an alarm ◄──► unblocked

A link is lost once and for good. What used it finds its `lost` event set, drops what hung on it, and asks the uplink
for another. Nothing is carried over, so nothing can be carried over wrongly; that is why aio-pika's robust layer is not
used: it reopens channels under deliveries that belong to the old ones. Its plain connection is: it opens ours, and the
channels on which queues are declared and looked at. Messages go past it, on channels of its driver, aiormq: see
`socket.py` and docs/decisions/0017.

The options of an address are those RabbitMQ itself documents for AMQP URIs: `cacertfile`, `certfile`, `keyfile` and
`verify` (`verify_peer`, the default, or `verify_none`).
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import aio_pika
import aiormq
from aiormq.channel import Channel
from aiormq.connection import Connection
from aiormq.exceptions import AMQPChannelError, AMQPError, ChannelInvalidStateError
from yarl import URL

from coatcheck import tls
from coatcheck.broker.amqp.socket import ChannelReceiver, Wire, WireFactory
from coatcheck.broker.background import reap, spawn, wait_first
from coatcheck.broker.port import BrokerStats
from coatcheck.broker.reconnect import Uplink
from coatcheck.broker.settings import BrokerSettings
from coatcheck.errors import BrokerUnavailable, InvalidSettings, UsageError
from coatcheck.log import get_logger

T = TypeVar("T")
log = get_logger(__name__)

DRIVER_ERRORS = (AMQPError, ChannelInvalidStateError, OSError, RuntimeError)
_REFUSALS = (
    aiormq.exceptions.ProbableAuthenticationError,
    aiormq.exceptions.AuthenticationError,
    aiormq.exceptions.ConnectionNotAllowed,
)
_HARD_CLOSE_AFTER_S = 3.0
_NEEDED = ("publisher_confirms", "basic.nack", "consumer_cancel_notify")
TLS_OPTIONS = tls.Options(ca="cacertfile", cert="certfile", key="keyfile")
_VERIFY = "verify"
_KNOWN = (TLS_OPTIONS.ca, TLS_OPTIONS.cert, TLS_OPTIONS.key, _VERIFY)
_SHAPE = "write amqp://user:password@host:port/vhost, with %40 for an @ and %2F for a / inside user or password"


# --- addresses ---


@dataclass(frozen=True, slots=True)
class AmqpAddress:
    """An address that was checked. `url` holds the password; `place` is for messages and does not."""

    url: URL
    context: ssl.SSLContext | None
    place: str
    risk: str | None
    """What an eavesdropper on the way could do; None: nothing, or there is no way."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an address. Raises InvalidSettings, which quotes nothing that may be a password."""
        try:
            url = URL(text)
            host, port = url.host, url.port
        except ValueError:
            raise InvalidSettings(f"the broker address is not a URL; {_SHAPE}") from None
        if not host:
            raise InvalidSettings(f"the broker address names no host; {_SHAPE}")
        options = dict(url.query)
        if unknown := sorted(options.keys() - set(_KNOWN)):
            raise InvalidSettings(
                f"unknown options in the broker address: {', '.join(unknown)}; known are {', '.join(_KNOWN)}"
            )
        is_tls = url.scheme == "amqps"
        if options and not is_tls:
            raise InvalidSettings(f"{', '.join(options)} in the broker address: TLS goes with amqps://, not amqp://")
        verify = options.get(_VERIFY, "verify_peer")
        if verify not in {"verify_peer", "verify_none"}:
            raise InvalidSettings("verify in the broker address must be verify_peer or verify_none")
        return cls(
            url=url.with_query(None),
            context=_context(options, verifies=verify == "verify_peer") if is_tls else None,
            place=f"{url.scheme}://{host}{f':{port}' if port else ''}{url.path}",
            risk=_risk(host, is_tls=is_tls, is_verified=verify == "verify_peer"),
        )


def _context(options: dict[str, str], *, verifies: bool) -> ssl.SSLContext:
    return tls.make_context(
        TLS_OPTIONS,
        ca=options.get(TLS_OPTIONS.ca),
        cert=options.get(TLS_OPTIONS.cert),
        key=options.get(TLS_OPTIONS.key),
        verifies=verifies,
    )


def _risk(host: str, *, is_tls: bool, is_verified: bool) -> str | None:
    if tls.is_local(host) or (is_tls and is_verified):
        return None
    if is_tls:
        return "encrypted, but the server's certificate is not verified; remove verify=verify_none"
    return "not encrypted; use amqps://"


# --- errors ---


async def genuine(work: Awaitable[T]) -> T:
    """Await a driver call, and set right what it does to cancellation.

    When a connection is stuck, aiormq cancels the futures inside its calls. Left alone, that `CancelledError` would
    slip past every `except Exception` and end the calling loop in silence: here it becomes a `ConnectionError`.
    The other way round, `asyncio.wait_for` before Python 3.12 drops a cancellation that comes together with the answer,
    and a loop that was told to end goes on for ever: here it is raised after all. And what the driver raises that is no
    error of its own kind would end the loops that reconnect and consume, and leave a process that is deaf for good.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        answer = await work
    except asyncio.CancelledError as exc:
        if task.cancelling() == 0:
            raise ConnectionError("the connection was lost while waiting for the broker") from exc
        raise
    except StopAsyncIteration as exc:  # how aiormq says that a handshake came to an end before its time
        raise ConnectionError("the broker hung up during the handshake") from exc
    except Exception as exc:
        if type(exc) is Exception:  # how it says that a channel was closed without a reason
            raise ConnectionError("the channel was closed") from exc
        raise
    if task.cancelling() > before:
        raise asyncio.CancelledError
    return answer


@asynccontextmanager
async def translating(what: str) -> AsyncIterator[None]:
    """Turn every way the driver can fail into `BrokerUnavailable`, said once, with its cause.

    A queue name that the driver refuses, before anything is sent, is a `UsageError`.
    """
    try:
        yield
    except Exception as exc:
        # On a channel that was closed without a reason the driver raises a bare Exception.
        if isinstance(exc, DRIVER_ERRORS) or type(exc) is Exception:
            raise BrokerUnavailable(f"{what}: {describe(exc)}") from exc
        if isinstance(exc, ValueError):
            raise UsageError(f"{what}: AMQP cannot name such a queue ({exc})") from exc
        raise


def describe(exc: BaseException) -> str:
    """Say what went wrong in one line; timeouts and bare exceptions have no text of their own."""
    if isinstance(exc, TimeoutError):
        return "no answer in time"
    return tls.explain(exc, TLS_OPTIONS) or str(exc) or repr(exc)


# --- one connection ---


class AmqpLink:
    """One live connection, until `lost` is set."""

    def __init__(self, role: str, stats: BrokerStats) -> None:
        self.role = role
        self.stats = stats
        self.lost = asyncio.Event()
        self.unblocked = asyncio.Event()
        self.unblocked.set()
        self.frame_max = 0
        self.reason = ""
        self.error: BaseException | None = None
        self._on_lost: list[Callable[[], None]] = []
        self._connection: aio_pika.Connection | None = None
        self._driver: Connection | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._factory: WireFactory | None = None

    @classmethod
    async def open(cls, address: AmqpAddress, settings: BrokerSettings, *, role: str, stats: BrokerStats) -> AmqpLink:
        """Connect, handshake included. Raises a driver error after `connect_timeout`."""
        link = cls(role, stats)
        link._factory = WireFactory(address.context, on_alarm=link._on_alarm, on_violation=link.abort)
        connection = aio_pika.Connection(
            address.url.with_query(
                heartbeat=str(int(settings.heartbeat.total_seconds())), name=f"{settings.name} {role}"
            ),
            ssl_context=address.context,
        )
        connection.kwargs["transport_factory"] = link._factory
        try:
            async with asyncio.timeout(settings.connect_timeout.total_seconds()):
                await genuine(connection.connect())
            driver = _get_driver(connection)
            _check_capabilities(driver)
        except BaseException as exc:
            link._hang_up()
            await _discard(connection)
            if link.lost.is_set() and isinstance(exc, Exception):  # the driver sees the end of it, not the cause
                raise ConnectionError(link.reason) from exc
            raise
        link._connection, link._driver = connection, driver
        link.frame_max = driver.connection_tune.frame_max or 0
        driver.closing.add_done_callback(link._on_closed)
        return link

    @property
    def wire(self) -> Wire:
        assert self._factory is not None
        assert self._factory.wire is not None
        return self._factory.wire

    def write(self, frames: bytes) -> None:
        """Write whole frames of channels of ours. On a lost link they vanish."""
        self.wire.write(frames)

    def attach(self, channel: Channel, receiver: ChannelReceiver) -> None:
        """Give a channel's messages and confirms to `receiver` until the channel is closed."""
        self.wire.attach(channel.number, receiver)
        channel.closing.add_done_callback(lambda _: self.wire.detach(channel.number, receiver))

    async def channel(self, *, confirms: bool = False, timeout_s: float) -> Channel:
        """Open a channel for messages. Cancelling or timing out closes that channel, and no other."""
        driver, number = self._get_free_number()
        channel = await genuine(driver.channel(number, publisher_confirms=confirms, timeout=timeout_s))
        assert isinstance(channel, Channel)
        return channel

    async def tool_channel(self) -> aio_pika.Channel:
        """Open a channel for what is not a message. Cancelling or timing out closes that channel, and no other."""
        _, number = self._get_free_number()
        assert self._connection is not None
        channel = self._connection.channel(number, publisher_confirms=False)
        assert isinstance(channel, aio_pika.Channel)
        await genuine(channel.initialize())
        return channel

    def _get_free_number(self) -> tuple[Connection, int]:
        """The lowest that is free: left to itself the driver counts up, past what a broker may allow."""
        assert self._driver is not None
        if self.lost.is_set():
            raise ConnectionError(f"the connection is lost: {self.reason}")
        return self._driver, next(number for number in itertools.count(1) if number not in self._driver.channels)

    async def close_channel(self, channel: Channel | aio_pika.Channel, *, timeout_s: float) -> None:
        """Close a channel; what is unacked on it goes back. A caller that is cancelled leaves, the closing goes on."""
        await asyncio.wait([self.begin_closing(channel, timeout_s=timeout_s)])

    def begin_closing(self, channel: Channel | aio_pika.Channel, *, timeout_s: float) -> asyncio.Task[None]:
        """Close a channel in a task of its own: cancelled half way, the driver would close it twice, and the broker
        answers that by closing the connection.
        """

        async def close() -> None:
            with suppress(*DRIVER_ERRORS):
                if isinstance(channel, Channel):
                    await genuine(channel.close(timeout=timeout_s))
                else:
                    async with asyncio.timeout(timeout_s):
                        await genuine(channel.close())

        closing = spawn(close(), f"broker-channel-{channel.number}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return closing

    def call_when_lost(self, callback: Callable[[], None]) -> None:
        """Call back as soon as the link is lost; at once if it is."""
        if self.lost.is_set():
            callback()
        else:
            self._on_lost.append(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        """Do not call back any more. A link lives for months, its users come and go."""
        if callback in self._on_lost:
            self._on_lost.remove(callback)

    def _on_alarm(self, is_blocked: bool) -> None:
        """The broker is short of memory or disk and reads nothing we publish, until it says otherwise."""
        if is_blocked != self.unblocked.is_set():
            return  # known
        if not is_blocked:
            self.unblocked.set()
            return
        self.unblocked.clear()
        self.stats.blocked_count += 1
        log.warning("broker_blocked", role=self.role)

    def abort(self, reason: str) -> None:
        """Give the connection up now, without a word to the other end, which may be unreachable."""
        if not self.lost.is_set():
            log.warning("broker_link_aborted", role=self.role, reason=reason)
        self._mark_lost(reason)
        self._hang_up()

    async def close(self) -> None:
        """Part from the broker politely, within a few seconds; hard after that. Repeating it is safe."""
        self._mark_lost("closed")
        if self._connection is None:
            return
        with suppress(*DRIVER_ERRORS):
            async with asyncio.timeout(_HARD_CLOSE_AFTER_S):
                await genuine(self._connection.close())
        self._hang_up()
        await _discard(self._connection)
        for closing in tuple(self._closing):
            await reap(closing)

    def _hang_up(self) -> None:
        if self._factory is not None and self._factory.writer is not None:
            self._factory.writer.transport.abort()

    def _on_closed(self, closing: asyncio.Future[Any]) -> None:
        error = None if closing.cancelled() else closing.exception()
        if isinstance(error, asyncio.CancelledError):  # how the driver says that it heard nothing for too long
            error = ConnectionError("the connection was stuck")
        if not self.lost.is_set():
            self.error = error
        self._mark_lost(describe(error) if error else "closed")

    def _mark_lost(self, reason: str) -> None:
        if not self.lost.is_set():
            self.reason = reason
            self.lost.set()
            callbacks, self._on_lost = self._on_lost, []
            for callback in callbacks:
                callback()
        self.unblocked.set()  # there is nothing to wait for on a connection that is gone


def _get_driver(connection: aio_pika.Connection) -> Connection:
    """The driver's connection under aio-pika's."""
    assert connection.transport is not None
    driver = connection.transport.connection
    assert isinstance(driver, Connection)
    return driver


async def _discard(connection: aio_pika.Connection) -> None:
    """Let aio-pika know that a connection is closed, or it closes it in a task of its own when it is collected."""
    connection.transport = None
    await connection.close()


def _check_capabilities(connection: Connection) -> None:
    """Raise ConnectionError for a broker without what we rely on. The driver would fall over it later."""
    offered = connection.server_properties.get("capabilities")
    lacking = [name for name in _NEEDED if not (isinstance(offered, dict) and offered.get(name))]
    if lacking:
        raise ConnectionError(f"the broker lacks {' and '.join(lacking)}; RabbitMQ 3.10 or newer is needed")


# --- and the next one ---


class AmqpUplink(Uplink[AmqpLink]):
    """Keeps one link to a RabbitMQ up."""

    def __init__(self, address: AmqpAddress, settings: BrokerSettings, *, role: str, stats: BrokerStats) -> None:
        super().__init__(settings, role=role, stats=stats)
        self._address = address

    async def start(self) -> None:
        """Connect. Raises `BrokerUnavailable` after `connect_budget`, or at once if the broker refuses who we are."""
        self.begin()
        budget = self._settings.connect_budget
        try:
            await wait_first(self.is_up, self.is_refused, timeout_s=budget.total_seconds())
            if not self.is_up.is_set():
                raise BrokerUnavailable(self.explain(f"cannot connect within {budget.total_seconds():g} s"))
        except BaseException:
            await self.stop()
            raise

    async def on_channel(self, work: Callable[[aio_pika.Channel], Awaitable[T]], what: str) -> T:
        """Do something on a channel made for it alone, under one time limit.

        Raises `BrokerUnavailable`, or `UsageError` for a queue name that AMQP cannot carry.
        """
        rpc_s = self._settings.rpc_timeout.total_seconds()
        async with translating(what):
            link = await self.get(rpc_s)
            async with asyncio.timeout(rpc_s):
                channel = await link.tool_channel()
                try:
                    return await genuine(work(channel))
                finally:
                    await link.close_channel(channel, timeout_s=rpc_s)

    async def _open(self) -> AmqpLink:
        return await AmqpLink.open(self._address, self._settings, role=self.role, stats=self._stats)

    def _is_refusal(self, error: BaseException) -> bool:
        return isinstance(error, _REFUSALS) or tls.is_verification_failure(error)

    def explain(self, what: str) -> str:
        because = f"; last error: {describe(self._last_error)}" if self._last_error else ""
        # With TLS 1.3 a server refuses our certificate, or its absence, after the handshake, and what it says of it is
        # lost when it hangs up.
        if self._address.context is not None and "connection reset" in because.lower():
            because += f"; if it wants a certificate of ours: {TLS_OPTIONS.cert}= and {TLS_OPTIONS.key}="
        return f"broker {self._address.place}: {what}{because}"


def is_channel_error(exc: BaseException) -> bool:
    """Tell a channel the broker closed for cause from a connection that went away."""
    return isinstance(exc, AMQPChannelError)
