"""A hundred thousand broken messages to every queue of a replica and its sweeper: nobody dies, all are accounted for.

`python -m tests.fuzz` runs the same by hand, and prints what became of them all.
"""

from collections import Counter

import pytest
from tests.conftest import ServiceNames
from tests.fuzz.__main__ import COUNT, SEEDS
from tests.fuzz.messages import KINDS, MUTATIONS, fuzzed
from tests.fuzz.servers import ServerWorld
from tests.fuzz.world import Knowledge, MemoryWorld, Report

ON_SERVERS = 3_000


def check(report: Report, count: int) -> None:
    failure = report.explain()

    assert failure is None, failure
    assert len(report.book.sent) == sum(report.book.fates().values()) == count
    assert report.canary_count > count // 100


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_no_message_kills_a_consumer_or_is_lost_in_memory(seed: int) -> None:
    report = await MemoryWorld().run(seed, COUNT)

    check(report, COUNT)
    assert len(report.book.fates()) > 30  # they took many roads


@pytest.mark.parametrize("seed", [1000])
async def test_no_message_kills_a_consumer_or_is_lost_on_servers(
    broker_url: str, store_url: str, service_names: ServiceNames, seed: int
) -> None:
    service = service_names.new("fuzz")
    for role in ("peer", "trusted", "silent"):
        service_names.queues += [f"{service}-{role}{suffix}" for suffix in ("", ".replies", ".control", ".dead")]
        service_names.exchanges.append(f"{service}-{role}.broadcast")
    service_names.also_delete(f"{service}-hints")
    world = ServerWorld(service, broker=broker_url, store=store_url)

    report = await world.run(seed, ON_SERVERS)

    check(report, ON_SERVERS)
    assert world.unreadable_count > 100


def test_a_seed_always_makes_the_same_messages() -> None:
    ids = Knowledge("service", "sink")
    ids.opened, ids.answered, ids.tasks, ids.identities = ["o"], ["a"], ["t"], ["i"]
    made = [fuzzed(3, number, ids) for number in range(3000)]
    seen = Counter(word for each in made for word in each.how)

    assert [fuzzed(3, number, ids) for number in range(3000)] == made
    assert [fuzzed(4, number, ids) for number in range(3000)] != made
    assert seen.keys() >= {*KINDS, *MUTATIONS} - {"oversized"}
