"""Names and queue arguments: which queues exist for a service, and why each argument is there.

    research            requests     quorum, dead-letters to research.dead
    research.replies    replies      the same (a tutorial peer's are transient; a quorum queue keeps them)
    research.control    cancels      the same
    research.dead       dead letters quorum, no way out but an operator
    research.broadcast  a fanout exchange; every replica binds a queue of its own
    coatcheck.dead      the dead-letter exchange of all services; routing key = name of the dead queue
    coatcheck.sweeper   hints for the sweeper, one active consumer

Arguments are part of a queue's identity in RabbitMQ: changing one makes every later declare fail with 406, so a
change needs a new queue name or a migration.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from coatcheck.errors import InvalidSettings

Arguments: TypeAlias = Mapping[str, str | int | bool]

DEAD_EXCHANGE = "coatcheck.dead"
SWEEPER_QUEUE = "coatcheck.sweeper"
REPLY_PSEUDO_QUEUE = "amq.rabbitmq.reply-to"

# Attempts are counted in Postgres and end long before this. It stops a message that kills its consumer before any row
# can be written, such as one that breaks the driver.
SERVICE_DELIVERY_LIMIT = 1_000
# Browsing hands dead letters back, which counts as a delivery. RabbitMQ 4 limits to 20 unless told otherwise, and a
# dead letter over the limit would be dropped for good.
DEAD_DELIVERY_LIMIT = 2_000_000_000

REPLICA_EXPIRES_MS = 60_000
PRIVATE_EXPIRES_MS = 300_000

_SERVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_RESERVED_SUFFIXES = (".replies", ".control", ".dead", ".broadcast")
_RESERVED_PREFIXES = ("amq.", "coatcheck.")
_PRIVATE_PREFIX = "coatcheck.private."
_REPLY_PREFIXES = (_PRIVATE_PREFIX, "amq.gen-", REPLY_PSEUDO_QUEUE)
_NEVER_FOR_REPLIES = re.compile(r".*\.(control|dead|broadcast|replica\.[0-9a-f]{32})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Names:
    """The names that belong to one service. Raises `InvalidSettings` for a name that would collide with another's."""

    service: str

    def __post_init__(self) -> None:
        if not _SERVICE.fullmatch(self.service):
            raise InvalidSettings(
                f"service name {self.service!r} will not do: 1 to 128 letters, digits, '-', '_' and '.', "
                "starting with a letter or digit"
            )
        if self.service.endswith(_RESERVED_SUFFIXES) or self.service.startswith(_RESERVED_PREFIXES):
            raise InvalidSettings(
                f"service name {self.service!r} will not do: it must not end with {', '.join(_RESERVED_SUFFIXES)} "
                f"nor start with {', '.join(_RESERVED_PREFIXES)}"
            )

    @property
    def requests(self) -> str:
        return self.service

    @property
    def replies(self) -> str:
        return f"{self.service}.replies"

    @property
    def control(self) -> str:
        return f"{self.service}.control"

    @property
    def dead(self) -> str:
        return f"{self.service}.dead"

    @property
    def broadcast(self) -> str:
        return f"{self.service}.broadcast"

    @property
    def queues(self) -> tuple[str, str, str, str]:
        return (self.dead, self.requests, self.replies, self.control)

    def new_replica(self) -> str:
        """A fresh name for one process's broadcast queue."""
        return f"{self.service}.replica.{uuid.uuid4().hex}"


def new_private() -> str:
    """A fresh, unguessable name for one process's reply queue."""
    return f"{_PRIVATE_PREFIX}{uuid.uuid4().hex}"


def takes_replies(queue: str) -> bool:
    """Tell whether a requester may name this queue as its `reply_to`, as far as the name tells.

    We publish there with our own rights, so it must not be a queue of a service that takes orders or keeps dead
    letters, nor one of the broker's own. Another service's `….replies` is where its calls are answered.
    """
    if queue.startswith(_RESERVED_PREFIXES):
        return queue.startswith(_REPLY_PREFIXES)
    return not _NEVER_FOR_REPLIES.fullmatch(queue)


def service_arguments(dead: str) -> Arguments:
    """Arguments of a service's own queues.

    At-least-once dead-lettering keeps the message in its queue until the dead queue confirmed it; RabbitMQ grants
    that only together with `reject-publish`, and quietly falls back to at-most-once without it.
    """
    return MappingProxyType(
        {
            "x-queue-type": "quorum",
            "x-delivery-limit": SERVICE_DELIVERY_LIMIT,
            "x-dead-letter-exchange": DEAD_EXCHANGE,
            "x-dead-letter-routing-key": dead,
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }
    )


def dead_arguments() -> Arguments:
    """Arguments of a dead queue: nothing leaves it by itself."""
    return MappingProxyType({"x-queue-type": "quorum", "x-delivery-limit": DEAD_DELIVERY_LIMIT})


def sweeper_arguments() -> Arguments:
    """Arguments of the sweeper's queue. Single-active-consumer hands over but does not fence: rows do that."""
    return MappingProxyType(
        {"x-queue-type": "quorum", "x-delivery-limit": DEAD_DELIVERY_LIMIT, "x-single-active-consumer": True}
    )


def replica_arguments() -> Arguments:
    """Arguments of a replica's broadcast queue, which goes a minute after its process.

    Not exclusive: after a blackhole the broker holds an exclusive queue for the dead connection until its own
    heartbeat ends, and refuses it (405) to the same process that has come back on a new one.
    """
    return MappingProxyType({"x-expires": REPLICA_EXPIRES_MS})


def private_arguments() -> Arguments:
    """Arguments of a private reply queue. It outlives a cut, so a reply that arrives meanwhile is not lost."""
    return MappingProxyType({"x-expires": PRIVATE_EXPIRES_MS})
