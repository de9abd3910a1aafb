"""Foreign peers: one handler that asks a program in Node, one in Python with plain `pika`, and a bash script.

    python -m examples.foreign_peers "some words"

Look at the peers: they use no code of ours. `peer.js` and `peer.py` send the answer to the question's `reply_to` with
its `correlation_id`; a peer has to do nothing else. `amqp-tools`, which `peer.sh` uses, gives a script only the body.
So `desk.py` writes the two properties in front of the question and takes them off the answer.
"""

import os

from coatcheck.worker import App, Context

PREFIX = os.environ.get("EXAMPLES_PREFIX", "")  # for a broker that has other queues of the same names
LONGEST, LETTERS, WORDS = f"{PREFIX}longest", f"{PREFIX}letters", f"{PREFIX}words"

app = App(f"{PREFIX}text")


@app.task
async def text(ctx: Context, words: str) -> dict[str, object]:
    """Ask all three at once, and join their answers."""
    longest, letters, count = await ctx.gather(
        ctx.call(LONGEST, words, timeout=60, returns=str),
        ctx.call(LETTERS, words, timeout=60, returns=dict[str, int]),
        ctx.call(WORDS, words, timeout=60, returns=int),
    )
    return {"words (bash)": count, "longest (Node)": longest, "letters (pika)": letters}
