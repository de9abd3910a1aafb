"""The research service in this process: fake peers, no servers, no waiting. As a user would test it."""

from pathlib import Path

from coatcheck.testing import assert_replays, crash_at_every_checkpoint, plugin
from examples.research import app

coatcheck = plugin.coatcheck  # as the plugin gives it, also where its entry point is not installed yet

QUESTIONS = ["what is known about octopuses", "who studies octopuses", "what is new in octopuses"]
JOURNALS = Path(__file__).parent / "journals"


async def test_report_holds_what_was_found(coatcheck):
    coatcheck.peer("search").replies(lambda question: [f"{question}: plenty"])
    await coatcheck.run(app)

    ticket = await coatcheck.submit("research", "octopuses")
    report = await ticket.result()

    assert report["missing"] == []
    assert report["text"].splitlines()[1] == "What is known about octopuses? what is known about octopuses: plenty."
    assert coatcheck.peer("search").asked == QUESTIONS
    assert [told.message for told in ticket.progress] == ["searching", "writing"]


async def test_questions_that_fail_or_time_out_are_missing(coatcheck):
    coatcheck.peer("search").replies(["plenty"]).then.fails("index_broken").then.never()
    await coatcheck.run(app)
    ticket = await coatcheck.submit("research", "octopuses")

    await coatcheck.advance(seconds=29)
    assert ticket.state == "parked"
    await coatcheck.advance(seconds=1)

    assert (await ticket.result())["missing"] == QUESTIONS[1:]
    assert coatcheck.peer("search").cancelled == QUESTIONS[2:]


def test_no_crash_changes_the_report():
    report = crash_at_every_checkpoint(app, "octopuses", peers={"search": lambda question: [question.upper()]})

    assert report.result["missing"] == []
    assert set(report.repeated) == {"make_plan", "write"}


def test_task_that_was_parked_by_an_earlier_release_still_fits():
    replay = assert_replays(app, JOURNALS / "research-parked.json")

    assert replay.next == ("waits for call 'search' under key 'search#3'",)
