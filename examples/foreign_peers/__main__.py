"""Start the peers and the service, ask, print the answer. Say what is missing on this machine."""

import asyncio
import sys
from pathlib import Path

from coatcheck.worker import Client
from examples.foreign_peers import LETTERS, LONGEST, WORDS, app
from examples.stage import CannotRun, Stage, need, play

HERE = Path(__file__).parent
TOOLS = {
    "node": "install Node.js 18 or newer (nodejs.org, or your package manager)",
    "npm": "comes with Node.js, or as a package of its own",
    "bash": "install it with your package manager",
    "amqp-consume": "apt-get install amqp-tools, or brew install rabbitmq-c",
}


async def main(words: str) -> None:
    broker = await need(rabbitmq=True, programs=TOOLS)
    await install_amqplib()
    async with Stage({"COATCHECK_BROKER": broker}) as stage:
        desk = await stage.start("python", f"{HERE}/desk.py", WORDS)
        peers = [
            await stage.start("node", f"{HERE}/peer.js", LONGEST),
            await stage.start("python", f"{HERE}/peer.py", LETTERS),
        ]
        await desk.wait_for("open for")  # it makes the queues that the script reads
        peers.append(await stage.start("bash", f"{HERE}/peer.sh", WORDS))
        for peer in peers:
            await peer.wait_for("answering on")
        await stage.workers("examples.foreign_peers:app")
        async with Client(broker=broker) as client:
            for question, answer in (await client.call(app.service, words, timeout=60)).items():
                print(f"{question}: {answer}")


async def install_amqplib() -> None:
    """`npm ci`, the first time."""
    if (HERE.parent / "node_modules/amqplib").is_dir():
        return
    print("npm ci, once", flush=True)
    process = await asyncio.create_subprocess_exec("npm", "ci", "--ignore-scripts", "--silent", cwd=HERE.parent)
    if await process.wait() != 0:
        raise CannotRun("`npm ci` in examples/ failed, see above: is the npm registry within reach?")


if __name__ == "__main__":
    sys.exit(play(main(" ".join(sys.argv[1:]) or "the octopus has eight arms and three hearts")))
