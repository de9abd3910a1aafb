"""The fan-4 lifecycle in Celery: a chord of four echoes and a callback, over RabbitMQ.

PEERS_VARIANT names the result backend: `redis` or `postgres`.

What was chosen, and why:
- Work survives the death of a worker only with late acks and rejection of the messages of a dead child; both are off by
  default and on here. Messages are persistent (the default) and published with confirms.
- Queues are classic and durable, Celery's default. With quorum queues it would set up delayed delivery, under names
  that all applications of a broker share.
- Two children, one for each core (the default), and a prefetch of 64 for each: the optimizing guide asks for a large
  one where tasks are short. Gossip, mingle, heartbeats, events and remote control are off: they only cost here.
- On Postgres, Celery has no counter for a chord. A separate task looks every `result_chord_retry_interval`, one second
  by default, and an idle lifecycle waits for that. The default stayed: a shorter interval means more looks at each.
"""

import os
import sys

from celery import Celery, chord, signals
from load import FAN, PATIENCE_S, PAYLOAD, ready, serve_blocking

PREFIX = os.environ["PEERS_PREFIX"]
VARIANT = os.environ["PEERS_VARIANT"]
BACKENDS = {
    "redis": os.environ["PEERS_REDIS"],
    "postgres": os.environ["PEERS_DATABASE"].replace("postgresql://", "db+postgresql+psycopg2://"),
}

app = Celery("bench", broker=os.environ["PEERS_BROKER"], backend=BACKENDS[VARIANT])
app.conf.update(
    task_default_queue=f"{PREFIX}-celery",
    task_default_exchange=f"{PREFIX}-celery",
    event_exchange=f"{PREFIX}-events",
    control_exchange=f"{PREFIX}-control",
    result_backend_transport_options={"global_keyprefix": f"{PREFIX}-"},
    broker_transport_options={"confirm_publish": True},
    broker_connection_retry_on_startup=True,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=64,
    worker_enable_remote_control=False,
    worker_redirect_stdouts=False,
)


@app.task(name="echo")
def echo(value: dict[str, str]) -> dict[str, str]:
    return value


@app.task(name="finish")
def finish(values: list[dict[str, str]]) -> int:
    return sum(value == PAYLOAD for value in values)


@signals.worker_ready.connect
def on_ready(**_: object) -> None:
    ready()


def work() -> None:
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=warning"]
    app.worker_main(["worker", "--pool=prefork", "--concurrency=2", f"--hostname={PREFIX}@%h", *quiet])


def client() -> None:
    # The Redis backend is told of a result, the database backend looks for it. It makes a new connection for each look,
    # unless its process was forked, as in a server that forks its workers. So we tell it that it was forked. That
    # halves the cost of a lifecycle.
    if VARIANT == "postgres":
        app.backend.session_manager.forked = True
    serve_blocking(
        lambda: chord([echo.s(PAYLOAD) for _ in range(FAN)])(finish.s()),
        lambda result: result.get(timeout=PATIENCE_S, interval=0.02),
    )


def clean() -> None:
    with app.connection() as connection:
        channel = connection.channel()
        channel.queue_delete(f"{PREFIX}-celery")
        for exchange in ("celery", "events", "control"):
            channel.exchange_delete(f"{PREFIX}-{exchange}")
    if VARIANT == "redis":
        for key in app.backend.client.scan_iter(f"{PREFIX}-*", count=1000):
            app.backend.client.delete(key)
    ready()


if __name__ == "__main__":
    {"worker": work, "client": client, "clean": clean}[sys.argv[1]]()
