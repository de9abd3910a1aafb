"""The fan-4 lifecycle in DBOS: a workflow that starts four echo workflows and waits for them, all in Postgres.

PEERS_VARIANT says how the echoes start: `direct`, in the process that asks, or `queues`, in any process that takes them
from a queue.

What was chosen, and why:
- Direct: DBOS is a library, so client and worker are one process. Two of them, one for each core, each with an
  executor id of its own as its documentation asks.
- Queues: two worker processes serve both queues, and a client of DBOS puts requests in and waits for results. Queues
  and results are looked at once a second by default; here more often, see POLL_S, or an idle lifecycle takes seconds.
- The pool of 20 connections is the default.
"""

import asyncio
import os
import sys

from dbos import DBOS, DBOSClient
from load import FAN, PAYLOAD, ready, serve

DATABASE = os.environ["PEERS_DATABASE"].replace("postgresql://", "postgresql+psycopg://")
VARIANT = os.environ["PEERS_VARIANT"]
POLL_S = 0.1


@DBOS.workflow()
async def echo(value: dict[str, str]) -> dict[str, str]:
    return value


@DBOS.workflow()
async def fan4_direct(value: dict[str, str]) -> int:
    handles = [await DBOS.start_workflow_async(echo, value) for _ in range(FAN)]
    return sum([await handle.get_result() == value for handle in handles])


@DBOS.workflow()
async def fan4_queues(value: dict[str, str]) -> int:
    handles = [await DBOS.enqueue_workflow_async("echoes", echo, value) for _ in range(FAN)]
    return sum([await handle.get_result(polling_interval_sec=POLL_S) == value for handle in handles])


def launch() -> None:
    DBOS(
        config={
            "name": "bench",
            "system_database_url": DATABASE,
            "executor_id": f"executor-{os.getpid()}",
            "application_version": "bench",
            "log_level": "WARNING",
        }
    )
    DBOS.launch()


def migrate() -> None:
    launch()
    for queue in ("requests", "echoes"):
        DBOS.register_queue(queue, polling_interval_sec=POLL_S)
    ready()
    DBOS.destroy()


async def work() -> None:
    launch()
    ready()
    await asyncio.Event().wait()


async def client() -> None:
    if VARIANT == "direct":
        launch()
        await serve(lambda: fan4_direct(PAYLOAD))
    else:
        remote = DBOSClient(system_database_url=DATABASE)

        async def call() -> object:
            handle = await remote.enqueue_async({"queue_name": "requests", "workflow_name": "fan4_queues"}, PAYLOAD)
            return await handle.get_result(polling_interval_sec=POLL_S)

        await serve(call)


if sys.argv[1] == "migrate":
    migrate()
else:
    asyncio.run({"worker": work, "client": client}[sys.argv[1]]())
