"""What a process counts, for Prometheus: every name in one place.

Each worker and sweeper has its own registry, so two in one process (tests, the in-memory broker) do not add up.
Counters are kept by the process; how many tasks are parked *now* only Postgres knows, and the sweeper asks it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from coatcheck.log import lost_lines

__all__ = ["Metrics", "describe_metrics"]

PREFIX = "coatcheck"
Meter = TypeVar("Meter", Counter, Histogram)

_COMMIT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BATCH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_HANDLER_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """The meters of one worker or sweeper. Label values are fixed words, never ids, so the series stay few."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.labels: dict[str, tuple[str, ...]] = {}
        self._add_task_meters()
        self._add_reply_meters()
        self._add_store_meters()
        self._add_broker_meters()
        self._add_process_meters()

    def _add_task_meters(self) -> None:
        self.running = self._gauge("tasks_running", "Runs alive in this process.")
        self.tasks = self._gauge("tasks", "Tasks in the store, as the sweeper last counted them.", "state")
        self.tasks_counted_at = self._gauge(
            "tasks_counted_timestamp_seconds", "When the sweeper last counted the tasks in the store, in Unix time."
        )
        self.retired = self._counter("tasks_retired", "Finished tasks that were removed, kept for long enough.")
        self.parked = self._counter("tasks_parked", "Times a task was put down to wait.")
        self.resumed = self._counter("tasks_resumed", "Times a task was picked up because a wait was over.")
        self.finished = self._counter(
            "tasks_finished", "Tasks that reached their final state here: done, failed or cancelled.", "outcome"
        )
        self.retried = self._counter("tasks_retried", "Failed attempts that will be repeated.")
        self.held = self._counter("tasks_held", "Times a task was kept because this code cannot run it.")
        self.damaged = self._counter("tasks_damaged", "Times a task went back to just before a damaged value.")
        self.duplicates = self._counter("requests_duplicate", "Requests whose task was known already.")
        self.picked_up = self._counter(
            "tasks_picked_up", "Runs taken over: a trigger redelivered, or a lease that ran out.", "reason"
        )
        self.in_ram = self._counter("tasks_in_ram", "Tasks that waited in RAM because Postgres was away (`preferred`).")
        self.handler_seconds = self._histogram(
            "handler_seconds",
            "Time one run of a handler took, waits in rows not included.",
            _HANDLER_BUCKETS,
            "handler",
        )

    def _add_reply_meters(self) -> None:
        self.claims = self._counter(
            "claims",
            "Replies and timeouts taken, by result: recorded, woke, duplicate, late, early or unknown.",
            "result",
        )
        self.resumes = self._counter(
            "resumes", "Resume messages taken, by result: woke, early, duplicate, finished or unknown.", "result"
        )
        self.cancels = self._counter("cancels", "Cancels taken, by result: recorded, finished or unknown.", "result")
        self.late_replies = self._counter("replies_late", "Replies to calls that were closed already.")
        self.timeouts_emitted = self._counter("timeouts_emitted", "Timeout messages the sweeper sent.")
        self.timeouts_applied = self._counter("timeouts_applied", "Timeouts that closed a call.")
        self.overdue_age = self._gauge("overdue_age_seconds", "How long the most overdue open call has been due.")
        self.orphans = self._counter("orphans_repaired", "Unfinished tasks found without a waker. Any is a bug.")
        self.resent = self._counter("messages_resent", "Calls and final replies sent again, not known to be sent.")

    def _add_store_meters(self) -> None:
        self.batch_size = self._histogram("batch_size", "Items in one commit.", _BATCH_BUCKETS, "operation")
        self.commit_seconds = self._histogram("commit_seconds", "Time of one commit.", _COMMIT_BUCKETS, "operation")
        self.fenced = self._counter("writes_fenced", "Writes refused because another replica has the task.")
        self.outages = self._counter("outages", "Times a server could not be reached: store or broker.", "server")

        self.seals = self._counter("seals", "Seals of histories that this sweeper made.")
        self.seal_lag = self._gauge("seal_lag_seconds", "For how long an entry of a history has waited to be sealed.")

    def _add_broker_meters(self) -> None:
        self.published = self._counter("messages_published", "Messages confirmed by the broker.")
        self.no_route = self._counter("messages_no_route", "Messages to a queue that does not exist.")
        self.refused = self._counter(
            "messages_refused",
            "Messages their queue did not take, full or away: by peer, own queue, or all `replies` together.",
            "destination",
        )
        self.refusing = self._gauge(
            "destinations_refusing", "Queues that refuse messages, as far as this process knows.", "destination"
        )
        self.answers_dropped = self._counter(
            "answers_dropped", "Answers that no row remembers, dropped as their reply queue refused them for long."
        )
        self.dead_letters = self._counter("dead_letters", "Messages put in the dead-letter queue.", "reason")

    def _add_process_meters(self) -> None:
        self.sweeper_missing = self._gauge(
            "sweeper_missing", "Workers that see no sweeper on its queue: without one, timeouts and retries wait."
        )
        self.restarts = self._counter("restarts", "Replicas that ended by themselves under `--processes`.")
        self.labels[f"{PREFIX}_log_lines_lost"] = ()
        self.registry.register(_LostLines())

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        self.labels[f"{PREFIX}_{name}"] = labels
        return _quick(Counter(name, about, labels, namespace=PREFIX, registry=self.registry))

    def _gauge(self, name: str, about: str, *labels: str) -> Gauge:
        self.labels[f"{PREFIX}_{name}"] = labels
        return Gauge(name, about, labels, namespace=PREFIX, registry=self.registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        self.labels[f"{PREFIX}_{name}"] = labels
        return _quick(Histogram(name, about, labels, namespace=PREFIX, buckets=buckets, registry=self.registry))


class _LostLines(Collector):
    """Lines are the process's, whichever part of it wrote them."""

    def collect(self) -> Iterator[Metric]:
        about = "Log lines never written, because the stream was closed, full or blocked."
        yield CounterMetricFamily(f"{PREFIX}_log_lines_lost", about, value=lost_lines.count)


def _quick(meter: Meter) -> Meter:
    """Remember a meter's series by their label values. None is ever removed.

    Finding a series takes longer than counting: without this a task that never waits costs a worker a tenth more CPU
    (`bench.profile_worker --handler no_wait`).
    """
    meter.labels = lru_cache(maxsize=None)(meter.labels)  # type: ignore[method-assign]
    return meter


def describe_metrics() -> str:
    """Return the table of `docs/metrics.md`, made from a registry so that it cannot lag behind the code."""
    metrics = Metrics()
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for family in sorted(metrics.registry.collect(), key=lambda each: each.name):
        suffix = "_total" if family.type == "counter" else ""
        names = ", ".join(f"`{each}`" for each in metrics.labels[family.name])
        lines.append(f"| `{family.name}{suffix}` | {family.type} | {names} | {family.documentation} |")
    return "\n".join(lines) + "\n"
