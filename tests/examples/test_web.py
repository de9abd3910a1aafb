"""The web front as a browser meets it: a ticket, events, a result; and a task that does not care who watches."""

import json
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from tests.examples.browser import browsing, find_browser
from tests.examples.processes import Processes, Running, command_of

from coatcheck.store import TaskState
from coatcheck.worker import TaskCancelled
from examples.web.front import front as app

COMMAND = [*command_of("A web front with live progress"), "--port", "0"]
TITLES = ["Summary", "Habitat", "Anatomy", "Behaviour", "Outlook"]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory, embedded_store: str) -> Iterator[Processes]:
    started = Processes(tmp_path_factory.mktemp("web"), {"COATCHECK_STORE": embedded_store})
    yield started
    started.end()


@pytest.fixture(scope="module")
def front(commands: Processes) -> Iterator[httpx.Client]:
    """The front, with all that it needs behind it."""
    running = commands.command(COMMAND, {})
    with connected(running) as client:
        yield client
    running.stop()


def connected(running: Running) -> httpx.Client:
    running.wait_for("open http://")
    url = running.printed.split("open ")[1].split()[0]
    return httpx.Client(base_url=url, timeout=60, trust_env=False)


def start_report(front: httpx.Client, topic: str = "octopuses") -> dict[str, str]:
    response = front.post("/reports", json={"topic": topic})
    assert response.status_code == 202, response.text
    assert response.headers["location"] == response.json()["result"]
    return dict(response.json())


def events_of(front: httpx.Client, ticket: dict[str, str]) -> Generator[tuple[str, Any]]:
    """The name of each event and what it says, until the stream ends."""
    with front.stream("GET", ticket["events"]) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        name = ""
        for line in response.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                text = line.removeprefix("data: ")
                yield name, json.loads(text) if name == "progress" else text


def test_events_tell_how_far_it_is_until_the_result_is_there(front):
    ticket = start_report(front)
    while_running = front.get(ticket["result"])
    *told, end = events_of(front, ticket)
    result = front.get(ticket["result"])

    assert while_running.status_code == 202
    done = [event["done"] for name, event in told if name == "progress"]
    assert done == sorted(set(done))
    assert done[0] < done[-1] == 5
    assert end == ("end", "done")
    assert result.status_code == 200
    assert list(result.json()) == TITLES


def test_browser_that_leaves_cancels_nothing_and_may_come_back(front):
    ticket = start_report(front)
    watching = events_of(front, ticket)
    first = next(watching)
    watching.close()  # closes the connection

    *_, end = events_of(front, ticket)

    assert first[0] == "progress"
    assert first[1]["done"] < 5
    assert end == ("end", "done")
    assert list(front.get(ticket["result"]).json()) == TITLES


def test_ticket_outlives_everything_that_handed_it_out(commands):
    before = commands.command(COMMAND, {})
    with connected(before) as front:
        ticket = start_report(front, "squids")
        assert next(events_of(front, ticket))[0] == "progress"
    before.process.kill()
    before.process.wait()

    after = commands.command(COMMAND, {})
    with connected(after) as front:
        *_, end = events_of(front, ticket)
        result = front.get(ticket["result"])
    after.stop()

    assert end == ("end", "done")
    assert result.json()["Summary"].startswith("Summary of squids")


async def test_report_that_failed_ends_the_stream_and_is_a_problem():
    class OfOneTask:
        """A client that knows one task, which was cancelled."""

        async def find(self, task_id: UUID) -> object:
            return SimpleNamespace(task_id=task_id, state=TaskState.CANCELLED, progress=None)

        async def result(self, task_id: UUID) -> object:
            raise TaskCancelled("too late", problem={"code": "cancelled", "status": 499})

    app.state.client = OfOneTask()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front") as front:
        events = await front.get(f"/reports/{uuid4()}/events")
        result = await front.get(f"/reports/{uuid4()}")

    assert events.text == "event: end\ndata: cancelled\n\n"
    assert (result.status_code, result.json()["code"]) == (499, "cancelled")
    assert result.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"topic": 12}', b'{"subject": "octopuses"}'])
def test_what_names_no_topic_is_refused(front, body):
    assert front.post("/reports", content=body).status_code == 400


def test_page_shows_the_bar_and_the_report_also_after_a_reload(front, tmp_path: Path):
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium on PATH; install `chromium`")

    with browsing(program, tmp_path) as browser:
        browser.open(str(front.base_url))
        browser.wait_for("document.querySelector('form button') !== null && typeof follow === 'function'")
        browser.run("document.querySelector('form button').click()")
        browser.wait_for("document.querySelector('progress').value > 0")
        browser.run("location.reload()")
        browser.wait_for("document.getElementById('state')?.textContent === 'done'")
        browser.wait_for("document.getElementById('result').textContent !== ''")

        assert browser.run("document.querySelector('progress').position") == 1
        assert "Outlook of octopuses" in browser.run("document.getElementById('result').textContent")
