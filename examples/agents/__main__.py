"""Start the planner and its three agents, give it a goal, show what it does."""

import sys

from coatcheck.worker import Client
from examples.agents import TOOLS
from examples.stage import Stage, play


async def main(goal: str) -> None:
    async with Stage() as stage:
        await stage.workers("examples.agents:planner", *(f"examples.agents:{tool}" for tool in TOOLS))
        async with Client() as client:
            ticket = await client.submit("planner", goal)
            async for told in ticket.progress():
                print(f"planner {told.message}")
            result = await ticket.result()
            print(f"\n{result['article']}\n\n({result['rounds']} rounds)")


if __name__ == "__main__":
    sys.exit(play(main(" ".join(sys.argv[1:]) or "an article about octopuses")))
