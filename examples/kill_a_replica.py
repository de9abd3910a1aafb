"""Kill a replica: start two, run one task, and kill -9 the replica that holds it. The other replica ends the task.

    python -m examples.kill_a_replica

Look at which replica does what. The draft was recorded, so it is written once. The review was cut off before it could
be recorded, so it begins again on the other replica: that is all a crash costs.
"""

import os
import sys
import time

from coatcheck.worker import App, Client, Context
from examples.stage import CannotRun, Stage, play

PREFIX = os.environ.get("EXAMPLES_PREFIX", "")  # for a broker that has other queues of the same names
MODULE = "examples.kill_a_replica"
REVIEW_S = 3.0

app = App(f"{PREFIX}article")
library = App(f"{PREFIX}library")


@app.task
async def article(ctx: Context, topic: str) -> dict[str, object]:
    draft = await ctx.step(write, topic)
    sources = await ctx.call(f"{PREFIX}library", topic, timeout=60)
    ctx.progress(message=f"review begins on {os.getpid()}")
    review = await ctx.step(read_again, topic)
    return {"draft by": draft, "sources": sources, "review by": review}


def write(topic: str) -> int:
    return os.getpid()


def read_again(topic: str) -> int:
    """Slow work on the replica that holds the task. The step runs in a thread, so other tasks continue."""
    time.sleep(REVIEW_S)
    return os.getpid()


@library.task
async def find(ctx: Context, topic: str) -> list[str]:
    return [f"{topic}, volume {number}" for number in (1, 2)]


async def main() -> None:
    async with Stage() as stage:
        first, second, _ = await stage.workers(f"{MODULE}:app", f"{MODULE}:app", f"{MODULE}:library")
        replicas = {first.pid: first, second.pid: second}
        async with Client() as client:
            ticket = await client.submit(app.service, "octopuses")
            print(f"asked for an article: task {ticket.task_id}")
            killed = 0
            async for told in ticket.progress():
                holder = int((told.message or "").rpartition(" ")[2])
                print(f"replica {holder} holds the task and begins the review")
                if not killed:
                    await replicas[holder].kill()
                    killed = holder
                    print(f"kill -9 {killed}: gone, in the middle of the review")
            result = await ticket.result(60)
            epoch = (await client.get(ticket.task_id)).epoch
    if result["review by"] == killed:
        raise CannotRun(f"replica {killed} was faster than the kill")
    print(f"replica {result['review by']} ended the task; it was picked up {epoch} times")
    print(f"the draft was written once, by replica {result['draft by']}")


if __name__ == "__main__":
    sys.exit(play(main()))
