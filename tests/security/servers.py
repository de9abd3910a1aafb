"""A RabbitMQ and a Postgres of the suite's own that speak TLS, with certificates made on the spot."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote, urlsplit

import asyncpg
import trustme
from tests import services
from tests.broker.node import Node
from tests.flow.harness import until
from tests.flow.outages import OwnPostgres, free_port
from tests.services import run_sync

HOST = "localhost"
"""The one name the servers' certificates are made for. Reached as 127.0.0.1 they have another."""


class Certificates:
    """A CA, what it signed, and a second CA that nobody should trust."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ca = trustme.CA()
        self.ca = directory / "ca.pem"
        self._ca.cert_pem.write_to_path(self.ca)
        self.other_ca = directory / "other-ca.pem"
        trustme.CA().cert_pem.write_to_path(self.other_ca)
        self.server, self.server_key = self.issue("server", HOST)
        self.client, self.client_key = self.issue("client", "client@example.net")

    def issue(self, name: str, identity: str, *, is_expired: bool = False) -> tuple[Path, Path]:
        """Sign a certificate and give the files of chain and key."""
        yesterday = datetime.now(UTC) - timedelta(days=1)
        cert = self._ca.issue_cert(
            identity,
            not_before=yesterday - timedelta(days=1) if is_expired else None,
            not_after=yesterday if is_expired else None,
        )
        chain, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        chain.write_bytes(b"".join(blob.bytes() for blob in cert.cert_chain_pems))
        cert.private_key_pem.write_to_path(key)
        return chain, key


@dataclass(frozen=True, slots=True)
class TlsBroker:
    """A node that takes plaintext on one port, and on another TLS from those who show a certificate of the CA."""

    node: Node
    tls_port: int
    certificates: Certificates

    def url(self, user: str = "guest", password: str = "guest", *, vhost: str = "/") -> str:
        return f"amqp://{user}:{password}@127.0.0.1:{self.node.port}/{'' if vhost == '/' else quote(vhost, safe='')}"

    def tls_url(self, *, host: str = HOST, with_client: bool = True, **options: object) -> str:
        files = {"certfile": self.certificates.client, "keyfile": self.certificates.client_key} if with_client else {}
        return with_options(f"amqps://guest:guest@{host}:{self.tls_port}/", files | options)


def with_options(url: str, options: dict[str, object]) -> str:
    return f"{url}?{'&'.join(f'{name}={value}' for name, value in options.items())}" if options else url


def start_broker(running: ExitStack, certificates: Certificates) -> TlsBroker:
    port = free_port()
    config = f"""
        listeners.ssl.local = 127.0.0.1:{port}
        ssl_options.cacertfile = {certificates.ca}
        ssl_options.certfile = {certificates.server}
        ssl_options.keyfile = {certificates.server_key}
        ssl_options.verify = verify_peer
        ssl_options.fail_if_no_peer_cert = true
        max_message_size = 4194304
    """
    node = Node("\n".join(line.strip() for line in config.splitlines()))
    running.callback(lambda: run_sync(node.close()))
    run_sync(node.start())
    return TlsBroker(node, port, certificates)


class TlsPostgres:
    """A server on which everybody but `postgres` needs a password, and `mtls` a certificate.

    The embedded build knows no TLS, so an installed one is preferred; where there is none, `has_tls` is false.
    """

    def __init__(self, running: ExitStack, certificates: Certificates) -> None:
        try:
            self.admin_url = services._start_postgres(running, services._installed_postgres())
        except services.NotHere:
            self.admin_url = OwnPostgres(running).url
        self.port = urlsplit(self.admin_url).port
        self._data = Path(str(self.execute("SHOW data_directory")))
        self._owner = services._unprivileged_user()
        self._write_hba()
        self.has_tls = self._turn_tls_on(certificates)
        self.reload()

    def _turn_tls_on(self, certificates: Certificates) -> bool:
        self.execute("CREATE ROLE mtls LOGIN SUPERUSER")
        self.use(certificates.server, certificates.server_key)
        self._place("ca.pem", certificates.ca)
        files = {"ssl_cert_file": "server.pem", "ssl_key_file": "server.key", "ssl_ca_file": "ca.pem"}
        for setting, value in files.items():
            self.execute(f"ALTER SYSTEM SET {setting} = '{value}'")
        try:
            self.execute("ALTER SYSTEM SET ssl = on")
        except asyncpg.InvalidParameterValueError:  # not supported by this build
            return False
        return True

    def url(
        self, user: str, password: str = "", *, database: str = "postgres", host: str = HOST, **options: object
    ) -> str:
        login = f"{user}:{password}" if password else user
        return with_options(f"postgresql://{login}@{host}:{self.port}/{database}", options)

    def execute(self, statement: str, *, url: str | None = None) -> object:
        return run_sync(_fetch(url or self.admin_url, statement))

    def use(self, chain: Path, key: Path) -> None:
        """Present this certificate, once told to `reload`."""
        self._place("server.pem", chain)
        self._place("server.key", key)

    def reload(self) -> None:
        """Have the configuration and certificates read again; new connections meet them."""
        before = self.execute("SELECT pg_conf_load_time()")
        self.execute("SELECT pg_reload_conf()")
        run_sync(until(lambda: _fetch_is_not(self.admin_url, before), what="Postgres has read its configuration"))

    def _place(self, name: str, source: Path) -> None:
        target = self._data / name
        shutil.copyfile(source, target)
        target.chmod(0o600)
        if self._owner is not None:
            os.chown(target, self._owner, -1)

    def _write_hba(self) -> None:
        rules = (
            "host all postgres 127.0.0.1/32 trust",
            "hostssl all mtls 127.0.0.1/32 trust clientcert=verify-ca",
            "host all all 127.0.0.1/32 scram-sha-256",
        )
        (self._data / "pg_hba.conf").write_text("\n".join(rules) + "\n")


async def _fetch_is_not(url: str, before: object) -> bool:
    return await _fetch(url, "SELECT pg_conf_load_time()") != before


async def _fetch(url: str, statement: str) -> object:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(statement)
    finally:
        await connection.close()


def temporary_directory(running: ExitStack) -> Path:
    path = Path(tempfile.mkdtemp(prefix="coatcheck-security-"))
    path.chmod(0o755)  # the servers may run as other users
    running.callback(shutil.rmtree, path, ignore_errors=True)
    return path
