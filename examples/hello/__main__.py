"""Start both services, ask, print the answer."""

import sys

from coatcheck.worker import Client
from examples.stage import Stage, play


async def main(names: list[str]) -> None:
    async with Stage() as stage:
        await stage.workers("examples.hello:app", "examples.hello:greeter")
        async with Client() as client:
            for greeting in await client.call("hello", names, timeout=30):
                print(greeting)


if __name__ == "__main__":
    sys.exit(play(main(sys.argv[1:] or ["Ada", "Edsger", "Grace"])))
