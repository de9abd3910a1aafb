"""The planner and its peer agents: the command, and the model that is not a fake."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from tests.examples.processes import command_of

from coatcheck.testing import Stage
from examples.agents import planner
from examples.agents.model import FakeModel, Role, get_model

ROLE = Role("writer", "Write a very short article.")


def test_article_is_written_judged_and_written_again(embedded):
    ended = embedded.play(command_of("An agent with peer agents"))

    assert ended.code == 0, ended.printed
    asked = [line.split(":")[0].removeprefix("planner asks the ") for line in ended.lines if "asks the" in line]
    assert asked == ["researcher", "writer", "critic", "writer", "critic"]
    assert "The octopus is curious. Once it left its tank." in ended.lines
    assert "(5 rounds)" in ended.lines


# --- the planner alone, with fake agents ---


class Scripted:
    """A model that says one thing after another; asked once too often, it fails."""

    def __init__(self, *answers: str) -> None:
        self._answers = list(answers)

    def complete(self, role: Role, text: str) -> str:
        return self._answers.pop(0)


async def test_model_cannot_make_the_planner_call_just_any_queue(monkeypatch: pytest.MonkeyPatch):
    model = Scripted('{"tool": "payroll", "inputs": ["everybody"]}', '{"tool": "finish", "inputs": ["An article."]}')
    monkeypatch.setattr("examples.agents.get_model", lambda: model)
    async with Stage() as stage:
        await stage.run(planner)
        payroll = stage.peer("payroll")

        ticket = await stage.submit("planner", "octopuses")

        assert await ticket.result() == {"article": "An article.", "rounds": 1}
        assert payroll.asked == []


async def test_decision_that_is_recorded_is_not_paid_for_again(monkeypatch: pytest.MonkeyPatch):
    model = Scripted('{"tool": "writer", "inputs": ["go"]}', '{"tool": "finish", "inputs": ["An article."]}')
    monkeypatch.setattr("examples.agents.get_model", lambda: model)
    async with Stage() as stage:
        first = await stage.run(planner)
        stage.peer("writer").after(days=3).replies("An article.")
        ticket = await stage.submit("planner", "octopuses")

        first.kill()
        await stage.run(planner)
        await stage.advance(days=3)

        assert await ticket.result() == {"article": "An article.", "rounds": 1}


# --- the model ---


@contextmanager
def stand_in(answer: dict[str, Any], seen: list[Any]) -> Iterator[str]:
    """A server that answers every question alike; gives its address."""

    class Answering(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            seen.append((self.path, self.headers["authorization"], json.loads(body)))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answering)
    serving = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/"
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def test_model_asks_a_server_with_the_interface_of_openai(monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []
    with stand_in({"choices": [{"message": {"role": "assistant", "content": "An article."}}]}, seen) as url:
        monkeypatch.setenv("AGENTS_MODEL_URL", url)
        monkeypatch.setenv("AGENTS_MODEL_NAME", "small")
        monkeypatch.setenv("AGENTS_MODEL_KEY", "k-1")

        said = get_model().complete(ROLE, "octopuses")

    assert said == "An article."
    ((path, authorization, body),) = seen
    assert (path, authorization, body["model"]) == ("/v1/chat/completions", "Bearer k-1", "small")
    assert [message["content"] for message in body["messages"]] == [ROLE.instructions, "octopuses"]


def test_model_is_a_fake_unless_a_server_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AGENTS_MODEL_URL", raising=False)

    assert isinstance(get_model(), FakeModel)
