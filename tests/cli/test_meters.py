"""The meters of several processes, as one."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from coatcheck.cli.processes.reports import Merged, Meter, merge, read_meters, without_gauges


class Counted:
    """The meters of one process."""

    def __init__(self, *, done: int, failed: int = 0, running: int = 0, seconds: tuple[float, ...] = ()) -> None:
        self.registry = CollectorRegistry()
        finished = Counter("finished", "Ended.", ["outcome"], registry=self.registry)
        finished.labels("done").inc(done)
        if failed:
            finished.labels("failed").inc(failed)
        Gauge("running", "Alive.", registry=self.registry).set(running)
        took = Histogram("took", "Time.", buckets=(1, 10), registry=self.registry)
        for each in seconds:
            took.observe(each)

    def read(self) -> list[Meter]:
        return read_meters(self.registry)


def shown(meters: list[Meter]) -> list[str]:
    registry = CollectorRegistry()
    registry.register(Merged(lambda: meters))
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if not line.startswith("#") and "_created" not in line]


def test_counters_histograms_and_gauges_add_up_by_their_labels():
    one, two = Counted(done=3, running=2, seconds=(0.5, 5)), Counted(done=4, failed=1, running=1, seconds=(50,))

    assert shown([*one.read(), *two.read()]) == [
        'finished_total{outcome="done"} 7.0',
        'finished_total{outcome="failed"} 1.0',
        "running 3.0",
        'took_bucket{le="1.0"} 1.0',
        'took_bucket{le="10.0"} 2.0',
        'took_bucket{le="+Inf"} 3.0',
        "took_count 3.0",
        "took_sum 55.5",
    ]


def test_a_counter_began_when_the_first_of_them_did():
    one, two = Counted(done=1), Counted(done=1)

    began = [
        sample.value
        for meters in (one.read(), two.read(), merge([*one.read(), *two.read()]))
        for meter in meters
        for sample in meter.samples
        if sample.name == "took_created"
    ]

    assert began[2] == min(began[:2])


def test_what_has_ended_has_counted_but_has_nothing_any_more():
    left = without_gauges(Counted(done=3, running=2).read())

    assert 'finished_total{outcome="done"} 3.0' in shown(left)
    assert not [line for line in shown(left) if line.startswith("running")]
