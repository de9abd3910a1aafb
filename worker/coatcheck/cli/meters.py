"""The meters of several processes as one: what a supervisor serves for its replicas.

Counters and histograms are sums over all replicas there were: what an ended one had counted stays in, because a sum
that falls looks to Prometheus like a restart, and the whole rest like new events. Gauges are sums over the replicas
there are: ours count things that each has some of. The time a counter began is the earliest.

prometheus_client can do this with files that all processes map (its multiprocess mode). We ask the processes instead:
nothing is left on disk, the meters of a worker stay plain numbers in RAM, and no environment has to be set before the
first import. What is lost is what a killed replica counted after it was last asked, as when it runs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

CUMULATIVE = frozenset({"counter", "histogram", "summary"})


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Meter:
    """A family of samples, in a form that travels."""

    name: str
    about: str
    kind: str
    samples: list[Sample]


def read_meters(registry: CollectorRegistry) -> list[Meter]:
    return [
        Meter(it.name, it.documentation, it.type, [Sample(each.name, each.labels, each.value) for each in it.samples])
        for it in registry.collect()
    ]


def merge(meters: Iterable[Meter]) -> list[Meter]:
    """One meter for all of a name, one sample for all with the same labels."""
    families: dict[str, Meter] = {}
    values: dict[str, dict[tuple[str, frozenset[tuple[str, str]]], Sample]] = {}
    for meter in meters:
        families.setdefault(meter.name, meter)
        merged = values.setdefault(meter.name, {})
        for sample in meter.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            before = merged.get(key)
            merged[key] = sample if before is None else _joined(before, sample, kind=meter.kind)
    return [Meter(name, it.about, it.kind, list(values[name].values())) for name, it in families.items()]


def without_gauges(meters: Iterable[Meter]) -> list[Meter]:
    """What stays true of a process that has ended."""
    return [meter for meter in meters if meter.kind in CUMULATIVE]


def _joined(left: Sample, right: Sample, *, kind: str) -> Sample:
    is_instant = kind in CUMULATIVE and left.name.endswith("_created")
    value = min(left.value, right.value) if is_instant else left.value + right.value
    return Sample(left.name, left.labels, value)


class Merged(Collector):
    """Gives a registry the meters that `source` has at the moment."""

    def __init__(self, source: Callable[[], Iterable[Meter]]) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        for meter in sorted(merge(self._source()), key=lambda it: it.name):
            family = Metric(meter.name, meter.about, meter.kind)
            for sample in meter.samples:
                family.add_sample(sample.name, sample.labels, sample.value)
            yield family
