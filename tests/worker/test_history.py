"""How much history a task keeps: said by its handler, else by its app, else by the environment."""

import pytest
from tests.worker.fake_port import Desk

from coatcheck.errors import UsageError
from coatcheck.store.rows import HistoryLevel
from coatcheck.worker import App, Context
from coatcheck.worker.settings import History


async def handler(ctx: Context) -> None: ...


def test_an_app_keeps_the_outcome_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv("COATCHECK_HISTORY", raising=False)
    assert App("shop").load_settings().history is History.OUTCOME
    assert App("shop", history="full").load_settings().history is History.FULL

    monkeypatch.setenv("COATCHECK_HISTORY", "off")

    assert App("shop").load_settings().history is History.OFF


def test_a_handler_may_keep_more_or_less_than_its_app():
    app = App("shop", history="off")
    app.task(history="full")(handler)

    found = app.find_handler("handler")

    assert found is not None
    assert found.history is HistoryLevel.FULL


def test_an_unknown_level_is_refused_where_it_is_written():
    with pytest.raises(UsageError, match=r"App\('shop'\): history='loud' must be one of off, outcome, full"):
        App("shop", history="loud")
    with pytest.raises(UsageError, match=r"history='loud' must be one of off, outcome, full"):
        App("shop").task(history="loud")(handler)


async def test_a_record_where_the_history_is_off_keeps_nothing_and_says_so_once():
    async def recording(ctx: Context) -> int:
        for _ in range(3):
            ctx.record("decision", choice=1)
        return 1

    desk = Desk(recording, history=HistoryLevel.OFF)
    outcome = await desk.once()

    assert not outcome.changes.entries
    assert desk.log.events() == ["history_entry_not_kept"]
