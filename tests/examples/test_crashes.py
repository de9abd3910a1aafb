"""Handlers of the examples, killed at every checkpoint: each comes to the same end as without a crash."""

from collections.abc import Callable
from typing import Any

import pytest

from coatcheck.testing import crash_at_every_checkpoint
from coatcheck.worker import App
from examples import agents, hello
from examples.web import reports


def write_section(asked: dict[str, str]) -> dict[str, str]:
    return {"title": asked["title"], "text": asked["topic"]}


PEERS: dict[str, Callable[[Any], Any]] = {
    "greeter": lambda name: f"Hello, {name}!",
    "sections": write_section,
}
CASES = [
    pytest.param(hello.app, ["Ada", "Grace"], ["Hello, Ada!", "Hello, Grace!"], id="hello"),
    pytest.param(reports.app, "octopuses", dict.fromkeys(reports.TITLES, "octopuses"), id="web"),
]


@pytest.mark.parametrize(("app", "body", "result"), CASES)
def test_handler_ends_alike_wherever_its_replica_dies(app: App, body: object, result: object):
    report = crash_at_every_checkpoint(app, body, peers=PEERS)

    assert report.result == result
    assert len(report.crashes) > 2


def test_planner_ends_alike_wherever_its_replica_dies(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AGENTS_MODEL_URL", raising=False)

    report = crash_at_every_checkpoint(
        agents.planner, "octopuses", apps=(agents.researcher, agents.writer, agents.critic)
    )

    assert report.result == {"article": "The octopus is curious. Once it left its tank.", "rounds": 5}
