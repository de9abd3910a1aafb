"""One stream of what happened: what the app hears, when, and that its hook is no matter of the protocol."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import structlog
from structlog.testing import LogCapture

from coatcheck.errors import UsageError
from coatcheck.testing import Stage
from coatcheck.worker import App, Context, Retry, events, sweeper
from coatcheck.worker.events import Event, Events, TaskFinished, TaskParked
from coatcheck.worker.metrics import Metrics

ROOT = Path(__file__).parents[2]


@pytest.fixture
def capture() -> Iterator[LogCapture]:
    known, capture = structlog.get_config(), LogCapture()
    structlog.configure(processors=[capture])
    yield capture
    structlog.configure(**known)


def kinds() -> list[type[Event]]:
    found = {**vars(events), **vars(sweeper)}.values()
    return [each for each in found if isinstance(each, type) and issubclass(each, Event)]


def make_app(on_event: Any) -> App:
    app = App("svc", on_event=on_event)

    @app.task(retry=Retry(attempts=2, backoff=1, non_retryable=(ValueError,)))
    async def work(ctx: Context, topic: str) -> str:
        await ctx.step(str.upper, topic)
        if topic == "wrong":
            raise ValueError(topic)
        if topic == "again" and ctx.attempt == 1:
            raise RuntimeError(topic)
        return await ctx.call("peer", topic, returns=str)

    return app


async def run_on_stage(app: App, topic: str) -> list[str]:
    """Run one task to its end; returns the states that tasks ended in."""
    async with Stage() as stage:
        stage.peer("peer").replies("hoo")
        await stage.run(app)
        await stage.submit("svc", topic)
        await stage.advance(seconds=5)
        return [str(task.state) for task in stage.tasks]


async def test_an_app_hears_a_task_wait_and_end() -> None:
    heard: list[Event] = []

    assert await run_on_stage(make_app(heard.append), "owls") == ["done"]

    told = [(event.name, event.facts) for event in heard]
    names = [name for name, _ in told if name in {"checkpoint_saved", "task_parked", "task_resumed", "task_finished"}]
    saved = [facts["kind"] for name, facts in told if name == "checkpoint_saved"]
    assert names == [
        *("checkpoint_saved", "checkpoint_saved", "task_parked"),
        *("task_resumed", "checkpoint_saved", "task_finished"),
    ]
    assert saved == ["record", "park", "finish"]
    assert told[-1][1]["outcome"] == "done"
    assert len({event.task_id for event in heard}) == 1


@pytest.mark.parametrize(
    ("topic", "wanted", "state"),
    [
        ("wrong", ["handler_failed", "task_finished"], "failed"),
        ("again", ["attempt_failed", "task_finished"], "done"),
    ],
)
async def test_an_app_hears_a_handler_raise(topic: str, wanted: list[str], state: str) -> None:
    heard: list[Event] = []

    assert await run_on_stage(make_app(heard.append), topic) == [state]

    assert [event.name for event in heard if event.name in {*wanted, "handler_failed", "attempt_failed"}] == wanted


async def test_an_app_hears_of_a_commit_that_will_never_be_taken() -> None:
    heard: list[Event] = []
    app = App("svc", on_event=heard.append, checkpoint_refuse=1024, checkpoint_warn=1024)

    @app.task
    async def work(ctx: Context) -> int:
        return len(await ctx.step(lambda: "x" * 2000, key="large"))

    async with Stage() as stage:
        await stage.run(app)
        await stage.submit("svc")
        await stage.settle()

    (failed,) = [event for event in heard if event.name == "checkpoint_failed"]
    assert failed.facts["code"] == "checkpoint_too_large"
    assert [event.name for event in heard][-2:] == ["checkpoint_failed", "task_finished"]


@pytest.mark.parametrize("error", [RuntimeError("theirs"), asyncio.CancelledError()])
async def test_a_hook_that_raises_changes_nothing(error: BaseException) -> None:
    calls: list[str] = []

    def break_down(event: Event) -> None:
        calls.append(event.name)
        raise error

    assert await run_on_stage(make_app(break_down), "owls") == ["done"]
    assert calls[-1] == "task_finished"


def test_a_hook_that_raises_is_told_once_for_each_kind(capture: LogCapture) -> None:
    def break_down(event: Event) -> None:
        raise KeyError("what the line must not quote")

    stream = Events(Metrics(), break_down)
    for _ in range(3):
        stream.tell(TaskParked(uuid4(), 1))
        stream.tell(TaskFinished(uuid4(), "done"))

    failures = [line for line in capture.entries if line["event"] == "on_event_failed"]
    assert [(line["kind"], line["exception"]) for line in failures] == [
        ("task_parked", "KeyError"),
        ("task_finished", "KeyError"),
    ]
    assert "quote" not in str(failures)
    assert Path(__file__).name in failures[0]["line"]


def test_an_event_is_counted_and_logged_before_the_hook_hears_it(capture: LogCapture) -> None:
    metrics = Metrics()
    seen: list[Any] = []

    def look(event: Event) -> None:
        seen.append((metrics.registry.get_sample_value("coatcheck_tasks_parked_total"), len(capture.entries)))

    Events(metrics, look).tell(TaskParked(uuid4(), 1))

    assert seen == [(1.0, 1)]


@pytest.mark.parametrize("hook", ["print", 3])
def test_what_cannot_be_called_is_refused(hook: Any) -> None:
    with pytest.raises(UsageError, match="plain function"):
        App("svc", on_event=hook)


def test_an_async_hook_is_refused() -> None:
    async def hook(event: Event) -> None: ...

    with pytest.raises(UsageError, match="nothing awaits it"):
        App("svc", on_event=hook)


def test_the_page_names_events_and_attributes_that_exist() -> None:
    known = {kind.name: set(kind.__struct_fields__) for kind in kinds()}
    section = (ROOT / "docs/handlers.md").read_text().partition("## Hearing what happens")[2]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `") and "event.name" not in line]

    assert len(rows) == 13
    for _, name, _, attributes, _ in rows:
        listed = set(re.findall(r"`(\w+)`", attributes.partition(":")[0])) | {"task_id"}
        assert listed == known[name.strip(" `")]


def test_no_two_kinds_share_a_name() -> None:
    names = [kind.name for kind in kinds()]

    assert len(names) == len(set(names))


async def test_an_app_hears_of_a_call_without_a_route_and_of_a_message_that_is_buried() -> None:
    heard: list[Event] = []
    app = App("svc", on_event=heard.append)

    @app.task
    async def work(ctx: Context) -> None:
        await ctx.send("svc.replies", "a request on a queue for replies")
        await ctx.call("nowhere")

    async with Stage() as stage:
        stage.peer("nowhere").missing()
        await stage.run(app)
        ticket = await stage.submit("svc")
        await stage.settle()

    facts = {event.name: event.facts for event in heard}
    assert facts["calls_had_no_route"] == {"task_id": ticket.task_id, "peers": ["nowhere"], "call_count": 1}
    assert facts["message_buried"]["queue"] == "svc.replies"
    assert facts["message_buried"]["code"] == "no_correlation_id"


async def test_an_app_hears_of_a_cancel_that_ends_a_parked_task() -> None:
    heard: list[Event] = []
    async with Stage() as stage:
        stage.peer("peer").never()
        await stage.run(make_app(heard.append))
        ticket = await stage.submit("svc", "owls")
        await ticket.cancel("not wanted")

    (ruled,) = [event for event in heard if event.name == "cancel_ruled"]
    assert ruled.facts == {"task_id": heard[0].task_id, "verdict": "recorded", "reason": "not wanted"}
