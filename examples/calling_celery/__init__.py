"""Calling Celery tasks as peers: nothing changes in the Celery project, and the handler waits durably.

    python -m examples.calling_celery

Look at `call_celery`. It writes a message that a Celery worker reads (Celery's protocol 1: a JSON body and no headers)
and opens the envelope that comes back. The worker sends the envelope to `reply_to` with the `correlation_id`, because
the `rpc://` result backend does that for every message. More in docs/celery.md.
"""

import os
from typing import Any

from coatcheck.worker import App, CallFailed, Context, Retry

PREFIX = os.environ.get("EXAMPLES_PREFIX", "")  # for a broker that has other queues of the same names
CELERY = f"{PREFIX}celery"  # the queue of the Celery workers; `celery` is what Celery itself calls it

app = App(f"{PREFIX}sums")


class CeleryFailed(Exception):
    """A Celery task raised. The text has the type and the text of its exception."""


async def call_celery(
    ctx: Context, task: str, *args: Any, timeout: float, retry: Retry | None = None, key: str | None = None
) -> Any:
    """Run a Celery task and return its result. Raises CeleryFailed if it fails, CallTimedOut if no answer comes.

    `retry` asks again after a timeout, not after a failure. Equal calls in one handler share Celery's task id, unless
    each has a `key`.
    """
    task_id = ctx.uuid(key or f"{task}{args}")  # the same in every run and every try
    message = {"task": task, "id": str(task_id), "args": args, "kwargs": {}}
    reply = await ctx.call(CELERY, message, timeout=timeout, retry=retry, key=key)
    match reply["status"]:
        case "SUCCESS":
            return reply["result"]
        case "FAILURE":
            said = ", ".join(str(part) for part in reply["result"]["exc_message"])
            raise CeleryFailed(f"{reply['result']['exc_type']}: {said}")
        case other:  # REVOKED; or RETRY and STARTED, which are not final: see docs/celery.md
            raise CeleryFailed(f"{task} answered {other}, and not with a result")


@app.task
async def sums(ctx: Context, x: float, y: float) -> dict[str, str]:
    """Two Celery tasks at once. One that fails is an error like any other."""
    names = ("proj.add", "proj.divide")
    calls = [call_celery(ctx, name, x, y, timeout=60) for name in names]
    answers = await ctx.gather(*calls, return_exceptions=True)
    return {f"{name}({x:g}, {y:g})": describe(answer) for name, answer in zip(names, answers, strict=True)}


def describe(answer: object) -> str:
    return f"failed, {answer}" if isinstance(answer, CeleryFailed | CallFailed) else f"{answer:g}"


@app.task
async def careful_sum(ctx: Context, x: float, y: float) -> float:
    """A Celery worker that dies takes its task with it, unless the task has `acks_late`. So ask again after a while."""
    again = Retry(attempts=10, backoff=0.5)
    return float(await call_celery(ctx, "proj.add_slowly", x, y, timeout=3, retry=again))
