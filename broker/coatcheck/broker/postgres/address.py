"""Where the Postgres with the queues is: a `pg://` URL, which is a store's `postgresql://` URL under another scheme.

A Unix socket is named by `?host=/directory`, TLS by libpq's own options: `sslmode`, `sslrootcert`, `sslcert`, `sslkey`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

from coatcheck import tls
from coatcheck.errors import InvalidSettings

SCHEME = "pg"
STORES_OWN = "pg://"
"""Stands for the store's database. Whoever knows the store puts a real address in its place."""

TLS_OPTIONS = tls.POSTGRES_OPTIONS
_TLS_FILES = (TLS_OPTIONS.ca, TLS_OPTIONS.cert, TLS_OPTIONS.key)
_PASSED_ON = ("user", "password", "database", "passfile", "target_session_attrs", "krbsrvname", "gsslib")
# What a store's address may say about its pool. It means nothing here, and the two addresses are often the same.
_IGNORED = ("prepared_statement_cache_size", "statement_cache_size", "timeout", "command_timeout")
_KNOWN = ("host", "port", "sslmode", "ssl", *_TLS_FILES, *_PASSED_ON, *_IGNORED)
_WITH_PORT = re.compile(r"([\w.-]+):(\d+)")
_SHAPE = "write pg://user:password@host:5432/database, with %40 for an @ and %2F for a / in the password"


@dataclass(frozen=True, slots=True)
class PostgresAddress:
    """An address that was checked. `arguments` are asyncpg's and hold the password; `place` is for messages."""

    arguments: dict[str, Any]
    place: str
    risk: str | None
    """What somebody on the way could do; None: nothing, or there is no way."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an address. Raises InvalidSettings, which quotes nothing that may be a password."""
        if text == STORES_OWN:
            raise InvalidSettings(f"{STORES_OWN} stands for the store's database, and no store is known here; {_SHAPE}")
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
            given = parse_qs(parts.query, keep_blank_values=True)
        except ValueError:
            raise InvalidSettings(f"the broker address is not a URL; {_SHAPE}") from None
        if "@" in (host or ""):
            raise InvalidSettings(f"the host in the broker address has an @ in it; {_SHAPE}")
        if unknown := sorted(given.keys() - set(_KNOWN)):
            raise InvalidSettings(
                f"unknown options in the broker address: {', '.join(unknown)}; known are {', '.join(_KNOWN)}"
            )
        files = {name: given[name][-1] for name in _TLS_FILES if name in given}
        mode = given.get("sslmode", given.get("ssl", ["verify-full" if files else ""]))[-1]
        hosts, ports = _places(host, port, given)
        arguments: dict[str, Any] = {
            "host": hosts,
            "port": ports[0] if len(ports) == 1 else ports,
            "user": unquote(parts.username or ""),
            "password": unquote(parts.password or ""),
            "database": unquote(parts.path.removeprefix("/")),
            "ssl": tls.postgres_ssl(mode, files, what="broker address") if mode else None,
        } | {name: given[name][-1] for name in _PASSED_ON if name in given}
        return cls(
            arguments={name: value for name, value in arguments.items() if value},
            place=f"{SCHEME}://{','.join(hosts)}{f':{ports[0]}' if ports else ''}/{arguments['database']}",
            risk=_risk(hosts, mode, has_ca=TLS_OPTIONS.ca in files),
        )


def _places(host: str | None, port: int | None, given: dict[str, list[str]]) -> tuple[list[str], list[int]]:
    """Hosts and ports, several where there is a standby. What the options say wins, as it does for a store."""
    hosts = [each for text in given.get("host", ()) for each in text.split(",")] or ([host] if host else [])
    ports = [each for text in given.get("port", ()) for each in text.split(",")]
    # As SQLAlchemy writes several: host=one:5432&host=other:5432.
    pairs = [_WITH_PORT.fullmatch(each) for each in hosts]
    if hosts and not ports and all(pairs):
        hosts, ports = [pair[1] for pair in pairs if pair], [pair[2] for pair in pairs if pair]
    try:
        numbers = [int(text) for text in ports] or ([port] if port else [])
    except ValueError:
        raise InvalidSettings("port in the broker address must be a number") from None
    if len(numbers) not in {0, 1, len(hosts)}:
        raise InvalidSettings(f"the broker address has {len(numbers)} ports for {len(hosts)} hosts")
    return hosts, numbers


def _risk(hosts: list[str], mode: str, *, has_ca: bool) -> str | None:
    is_local = all(tls.is_local(host) for host in hosts)
    if is_local or mode in ("verify-ca", "verify-full") or (mode == "require" and has_ca):
        return None
    if mode == "require":
        return "encrypted, but the server's certificate is not verified; use sslmode=verify-full"
    return "not encrypted for certain; use sslmode=verify-full"
