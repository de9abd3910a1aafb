"""The model behind the agents: a fake that needs no network, or any server with an OpenAI-compatible interface.

    AGENTS_MODEL_URL    such as http://localhost:11434/v1; unset: the fake
    AGENTS_MODEL_NAME   the model to ask for
    AGENTS_MODEL_KEY    the key, if the server wants one

The client for a server is tested against a stand-in only: expect to adapt the instructions to your model.
"""

import json
import os
import urllib.request
from dataclasses import dataclass
from typing import Protocol

ANSWER_LIMIT_S = 120.0


@dataclass(frozen=True)
class Role:
    name: str
    instructions: str


class Model(Protocol):
    """What an agent needs of a model. It blocks, costs money and may fail: an agent asks it in a step."""

    def complete(self, role: Role, text: str) -> str: ...


def get_model() -> Model:
    url = os.environ.get("AGENTS_MODEL_URL")
    if not url:
        return FakeModel()
    return HttpModel(url, name=os.environ.get("AGENTS_MODEL_NAME", ""), key=os.environ.get("AGENTS_MODEL_KEY", ""))


class FakeModel:
    """Play each role by rules, so that every run is the same."""

    def complete(self, role: Role, text: str) -> str:
        match role.name:
            case "planner":
                return json.dumps(self._plan(text.splitlines()))
            case "researcher":
                return f"{text}: it has three hearts"
            case "critic":
                return "good" if "Once" in text else "too dry, tell an anecdote"
            case _:
                return "The octopus is curious." + (" Once it left its tank." if "anecdote" in text else "")

    def _plan(self, transcript: list[str]) -> dict[str, object]:
        who, _, said = transcript[-1].partition(": ")
        match who:
            case "goal":
                return {"tool": "researcher", "inputs": ["the anatomy of octopuses", "the habits of octopuses"]}
            case "writer":
                return {"tool": "critic", "inputs": [said]}
            case "critic" if said == "good":
                return {"tool": "finish", "inputs": [transcript[-2].partition(": ")[2]]}
            case _:
                return {"tool": "writer", "inputs": [said]}


class HttpModel:
    """A server that takes `POST …/chat/completions`."""

    def __init__(self, url: str, *, name: str, key: str) -> None:
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._name = name
        self._key = key

    def complete(self, role: Role, text: str) -> str:
        messages = [{"role": "system", "content": role.instructions}, {"role": "user", "content": text}]
        request = urllib.request.Request(
            self._url,
            json.dumps({"model": self._name, "messages": messages}).encode(),
            {"content-type": "application/json", "authorization": f"Bearer {self._key}"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_LIMIT_S) as response:
            return str(json.load(response)["choices"][0]["message"]["content"])
