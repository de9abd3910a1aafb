"""The fan-4 lifecycle in Absurd: a task that spawns four echo tasks and awaits the event of each.

What was chosen, and why:
- Awaiting an event suspends the task: it leaves the worker and is in the database, which is the durable wait. The
  other way, `await_task_result`, keeps a worker's slot and polls.
- The echoes are spawned in a step, so a task that resumes does not spawn them again. They emit their events.
- A worker of the asynchronous kind has one connection and waits for a whole batch before it claims the next. So: two
  processes, one for each core, with WORKERS workers each for requests and for echoes, and batches of BATCH.
- Workers look for work every quarter of a second by default; here more often, see POLL_S, or an idle lifecycle takes
  most of a second.
- The client looks for results: under load as the SDK does, with a growing pause; when idle, every 5 ms.
"""

import asyncio
import os
import sys

import absurdctl
import psycopg
from absurd_sdk import AsyncAbsurd, AsyncTaskContext
from load import FAN, PAYLOAD, ready, serve

DATABASE = os.environ["PEERS_DATABASE"]
WORKERS = 3
BATCH = 10
POLL_S = 0.02


def registered(queue: str) -> AsyncAbsurd:
    app = AsyncAbsurd(DATABASE, queue_name=queue)

    @app.register_task(name="echo", queue="echoes")
    async def echo(params: dict[str, object], ctx: AsyncTaskContext) -> None:
        await app.emit_event(str(params["event"]), params["value"], queue_name="requests")

    @app.register_task(name="fan4", queue="requests")
    async def fan4(params: dict[str, str], ctx: AsyncTaskContext) -> int:
        async def spawn() -> list[str]:
            events = [f"{ctx.task_id}:{number}" for number in range(FAN)]
            for event in events:
                await app.spawn("echo", {"event": event, "value": params}, queue="echoes")
            return events

        events = await ctx.step("spawn", spawn)
        return sum([await ctx.await_event(event) == params for event in events])

    return app


async def migrate() -> None:
    async with await psycopg.AsyncConnection.connect(DATABASE, autocommit=True) as connection:
        await connection.execute(absurdctl.BUNDLED_SCHEMA_SQL)
    app = registered("requests")
    for queue in ("requests", "echoes"):
        await app.create_queue(queue)
    await app.close()
    ready()


async def work() -> None:
    async with asyncio.TaskGroup() as workers:
        for queue in ("requests", "echoes") * WORKERS:
            workers.create_task(registered(queue).start_worker(concurrency=BATCH, poll_interval=POLL_S))
        ready()


async def client() -> None:
    app, under_way = registered("requests"), 0

    async def call() -> object:
        nonlocal under_way
        under_way += 1
        task = await app.spawn("fan4", PAYLOAD)
        while under_way == 1 and (await app.fetch_task_result(task["task_id"])).state != "completed":  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        found = await app.await_task_result(task["task_id"])
        under_way -= 1
        return found.result

    await serve(call)


asyncio.run({"migrate": migrate, "worker": work, "client": client}[sys.argv[1]]())
