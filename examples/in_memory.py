"""Tasks without servers: service, sweeper and client in one process, rows and messages in its memory.

python -m examples.in_memory
"""

import asyncio
from datetime import timedelta

from coatcheck.worker import App, Client, Context, Settings, Sweeper, Worker

app = App("tea")


@app.task
async def brew(ctx: Context, leaf: str) -> str:
    await ctx.sleep(timedelta(seconds=1))  # parked: a row in memory, which the sweeper wakes
    return f"a cup of {leaf}"


async def main() -> None:
    settings = Settings(broker="memory://", store="memory://")
    async with Sweeper(settings), Worker(app, settings), Client(settings) as client:
        ticket = await client.submit("tea", {"leaf": "assam"})
        print(await ticket.result(timeout=30))


if __name__ == "__main__":
    asyncio.run(main())
