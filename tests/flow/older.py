"""The app whose tasks `tests/store/data/0001.sql` holds, put down halfway by the release of that schema.

    python -m tests.flow.older postgresql:///empty_database

leaves such tasks in an empty database, with the code of the release that runs it. `pg_dump --data-only
--column-inserts --schema coatcheck` writes them out.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import asyncpg
from tests.broker.rigs import as_broker
from tests.conftest import ServiceNames
from tests.flow.harness import Peer, Rig, rig_on, until

from coatcheck.store import TaskState, migrate
from coatcheck.worker import App, Caller, Context, Retry

SERVICE, PEER, ASKER = "older", "older-peer", "older-asker"
APP = "tests.flow.older:app"

ran: list[str] = []
"""The steps that ran in this process."""


def plan(topic: str) -> dict[str, str]:
    ran.append("plan")
    return {"topic": topic, "kind": "plan"}


def survey(topic: str) -> list[str]:
    """A value that is large enough to be compressed at rest."""
    ran.append("survey")
    return [f"{topic} number {number}" for number in range(400)]


def prepare(topic: str) -> str:
    ran.append("prepare")
    return f"prepared {topic}"


def make_app(first: Callable[[str], Any] = prepare) -> App:
    """With another step the app does not fit the journals of `moved`."""
    app = App(SERVICE, identify=lambda token: Caller(token, {"team": "birds"}) if token else None)

    @app.task
    async def research(ctx: Context, topic: str) -> dict[str, object]:
        planned = await ctx.step(plan, topic)
        surveyed = await ctx.step(survey, topic)
        found = await ctx.gather(*(ctx.call(PEER, f"{topic}-{number}", timeout=86400) for number in range(2)))
        caller = ctx.caller and [ctx.caller.subject, ctx.caller.claims["team"]]
        return {"plan": planned, "surveyed": len(surveyed), "found": found, "caller": caller}

    @app.task
    async def nap(ctx: Context, topic: str) -> str:
        prepared = await ctx.step(prepare, topic)
        await ctx.sleep(86400)
        return f"{prepared}, rested"

    @app.task(retry=Retry(attempts=2, backoff=86400))
    async def flaky(ctx: Context, topic: str) -> str:
        prepared = await ctx.step(prepare, topic)
        if ctx.attempt == 1:
            raise RuntimeError("not lucky")
        return f"{prepared}, attempt {ctx.attempt}"

    @app.task
    async def moved(ctx: Context, topic: str) -> str:
        prepared = await ctx.step(first, topic)
        return f"{prepared}, {await ctx.call(PEER, topic, timeout=86400)}"

    @app.task
    async def quick(ctx: Context, topic: str) -> str:
        return await ctx.step(prepare, topic)

    @app.task
    async def slow(ctx: Context, topic: str) -> str:
        """Runs on after its message is acknowledged, so that its answer is the sweeper's to send."""
        await ctx.step(asyncio.sleep, 1, key="ponder")
        return await ctx.step(prepare, topic)

    @app.task
    async def tell(ctx: Context, topic: str) -> str:
        return await ctx.call(PEER, topic, timeout=86400)

    return app


app = make_app()


async def ask(rig: Rig, handler: str, topic: str) -> None:
    """Send a request of a caller; the topic is its body, identity and correlation id."""
    await (await rig.wire()).publish(
        SERVICE,
        json.dumps(topic).encode(),
        type=handler,
        content_type="application/json",
        reply_to=ASKER,
        correlation_id=topic,
        message_id=topic,
        headers={"authorization": "Bearer ann"},
    )


async def leave_tasks(rig: Rig) -> None:
    """One of each: waiting for one more reply, asleep, between two attempts, ended and answered, ended with its answer
    unsent, parked with its call unsent, held.
    """
    wire, sql = await rig.wire(), await rig.sql()
    peer, asker = await Peer(wire, PEER).start(), await Peer(wire, ASKER).start()
    process = await rig.worker_process(APP)
    for handler, topic in (("research", "owls"), ("nap", "bats"), ("flaky", "moths"), ("moved", "crabs")):
        await ask(rig, handler, topic)
    await ask(rig, "quick", "ants")
    await asker.asked()
    questions = {question.body: question for question in await peer.asked(3)}
    await questions["owls-0"].reply("hoo")
    await until(lambda: _is_recorded(sql), what="the reply and the retry are recorded, the calls are marked")
    process.terminate()
    await process.wait()
    for handler, topic, point in (("slow", "bees", "after_finish"), ("tell", "wrens", "after_park")):
        process = await rig.worker_process(APP, COATCHECK_CRASH=point, COATCHECK_LONG_RUN_LIMIT="0.1")
        await ask(rig, handler, topic)
        await process.wait()
        await sql.execute("DELETE FROM coatcheck_broker.message")
    worker = await rig.replica(make_app(first=survey))
    await questions["crabs"].reply("clack")
    await rig.task(TaskState.HELD)
    worker.stop()


async def _is_recorded(sql: asyncpg.Connection) -> bool:
    return bool(
        await sql.fetchval("""
            SELECT EXISTS (SELECT FROM coatcheck.call WHERE state = 'ok')
               AND EXISTS (SELECT FROM coatcheck.task WHERE state = 'retrying')
               AND EXISTS (SELECT FROM coatcheck.task WHERE state = 'done')
               AND (SELECT count(*) = 3 FROM coatcheck.task WHERE state = 'parked')
               AND (SELECT bool_and(is_sent OR kind = 'timer') FROM coatcheck.call)""")
    )


async def record(url: str) -> None:
    await migrate(url)
    async with rig_on(as_broker(url), url, ServiceNames()) as rig:
        await leave_tasks(rig)


if __name__ == "__main__":
    asyncio.run(record(sys.argv[1]))
