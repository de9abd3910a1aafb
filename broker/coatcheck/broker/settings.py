"""Settings of a broker connection: one frozen value, checked once, at construction."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from coatcheck.errors import InvalidSettings

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """How patient a broker connection is. Durations may be given in seconds; they are kept as `timedelta`."""

    heartbeat: timedelta = timedelta(seconds=15)
    """Three missed ones and a connection counts as dead. Both ends use it."""
    connect_timeout: timedelta = timedelta(seconds=5)
    """One attempt to connect, the AMQP handshake included."""
    connect_budget: timedelta = timedelta(seconds=30)
    """All attempts of `start` together; after that it raises. A started broker retries for ever."""
    backoff_min: timedelta = timedelta(milliseconds=100)
    backoff_max: timedelta = timedelta(seconds=10)
    """Waits between attempts grow from min to max, with jitter, so that a fleet does not return in step."""
    publish_timeout: timedelta = timedelta(seconds=10)
    """Connecting if need be, sending and being confirmed, for a whole batch."""
    rpc_timeout: timedelta = timedelta(seconds=10)
    """One answer to a declare, a consume, a cancel."""
    watchdog_interval: timedelta = timedelta(seconds=30)
    """A consumer silent for this long, with room, on a queue that is not empty, is rebuilt."""
    max_body: int = MEBIBYTE
    """The largest body published; dead letters are exempt. Of a larger one that arrives, only the beginning is read."""
    declares: bool = True
    """Make the queues of services and sweepers. False: only look whether they are there, for a user who may not."""
    name: str = "coatcheck"
    """What the broker's own tools show for the connections."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "timedelta":
                object.__setattr__(self, field.name, _checked_duration(field.name, value))
        if not timedelta(seconds=1) <= self.heartbeat <= timedelta(hours=1):
            raise InvalidSettings(f"heartbeat is {self.heartbeat}; it must be between 1 second and 1 hour")
        if self.backoff_max < self.backoff_min:
            raise InvalidSettings(
                f"backoff_max is {self.backoff_max}; backoff_min is {self.backoff_min}, more than that"
            )
        if not 1 <= self.max_body <= 128 * MEBIBYTE:
            raise InvalidSettings(f"max_body is {self.max_body!r}; it must be an int between 1 and {128 * MEBIBYTE}")


def make_settings(settings: dict[str, Any]) -> BrokerSettings:
    """Build settings from keyword arguments; an unknown one is named together with the known ones."""
    known = {field.name for field in fields(BrokerSettings)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise InvalidSettings(f"unknown broker setting {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return BrokerSettings(**settings)


def _checked_duration(name: str, value: Any) -> timedelta:
    if isinstance(value, bool) or not isinstance(value, timedelta | int | float):
        raise InvalidSettings(f"{name} is {value!r}; it must be a timedelta or a number of seconds")
    duration = value if isinstance(value, timedelta) else timedelta(seconds=value)
    if duration <= timedelta(0):
        raise InvalidSettings(f"{name} is {value!r}; it must be more than 0")
    return duration
