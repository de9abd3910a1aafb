"""Start a Celery worker and the service; ask, and kill the Celery worker in the middle of the second question."""

import sys

from coatcheck.worker import Client
from examples.calling_celery import CELERY, app
from examples.stage import Program, Stage, need, play


async def main() -> None:
    broker = await need(rabbitmq=True)
    async with Stage({"COATCHECK_BROKER": broker, "CELERY_BROKER_URL": broker}) as stage:
        celery = await start_celery(stage)
        await stage.workers("examples.calling_celery:app")
        await celery.wait_for("ready.")
        async with Client(broker=broker) as client:
            sums = await client.call(app.service, {"x": 2, "y": 0}, task="sums", timeout=60)
            for question, answer in sums.items():
                print(f"{question}: {answer}")

            ticket = await client.submit(app.service, {"x": 2, "y": 3}, task="careful_sum")
            await celery.wait_for("adding slowly")
            await celery.kill()
            print(f"kill -9 {celery.pid}: the Celery worker is gone, in the middle of proj.add_slowly(2, 3)")
            celery = await start_celery(stage)
            print(f"proj.add_slowly(2, 3): {await ticket.result(60):g}")
            asked = [line for line in await client.lines(ticket.task_id) if line.name == CELERY]
            print(f"the handler asked {len(asked)} times, and waited as a row in Postgres")


async def start_celery(stage: Stage) -> Program:
    options = ("--queues", CELERY, "--concurrency", "1", "--loglevel", "INFO", "--without-gossip", "--without-mingle")
    command = ("python", "-m", "celery", "--app", "examples.calling_celery.proj", "worker", *options)
    return await stage.start(*command, name="the Celery worker")


if __name__ == "__main__":
    sys.exit(play(main()))
