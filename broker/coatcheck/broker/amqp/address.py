"""Where a RabbitMQ is: its URL, taken apart once, with the TLS that its options ask for.

The options are those RabbitMQ itself documents for AMQP URIs: `cacertfile`, `certfile`, `keyfile` and `verify`
(`verify_peer`, the default, or `verify_none`).
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Self

from yarl import URL

from coatcheck import tls
from coatcheck.errors import InvalidSettings

TLS_OPTIONS = tls.Options(ca="cacertfile", cert="certfile", key="keyfile")
_VERIFY = "verify"
_KNOWN = (TLS_OPTIONS.ca, TLS_OPTIONS.cert, TLS_OPTIONS.key, _VERIFY)
_SHAPE = "write amqp://user:password@host:port/vhost, with %40 for an @ and %2F for a / inside user or password"


@dataclass(frozen=True, slots=True)
class AmqpAddress:
    """An address that was checked. `url` holds the password; `place` is for messages and does not."""

    url: URL
    context: ssl.SSLContext | None
    place: str
    risk: str | None
    """What somebody on the way could do; None: nothing, or there is no way."""

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
