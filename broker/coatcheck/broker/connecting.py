"""From a URL to an adapter."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from coatcheck.broker.port import Broker
from coatcheck.broker.settings import make_settings
from coatcheck.errors import InvalidSettings


def find_risk(url: str) -> str | None:
    """Say what an attacker on the way to a broker could do, and the remedy; None: nothing. Raises InvalidSettings."""
    match urlsplit(url).scheme:
        case "amqp" | "amqps":
            from coatcheck.broker.amqp.connection import AmqpAddress

            return AmqpAddress.parse(url).risk
        case "pg":
            from coatcheck.broker.postgres.connection import STORES_OWN, PostgresAddress

            # The store's own address is looked at where the store's is.
            return None if url == STORES_OWN else PostgresAddress.parse(url).risk
        case _:
            return None


def connect(url: str, **settings: Any) -> Broker:
    """Give the broker for a URL, not started yet. Raises `InvalidSettings` for a scheme or setting it does not know."""
    checked = make_settings(settings)
    scheme = urlsplit(url).scheme
    match scheme:
        case "amqp" | "amqps":
            from coatcheck.broker.amqp.broker import AmqpBroker

            return AmqpBroker(url, checked)
        case "pg":
            from coatcheck.broker.postgres import PostgresBroker

            return PostgresBroker(url, checked)
        case "memory":
            from coatcheck.broker.memory import MemoryBroker

            return MemoryBroker(url, checked)
        case _:
            raise InvalidSettings(
                f"broker URL has the scheme {scheme!r}; known are amqp://, amqps://, pg:// and memory://"
            )
