"""A Celery project as it is, called from a handler: results, failures, and a Celery worker that dies."""

import re

import pytest
from tests.examples.processes import ROOT, command_of

from coatcheck.testing import Stage
from examples.calling_celery import CELERY, app


def test_handler_waits_for_celery_tasks_and_outlives_their_worker(processes_with_store, prefix, service_names):
    # Celery's own exchanges (celery, celeryev, celery.pidbox) have fixed names and may be somebody's: they stay.
    made = prefix("sums", queues=("celery",))
    service_names.exchanges.append(f"{made}celery")

    ended = processes_with_store.play(command_of("Calling Celery tasks"), EXAMPLES_PREFIX=made)

    assert ended.code == 0, ended.printed
    assert "proj.add(2, 0): 2" in ended.lines
    assert "proj.divide(2, 0): failed, ZeroDivisionError: float division by zero" in ended.lines
    assert re.search(r"^kill -9 \d+: the Celery worker is gone", ended.printed, flags=re.MULTILINE)
    assert "proj.add_slowly(2, 3): 5" in ended.lines
    assert int(re.findall(r"the handler asked (\d+) times", ended.printed)[0]) >= 1


def test_the_celery_project_knows_nothing_of_us():
    source = (ROOT / "examples/calling_celery/proj.py").read_text()
    imports = re.findall(r"^(?:from|import) .*", source, flags=re.MULTILINE)

    assert imports == ["import time", "from celery import Celery"]


# --- the handler alone, with a fake in the place of Celery ---


async def test_task_that_is_lost_with_its_worker_is_asked_for_again_under_the_same_id():
    async with Stage() as stage:
        await stage.run(app)
        celery = stage.peer(CELERY)
        celery.never().then.never().then.replies({"status": "SUCCESS", "result": 5})

        ticket = await stage.submit(app.service, {"x": 2, "y": 3}, task="careful_sum")
        await stage.advance(minutes=1)

        assert await ticket.result() == 5
        assert len(celery.asked) == 3
        assert len({body["id"] for body in celery.asked}) == 1


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ({"status": "FAILURE", "result": {"exc_type": "NotRegistered", "exc_message": ["proj.add"]}}, "NotRegistered"),
        ({"status": "RETRY", "result": {"exc_type": "ValueError", "exc_message": ["x"]}}, "answered RETRY"),
        ({"status": "STARTED", "result": {"pid": 1}}, "answered STARTED"),
    ],
    ids=["not registered", "retry", "started"],
)
async def test_answer_that_is_no_result_is_a_failure_in_the_handler(reply: dict[str, object], text: str):
    async with Stage() as stage:
        await stage.run(app)
        stage.peer(CELERY).replies(lambda _: reply)

        ticket = await stage.submit(app.service, {"x": 2, "y": 3}, task="sums")

        assert text in (await ticket.result())["proj.add(2, 3)"]
