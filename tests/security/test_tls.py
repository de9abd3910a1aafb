"""TLS to both servers: verified by default, and whatever does not hold is refused with the remedy."""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.docs.pages import ROOT, block_run_by
from tests.flow.harness import PATIENCE_S
from tests.security.servers import HOST, Certificates, TlsBroker, TlsPostgres, with_options

from coatcheck.broker import Broker, Message, Outgoing, Routing, connect
from coatcheck.errors import BrokerUnavailable, InvalidSettings
from coatcheck.store import Store
from coatcheck.store.postgres.database import StoreNotReady


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Broker]:
    """A connection that would be tried for minutes, were it not refused at once where that is pointless."""
    async with asyncio.timeout(PATIENCE_S), connect(url, connect_budget=120) as broker:
        yield broker


async def refused(url: str) -> str:
    with pytest.raises(BrokerUnavailable) as caught:
        async with connected(url):
            pass
    return str(caught.value)


async def ping(url: str) -> None:
    store = Store(url, pool_size=1)
    try:
        await store.ping()
    finally:
        await store.close()


async def store_refused(url: str) -> str:
    with pytest.raises(StoreNotReady) as caught:
        await ping(url)
    return str(caught.value)


# --- the broker ---


async def test_broker_is_reached_over_tls_with_a_certificate_of_ours(tls_broker: TlsBroker):
    async with connected(tls_broker.tls_url(cacertfile=tls_broker.certificates.ca)) as broker:
        queue = await broker.declare_private()
        routing = await broker.publish([Outgoing(queue, Message(b"hello"))])

        assert routing == [Routing.ROUTED]
        assert await broker.depth(queue) == 1


async def test_broker_signed_by_an_unknown_ca_is_refused_at_once(tls_broker: TlsBroker):
    choices: list[dict[str, Any]] = [{}, {"cacertfile": tls_broker.certificates.other_ca}]
    for options in choices:
        text = await refused(tls_broker.tls_url(**options))

        assert "CA that is not trusted here" in text
        assert "cacertfile=" in text


async def test_broker_under_another_name_is_refused_at_once(tls_broker: TlsBroker):
    text = await refused(tls_broker.tls_url(host="127.0.0.1", cacertfile=tls_broker.certificates.ca))

    assert "made for another name" in text
    assert "connect by the name it is made for" in text


async def test_broker_that_wants_a_certificate_says_which_options_to_give(tls_broker: TlsBroker):
    url = tls_broker.tls_url(with_client=False, cacertfile=tls_broker.certificates.ca)
    with pytest.raises(BrokerUnavailable) as caught:
        async with connect(url, connect_budget=1):
            pass

    assert "certfile= and keyfile=" in str(caught.value)


async def test_broker_is_not_verified_only_if_that_is_written_down(tls_broker: TlsBroker):
    async with connected(tls_broker.tls_url(host="127.0.0.1", verify="verify_none")) as broker:
        assert broker.is_connected


async def test_broker_whose_certificate_has_expired_is_refused_at_once(certificates: Certificates):
    chain, key = certificates.issue("expired-broker", HOST, is_expired=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    async with server:
        text = await refused(f"amqps://guest:guest@{HOST}:{port}/?cacertfile={certificates.ca}")

    assert "has expired; renew it" in text


async def test_plaintext_port_is_told_from_a_tls_one(tls_broker: TlsBroker):
    url = with_options(
        f"amqps://guest:guest@{HOST}:{tls_broker.node.port}/", {"cacertfile": tls_broker.certificates.ca}
    )
    with pytest.raises(BrokerUnavailable) as caught:
        async with connect(url, connect_budget=1):
            pass

    assert "does not speak TLS there" in str(caught.value)


# --- the store ---


async def test_store_is_reached_over_tls_with_a_certificate_of_ours(
    tls_postgres: TlsPostgres, certificates: Certificates
):
    files: dict[str, Any] = {
        "sslrootcert": certificates.ca,
        "sslcert": certificates.client,
        "sslkey": certificates.client_key,
    }

    await ping(tls_postgres.url("mtls", sslmode="verify-full", **files))
    await ping(tls_postgres.url("mtls", **files))  # files alone mean verify-full


async def test_store_signed_by_an_unknown_ca_is_refused(tls_postgres: TlsPostgres, certificates: Certificates):
    choices: list[dict[str, Any]] = [{}, {"sslrootcert": certificates.other_ca}]
    for options in choices:
        text = await store_refused(tls_postgres.url("postgres", sslmode="verify-full", **options))

        assert "CA that is not trusted here" in text
        assert "sslrootcert=" in text


async def test_store_under_another_name_is_refused(tls_postgres: TlsPostgres, certificates: Certificates):
    options: dict[str, Any] = {"host": "127.0.0.1", "sslrootcert": certificates.ca}

    assert "made for another name" in await store_refused(tls_postgres.url("postgres", **options))
    await ping(tls_postgres.url("postgres", sslmode="verify-ca", **options))
    await ping(tls_postgres.url("postgres", sslmode="require", **options))


async def test_store_that_wants_a_certificate_says_which_options_to_give(
    tls_postgres: TlsPostgres, certificates: Certificates
):
    text = await store_refused(tls_postgres.url("mtls", sslmode="verify-full", sslrootcert=certificates.ca))

    assert "sslcert= and sslkey=" in text


def test_store_whose_certificate_has_expired_is_refused(tls_postgres: TlsPostgres, certificates: Certificates):
    tls_postgres.use(*certificates.issue("expired-store", HOST, is_expired=True))
    tls_postgres.reload()
    try:
        text = asyncio.run(store_refused(tls_postgres.url("postgres", sslrootcert=certificates.ca)))
    finally:
        tls_postgres.use(certificates.server, certificates.server_key)
        tls_postgres.reload()

    assert "has expired; renew it" in text


# --- addresses ---


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("amqps://host/?cacertfile=/nowhere/ca.pem", "cacertfile=/nowhere/ca.pem: No such file"),
        ("amqps://host/?keyfile=/nowhere/key.pem", "keyfile needs a certificate: give certfile"),
        ("amqps://host/?certfile={ca}", "an unencrypted key|unencrypted key"),
        ("amqps://host/?verify=maybe", "verify_peer or verify_none"),
        ("amqps://host/?sslmode=require", "unknown options in the broker address: sslmode"),
        ("amqp://host/?cacertfile={ca}", "TLS goes with amqps://"),
        ("amqp:///vhost", "names no host"),
        ("amqp://user:hunter2/x@host/", "is not a URL"),
    ],
)
def test_broker_address_that_cannot_hold_is_explained(url: str, words: str, certificates: Certificates):
    with pytest.raises(InvalidSettings, match=words) as caught:
        connect(url.format(ca=certificates.ca))

    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://host/db?sslrootcert=/nowhere/ca.pem", "sslrootcert=/nowhere/ca.pem: No such file"),
        ("postgresql://host/db?sslkey=/nowhere/key.pem", "sslkey needs a certificate: give sslcert"),
        ("postgresql://host/db?sslmode=maybe", "sslmode in the store address must be one of disable"),
        ("postgresql://host/db?sslmode=prefer&sslrootcert={ca}", "TLS is not sure with sslmode=prefer"),
        ("postgresql://host/db?cacertfile={ca}", "options that asyncpg does not know: cacertfile"),
        ("postgresql://user:x@hunter2@host/db", "has an @ in it"),
    ],
)
def test_store_address_that_cannot_hold_is_explained(url: str, words: str, certificates: Certificates):
    with pytest.raises(InvalidSettings, match=words) as caught:
        Store(url.format(ca=certificates.ca))

    assert "hunter2" not in str(caught.value)


async def test_the_addresses_on_the_page_connect(
    tls_broker: TlsBroker, tls_postgres: TlsPostgres, certificates: Certificates
):
    text = block_run_by("test_the_addresses_on_the_page_connect", "bash").text
    for written, ours in {
        "/etc/coatcheck/ca.pem": certificates.ca,
        "/etc/coatcheck/client.pem": certificates.client,
        "/etc/coatcheck/client.key": certificates.client_key,
        "research-worker:secret@rabbitmq.example.net:5671/coatcheck": f"guest:guest@{HOST}:{tls_broker.tls_port}/",
        "coatcheck_worker:secret@postgres.example.net:5432/coatcheck": f"mtls@{HOST}:{tls_postgres.port}/postgres",
    }.items():
        assert written in text
        text = text.replace(written, str(ours))
    addresses = dict(re.findall(r"export (\w+)='(.+)'", text))

    async with connected(addresses["COATCHECK_BROKER"]) as broker:
        assert broker.is_connected
    await ping(addresses["COATCHECK_STORE"])


def test_every_option_of_an_address_is_on_the_page():
    text = Path(ROOT / "docs/security.md").read_text()

    for option in (
        "cacertfile",
        "certfile",
        "keyfile",
        "verify=verify_none",
        "sslmode",
        "sslrootcert",
        "sslcert",
        "sslkey",
    ):
        assert f"`{option}" in text
