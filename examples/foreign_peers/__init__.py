"""Foreign peers: one handler that asks a program in Node, one in Python with plain `pika`, and a bash script.

    python -m examples.foreign_peers "some words"

Look at the peers: none of them has anything of ours. `peer.js` and `peer.py` send the answer to the question's
`reply_to` with its `correlation_id`; that is all there is to being a peer. `amqp-tools`, which `peer.sh` uses, hands a
script nothing but the body, so `desk.py` writes the two in front of the question and takes them off the answer.
"""

import os

from coatcheck.worker import App, Context

PREFIX = os.environ.get("EXAMPLES_PREFIX", "")  # for queues that share a broker with others of the same names
LONGEST, LETTERS, WORDS = f"{PREFIX}longest", f"{PREFIX}letters", f"{PREFIX}words"

app = App(f"{PREFIX}text")


@app.task
async def text(ctx: Context, words: str) -> dict[str, object]:
    """Ask all three at once, and join what they say."""
    longest, letters, count = await ctx.gather(
        ctx.call(LONGEST, words, timeout=60, returns=str),
        ctx.call(LETTERS, words, timeout=60, returns=dict[str, int]),
        ctx.call(WORDS, words, timeout=60, returns=int),
    )
    return {"words (bash)": count, "longest (Node)": longest, "letters (pika)": letters}
