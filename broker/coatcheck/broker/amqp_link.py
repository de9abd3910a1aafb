"""One AMQP connection (`Link`), and the supervisor that always has the next one ready (`Uplink`).

    down ──connect, with back-off──► up ──socket closed, heartbeats missed, or abort()──► down …
                                      └── blocked by an alarm ◄──► unblocked

A link is lost once and for good. Whoever used it finds its `lost` event set, drops what hung on it, and asks the
uplink for another. Nothing is carried over, so nothing can be carried over wrongly; that is why aio-pika's robust
layer is not used: it reopens channels under deliveries that belong to the old ones. We stand on its driver, aiormq,
alone.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import aiormq
import pamqp.frame
import structlog
from aiormq.channel import Channel
from aiormq.connection import Connection, TCPTransportFactory, TLSTransportFactory, TransportFactory
from aiormq.exceptions import AMQPChannelError, AMQPError, ChannelInvalidStateError
from pamqp.commands import Basic
from pamqp.exceptions import PAMQPException
from pamqp.header import ContentHeader
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential
from yarl import URL

from coatcheck import tls
from coatcheck.broker.amqp_address import TLS_OPTIONS, AmqpAddress
from coatcheck.broker.headers import BROKEN
from coatcheck.broker.port import BrokerStats
from coatcheck.broker.settings import BrokerSettings
from coatcheck.errors import BrokerUnavailable

T = TypeVar("T")
log = structlog.get_logger(__name__)

DRIVER_ERRORS = (AMQPError, ChannelInvalidStateError, OSError, RuntimeError)
_REFUSALS = (
    aiormq.exceptions.ProbableAuthenticationError,
    aiormq.exceptions.AuthenticationError,
    aiormq.exceptions.ConnectionNotAllowed,
)
# What pamqp is known to raise on bytes it does not like.
_DECODE_ERRORS = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    OSError,
    RecursionError,
    struct.error,
    PAMQPException,
)
_HARD_CLOSE_AFTER_S = 3.0


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
    """Turn every way the driver can fail into `BrokerUnavailable`, said once, with its cause."""
    try:
        yield
    except Exception as exc:
        # On a channel that was closed without a reason the driver raises a bare Exception.
        if isinstance(exc, DRIVER_ERRORS) or type(exc) is Exception:
            raise BrokerUnavailable(f"{what}: {describe(exc)}") from exc
        raise


def describe(exc: BaseException) -> str:
    """Say what went wrong in one line; timeouts and bare exceptions have no text of their own."""
    if isinstance(exc, TimeoutError):
        return "no answer in time"
    return tls.explain(exc, TLS_OPTIONS) or str(exc) or repr(exc)


def spawn(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Run a long-lived task whose end by a bug is reported, never silent. The caller keeps, cancels and awaits it."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_report_crash)
    return task


def _report_crash(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (exc := task.exception()) is not None:
        log.error("broker_task_crashed", task=task.get_name(), exc_info=exc)


async def reap(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task and wait until it has ended; again if need be, because a library may swallow a cancellation."""
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=1.0)


async def wait_first(*events: asyncio.Event, timeout_s: float | None = None) -> None:
    """Wait until one of the events is set, or the time is over."""
    if any(event.is_set() for event in events):
        return
    waiters = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiters, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiter in waiters:
            waiter.cancel()


# --- transport ---


class CarefulReader:
    """Reads whole AMQP frames for the driver, and repairs those a stranger broke.

    The properties of a message are whatever bytes its sender wrote; RabbitMQ does not look. pamqp raises on text that
    is not UTF-8, on impossible dates and on tables nested too deep, and that ends the *connection*: the broker
    redelivers, and the message kills the next one. So a header frame that cannot be decoded is replaced by one that
    says so, and the message takes the road of all malformed messages, to the dead-letter queue.
    """

    def __init__(self, reader: asyncio.StreamReader, link: Link) -> None:
        self._reader = reader
        self._link = link
        self._frame = b""
        self._offset = 0

    def at_eof(self) -> bool:
        return self._offset >= len(self._frame) and self._reader.at_eof()

    async def read(self, n: int = -1) -> bytes:
        return await self._reader.read(n)

    async def readexactly(self, n: int) -> bytes:
        # The driver reads a frame as 1 + 6 + rest bytes, so its reads always end where a frame ends.
        if self._offset >= len(self._frame):
            self._frame, self._offset = await self._read_frame(), 0
        chunk = self._frame[self._offset : self._offset + n]
        self._offset += n
        return chunk

    async def _read_frame(self) -> bytes:
        head = await self._reader.readexactly(7)
        if head.startswith(b"AMQP"):  # a server of another protocol version; the driver explains
            return head
        kind, channel, size = struct.unpack(">BHI", head)
        frame = head + await self._reader.readexactly(size + 1)
        if kind == 2:
            return self._repaired(frame, channel)
        if kind == 1 and channel == 0:
            self._watch(frame[7:11])
        return frame

    def _watch(self, method: bytes) -> None:
        if method == b"\x00\x0a\x00\x3c":
            self._link.mark_blocked()
        elif method == b"\x00\x0a\x00\x3d":
            self._link.unblocked.set()

    def _repaired(self, frame: bytes, channel: int) -> bytes:
        try:
            pamqp.frame.unmarshal(frame)
        except _DECODE_ERRORS as exc:
            body_size = struct.unpack(">Q", frame[11:19])[0]
            # Its name only: the text of such an error may quote what it could not read, and that may be a secret.
            name = type(exc.__cause__ or exc).__name__
            properties = Basic.Properties(headers={BROKEN: name})
            self._link.stats.undecodable_count += 1
            log.warning("message_properties_undecodable", error=name, body_size=body_size)
            return pamqp.frame.marshal(ContentHeader(body_size=body_size, properties=properties), channel)
        return frame


class _Transport(TransportFactory):
    """Opens the socket the usual way and keeps a hand on it, so that a stuck connection can be dropped hard."""

    def __init__(self, link: Link, inner: TransportFactory) -> None:
        self._link = link
        self._inner = inner

    async def create(self, url: URL, **kwargs: Any) -> tuple[Any, asyncio.StreamWriter]:
        reader, writer = await self._inner.create(url, **kwargs)
        self._link.writer = writer
        return CarefulReader(reader, self._link), writer


# --- one connection ---


class Link:
    """One live connection, until `lost` is set."""

    def __init__(self, role: str, stats: BrokerStats) -> None:
        self.role = role
        self.stats = stats
        self.lost = asyncio.Event()
        self.unblocked = asyncio.Event()
        self.unblocked.set()
        self.writer: asyncio.StreamWriter | None = None
        self.reason = ""
        self.error: BaseException | None = None
        self._on_lost: list[Callable[[], None]] = []
        self._connection: Connection | None = None

    @classmethod
    async def open(cls, address: AmqpAddress, settings: BrokerSettings, *, role: str, stats: BrokerStats) -> Link:
        """Connect, handshake included. Raises a driver error after `connect_timeout`."""
        link = cls(role, stats)
        inner: TransportFactory = TCPTransportFactory() if address.context is None else TLSTransportFactory()
        connection = Connection(
            address.url.with_query(
                heartbeat=str(int(settings.heartbeat.total_seconds())), name=f"{settings.name} {role}"
            ),
            context=address.context,
            transport_factory=_Transport(link, inner),
        )
        try:
            async with asyncio.timeout(settings.connect_timeout.total_seconds()):
                await genuine(connection.connect())
        except BaseException:
            if link.writer is not None:
                link.writer.transport.abort()
            raise
        link._connection = connection
        connection.closing.add_done_callback(link._on_closed)
        return link

    async def channel(self, *, confirms: bool = False, timeout_s: float) -> Channel:
        """Open a channel. Cancelling or timing out closes that channel, and no other."""
        assert self._connection is not None
        if self.lost.is_set():
            raise ConnectionError(f"the connection is lost: {self.reason}")
        opening = self._connection.channel(publisher_confirms=confirms, on_return_raises=confirms, timeout=timeout_s)
        channel = await genuine(opening)
        assert isinstance(channel, Channel)
        return channel

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

    def mark_blocked(self) -> None:
        """The broker is short of memory or disk and reads nothing we publish, until it says otherwise."""
        self.unblocked.clear()
        self.stats.blocked_count += 1
        log.warning("broker_blocked", role=self.role)

    def abort(self, reason: str) -> None:
        """Give the connection up now, without a word to the other end, which may be unreachable."""
        if not self.lost.is_set():
            log.warning("broker_link_aborted", role=self.role, reason=reason)
        self._mark_lost(reason)
        if self.writer is not None:
            self.writer.transport.abort()

    async def close(self) -> None:
        """Part from the broker politely, within a few seconds; hard after that. Repeating it is safe."""
        self._mark_lost("closed")
        if self._connection is None:
            return
        with suppress(*DRIVER_ERRORS):
            async with asyncio.timeout(_HARD_CLOSE_AFTER_S):
                await genuine(self._connection.close())
        if self.writer is not None:
            self.writer.transport.abort()

    def _on_closed(self, closing: asyncio.Future[Any]) -> None:
        error = None if closing.cancelled() else closing.exception()
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
        self.unblocked.set()  # nobody waits for a connection that is gone


# --- and the next one ---


class Uplink:
    """Keeps one link up, for ever, while started."""

    def __init__(self, address: AmqpAddress, settings: BrokerSettings, *, role: str, stats: BrokerStats) -> None:
        self.role = role
        self._address = address
        self._settings = settings
        self._stats = stats
        self._link: Link | None = None
        self._is_up = asyncio.Event()
        self._is_refused = asyncio.Event()
        self._last_error: BaseException | None = None
        self._was_connected = False
        self._task: asyncio.Task[None] | None = None

    @property
    def link(self) -> Link | None:
        """The live link, if there is one at this moment."""
        return self._link if self._link is not None and not self._link.lost.is_set() else None

    async def start(self) -> None:
        """Connect. Raises `BrokerUnavailable` after `connect_budget`, or at once if the broker refuses who we are."""
        self.begin()
        budget = self._settings.connect_budget
        try:
            await wait_first(self._is_up, self._is_refused, timeout_s=budget.total_seconds())
            if not self._is_up.is_set():
                raise BrokerUnavailable(self._explain(f"cannot connect within {budget.total_seconds():g} s"))
        except BaseException:
            await self.stop()
            raise

    def begin(self) -> None:
        """Start connecting, without waiting for it. Repeating it is safe."""
        if self._task is None:
            self._task = spawn(self._run(), f"broker-uplink-{self.role}")

    async def stop(self) -> None:
        """Disconnect and stay so. Repeating it is safe."""
        task, self._task = self._task, None
        await reap(task)
        link, self._link = self._link, None
        self._is_up.clear()
        if link is not None:
            await link.close()

    async def get(self, timeout_s: float | None = None) -> Link:
        """Give the live link, waiting for one.

        Raises `BrokerUnavailable` when the time is over or nothing was started.
        """
        if (link := self.link) is not None:
            return link
        if self._task is None:
            raise BrokerUnavailable(self._explain("not started"))
        try:
            async with asyncio.timeout(timeout_s):
                while (link := self.link) is None:
                    await self._is_up.wait()
                    await asyncio.sleep(0)  # a link just lost stays "up" until its supervisor has run
        except TimeoutError as exc:
            raise BrokerUnavailable(self._explain("not connected")) from exc
        return link

    async def _run(self) -> None:
        while True:
            link = await self._connect()
            self._link = link
            self._is_up.set()
            await link.lost.wait()
            self._is_up.clear()
            self._stats.lost_count += 1
            log.warning("broker_link_lost", role=self.role, reason=link.reason)
            await link.close()

    async def _connect(self) -> Link:
        settings = self._settings
        retrying = AsyncRetrying(
            # Whatever it is: nobody else would ever connect again. At the start the budget ends it, and says why.
            retry=retry_if_exception_type(Exception),
            wait=wait_random_exponential(
                multiplier=settings.backoff_min.total_seconds(),
                max=settings.backoff_max.total_seconds(),
                min=min(settings.backoff_min, settings.backoff_max).total_seconds(),
            ),
            before_sleep=self._on_connect_failed,
        )
        link: Link = await retrying(Link.open, self._address, settings, role=self.role, stats=self._stats)
        self._stats.connect_count += 1
        self._stats.reconnect_count += self._was_connected
        self._was_connected = True
        log.info("broker_connected", role=self.role)
        return link

    def _on_connect_failed(self, state: RetryCallState) -> None:
        self._stats.connect_failure_count += 1
        self._last_error = state.outcome.exception() if state.outcome else None
        if self._last_error is not None and _is_refusal(self._last_error):
            self._is_refused.set()
        log.warning("broker_connect_failed", role=self.role, error=repr(self._last_error), attempt=state.attempt_number)

    def _explain(self, what: str) -> str:
        because = f"; last error: {describe(self._last_error)}" if self._last_error else ""
        # With TLS 1.3 a server refuses our certificate, or its absence, after the handshake, and what it says of it is
        # lost when it hangs up.
        if self._address.context is not None and "connection reset" in because.lower():
            because += f"; if it wants a certificate of ours: {TLS_OPTIONS.cert}= and {TLS_OPTIONS.key}="
        return f"broker {self._address.place}: {what}{because}"


def _is_refusal(error: BaseException) -> bool:
    """Tell whether trying again is pointless: the broker does not want us, or is not who it should be."""
    return isinstance(error, _REFUSALS) or tls.is_verification_failure(error)


def is_channel_error(exc: BaseException) -> bool:
    """Tell a channel the broker closed for cause from a connection that went away."""
    return isinstance(exc, AMQPChannelError)
