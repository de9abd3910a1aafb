"""The research service as a user runs it: worker, sweeper and peer as processes."""

import asyncio
from collections.abc import AsyncIterator

import aio_pika
import pytest

from coatcheck.worker import Client, Settings

QUESTIONS = ["what is known about octopuses", "who studies octopuses", "what is new in octopuses"]


@pytest.fixture
def service(service_names) -> str:
    return service_names.new("research")


@pytest.fixture
def peer(service_names) -> str:
    return service_names.new("search")


@pytest.fixture
async def client(broker_url, store_url) -> AsyncIterator[Client]:
    async with Client(Settings(broker=broker_url, store=store_url)) as client:
        yield client


@pytest.fixture
def start_service(processes_with_store, service, peer):
    """Starts worker and sweeper; `patience` is how long the handler waits for a search."""

    def start(patience: str) -> None:
        names = {"RESEARCH_SERVICE": service, "RESEARCH_PEER": peer, "RESEARCH_PATIENCE": patience}
        worker = processes_with_store.start("coatcheck.cli", "worker", "examples.research:app", **names)
        processes_with_store.start("coatcheck.cli", "sweeper").wait_for("sweeper_started")
        worker.wait_for("worker_started")

    return start


async def test_report_holds_what_the_peer_found(processes_with_store, start_service, service, peer, client):
    processes_with_store.start("examples.search_peer", peer, "--delay", "0.3").wait_for("answering on")
    start_service("30")

    ticket = await client.submit(service, "octopuses")
    told = [(it.done, it.total, it.message) async for it in ticket.progress()]
    report = await ticket.result(30)

    assert report["topic"] == "octopuses"
    assert report["missing"] == []
    assert all(f"{question}: finding 1" in report["text"] for question in QUESTIONS)
    assert (0, 3, "searching") in told
    assert (await client.get(ticket.task_id)).checkpoint > 0


async def test_silent_peer_costs_all_of_the_findings_and_not_the_report(
    processes_with_store, start_service, service, peer, client
):
    processes_with_store.start("examples.search_peer", peer, "--silent").wait_for("answering on")
    start_service("0.5")

    report = await client.call(service, "octopuses", timeout=30)

    assert report["missing"] == QUESTIONS
    assert report["text"] == "# Octopuses"


async def test_peer_that_answers_one_question_gives_a_partial_report(start_service, service, peer, client, broker_url):
    async def answer_first(question: aio_pika.abc.AbstractIncomingMessage) -> None:
        if QUESTIONS[0].encode() in question.body:
            reply = aio_pika.Message(b'["plenty"]', correlation_id=question.correlation_id)
            await channel.default_exchange.publish(reply, routing_key=question.reply_to or "")
        await question.ack()

    async with await aio_pika.connect(broker_url) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue(peer, auto_delete=True)
        await queue.consume(answer_first)
        await asyncio.to_thread(start_service, "1")

        report = await client.call(service, "octopuses", timeout=30)

    assert report["missing"] == QUESTIONS[1:]
    assert "plenty" in report["text"]
