from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from prometheus_client import CollectorRegistry, Counter

from coatcheck.errors import InvalidSettings
from coatcheck.worker import health
from coatcheck.worker.health import HealthServer


class Process:
    """What a worker would say about itself."""

    def __init__(self) -> None:
        self.live = {"event_loop": True}
        self.ready = {"broker": True, "store": True}
        self.registry = CollectorRegistry()
        Counter("seen", "Things seen.", registry=self.registry).inc()

    def server(self, port: int = 0) -> HealthServer:
        return HealthServer(port, live=lambda: self.live, ready=lambda: self.ready, registry=self.registry)


@pytest.fixture
def process():
    return Process()


@pytest.fixture
async def server(process):
    async with process.server() as server:
        yield server


async def send(server: HealthServer, raw: bytes) -> bytes:
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(raw)
        answer = await reader.read()
        writer.close()
        return answer


async def get(server: HealthServer, path: str, *, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    answer = await send(server, f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *fields = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in fields)
    return int(status.split()[1]), headers, body


async def test_checks_that_hold_are_200(server):
    status, headers, body = await get(server, "/readyz?verbose=1")

    assert status == 200
    assert headers["content-type"] == "application/json"
    assert int(headers["content-length"]) == len(body)
    assert json.loads(body) == {"status": "ok", "checks": {"broker": True, "store": True}}


async def test_one_check_that_fails_is_503_and_named(server, process):
    process.ready["store"] = False

    status, _, body = await get(server, "/readyz")

    assert status == 503
    assert json.loads(body) == {"status": "failing", "checks": {"broker": True, "store": False}}
    assert (await get(server, "/livez"))[0] == 200


async def test_metrics_are_the_registry(server):
    status, headers, body = await get(server, "/metrics")

    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    assert b"seen_total 1.0" in body


async def test_head_has_the_length_and_no_body(server):
    status, headers, body = await get(server, "/livez", method="HEAD")

    assert (status, body) == (200, b"")
    assert int(headers["content-length"]) > 0


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /other HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /livez HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /livez HTTP/1.0\r\n\r\n", b"200"),
        (b"GET /livez HTTP/2.0\r\n\r\n", b"400"),
        (b"GET /livez\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"400"),
        (b"\r\n\r\n", b"400"),
        (b"GET /livez HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n", b"431"),
    ],
)
async def test_strange_requests_get_an_answer_and_harm_nobody(server, raw, status):
    try:
        answer = await send(server, raw)
    except ConnectionError:
        answer = b"HTTP/1.1 431 "  # the rest of an oversized request may be refused with a reset
    assert answer.split()[1] == status
    assert (await get(server, "/livez"))[0] == 200


async def test_405_says_what_is_allowed(server):
    _, headers, _ = await get(server, "/livez", method="DELETE")

    assert headers["allow"] == "get, head"


async def test_client_that_hangs_up_early_harms_nobody(server):
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /liv")
    writer.transport.abort()

    assert (await get(server, "/livez"))[0] == 200


async def test_slow_client_is_dropped_after_the_time_limit(server, monkeypatch):
    monkeypatch.setattr(health, "HEAD_TIMEOUT_S", 0.05)

    assert await send(server, b"GET /livez HT") == b""
    assert (await get(server, "/livez"))[0] == 200


@pytest.mark.parametrize("said", [b"", b"GET "])
async def test_silent_connections_give_way_to_a_probe_and_to_each_other(server, said):
    silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3 * health.MAX_CONNECTIONS)]
    for _, writer in silent:
        with contextlib.suppress(ConnectionError):
            writer.write(said)
            await writer.drain()

    statuses = [(await get(server, path))[0] for path in ("/livez", "/readyz", "/metrics") for _ in range(30)]

    assert set(statuses) == {200}
    assert len(server._open) <= health.MAX_CONNECTIONS
    for _, writer in silent:
        writer.transport.abort()


async def test_clients_that_do_not_read_their_answer_give_way_too(server, process, monkeypatch):
    monkeypatch.setattr(health, "MAX_CONNECTIONS", 3)
    Counter("long", "x" * 8_000_000, registry=process.registry)
    deaf = []
    for _ in range(health.MAX_CONNECTIONS):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        await reader.readexactly(1)
        deaf.append(writer)

    assert (await get(server, "/livez"))[0] == 200
    for writer in deaf:
        writer.transport.abort()


async def test_stop_drops_open_connections_at_once(process):
    server = process.server()
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET ")
    await asyncio.sleep(0.01)

    async with asyncio.timeout(2):
        await server.stop()
        await server.stop()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    writer.close()


async def test_port_that_is_taken_is_a_clear_error(server, process):
    with pytest.raises(
        InvalidSettings, match=rf"health_port={server.port}: the port is taken on 127\.0\.0\.1; set COATCHECK"
    ):
        await process.server(server.port).start()


async def test_address_that_is_not_ours_is_a_clear_error(process):
    server = HealthServer(0, "192.0.2.1", live=dict, ready=dict, registry=process.registry)

    with pytest.raises(InvalidSettings, match=r"health_host=192\.0\.2\.1"):
        await server.start()
