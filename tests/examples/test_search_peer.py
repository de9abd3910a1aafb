"""The plain peer: what it answers, what it refuses, how it stops."""

import ast
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pika
import pytest
from tests.examples.processes import ROOT

DELAY_S = 0.2
READY = "answering on"


class Asker:
    """Sends questions to a queue and collects the replies."""

    def __init__(self, channel: Any, queue: str) -> None:
        self._channel = channel
        self._queue = queue
        self.replies = channel.queue_declare("", exclusive=True).method.queue

    def ask(self, body: bytes, correlation_id: str) -> None:
        properties = pika.BasicProperties(reply_to=self.replies, correlation_id=correlation_id)
        self._channel.basic_publish("", self._queue, body, properties)

    def get(self, *, timeout_s: float = 10.0) -> tuple[Any, Any] | None:
        """The next reply's properties and body, or None."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            method, properties, body = self._channel.basic_get(self.replies, auto_ack=True)
            if method is not None:
                return properties, json.loads(body)
            time.sleep(0.02)
        return None


@contextmanager
def connected(broker_url: str, queue: str) -> Iterator[Asker]:
    connection = pika.BlockingConnection(pika.URLParameters(broker_url))
    try:
        yield Asker(connection.channel(), queue)
    finally:
        connection.close()


@pytest.fixture
def queue(service_names) -> str:
    return service_names.new("search")


@pytest.fixture
def asker(broker_url, queue) -> Iterator[Asker]:
    with connected(broker_url, queue) as asker:
        yield asker


def test_question_is_answered_with_its_correlation_id(processes, asker, queue):
    processes.start("examples.search_peer", queue, "--delay", str(DELAY_S)).wait_for(READY)

    asker.ask(b'"octopuses"', "call-1")
    found = asker.get()

    assert found is not None
    properties, body = found
    assert properties.correlation_id == "call-1"
    assert properties.delivery_mode == 2
    assert body[0] == "octopuses: finding 1"


def test_peer_and_a_service_of_the_same_name_run_in_either_order(processes_with_store, asker, queue, service_names):
    """The README has a service `search`, and this peer answers on `search` too: whichever comes second goes on."""
    other = service_names.new("search")
    flows = {"FLOW_SERVICE": queue, "COATCHECK_LOG_FORMAT": "json"}
    processes_with_store.start("coatcheck.cli", "worker", "tests.flow.flows:app", **flows).wait_for("worker_started")
    processes_with_store.start("examples.search_peer", queue, "--delay", "0").wait_for(READY)

    processes_with_store.start("examples.search_peer", other, "--delay", "0").wait_for(READY)
    worker = processes_with_store.start(
        "coatcheck.cli", "worker", "tests.flow.flows:app", **flows | {"FLOW_SERVICE": other}
    )
    worker.wait_for("worker_started")

    assert "queue_used_as_it_is" in worker.printed
    assert "x-dead-letter-exchange: wanted 'coatcheck.dead', is none" in worker.printed


@pytest.mark.parametrize("body", [b"12", b"\xff", b"{"])
def test_what_is_no_question_gets_an_error_and_the_peer_goes_on(processes, asker, queue, body):
    processes.start("examples.search_peer", queue, SEARCH_DELAY="0").wait_for(READY)

    asker.ask(body, "bad")
    refused = asker.get()
    asker.ask(b'"octopuses"', "good")
    answered = asker.get()

    assert refused is not None
    assert refused[0].content_type == "application/problem+json"
    assert refused[1]["code"] == "not_a_question"
    assert answered is not None
    assert answered[0].correlation_id == "good"


def test_peer_that_is_told_to_stop_sends_the_answer_in_hand(processes, asker, queue):
    peer = processes.start("examples.search_peer", queue, "--delay", "1")
    peer.wait_for(READY)

    asker.ask(b'"octopuses"', "call-1")
    time.sleep(0.2)  # it has the question by now, and takes half a second at least
    code = peer.stop()

    assert code == 0
    assert "stopped" in peer.printed
    assert asker.get() is not None


def test_silent_peer_takes_questions_and_says_nothing(processes, asker, queue):
    processes.start("examples.search_peer", queue, "--silent").wait_for(READY)

    asker.ask(b'"octopuses"', "call-1")

    assert asker.get(timeout_s=0.5) is None


def test_address_without_a_user_means_guest(processes, asker, queue, broker_url):
    parts = urlsplit(broker_url)
    if (parts.username, parts.password) != ("guest", "guest"):
        pytest.skip("this broker's user is not guest")
    without_user = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    processes.start("examples.search_peer", queue, "--delay", "0", COATCHECK_BROKER=without_user).wait_for(READY)

    asker.ask(b'"octopuses"', "call-1")

    assert asker.get() is not None


def test_peer_needs_nothing_of_ours_and_nothing_the_image_lacks():
    tree = ast.parse((ROOT / "examples/search_peer.py").read_text())
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}

    strangers = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names

    assert strangers == {"aio_pika"}
