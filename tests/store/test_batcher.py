"""Group commit by itself: no database, a commit that the test lets through."""

import asyncio

import pytest

from coatcheck.errors import StoreUnavailable
from coatcheck.store.batcher import BATCH_ROUNDS, Batcher, Busy, LockTimeout


class Commits:
    """A commit that waits at a gate and remembers what came."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.begun = asyncio.Event()
        self.batches: list[tuple[list[int], bool]] = []
        self.bad: set[int] = set()
        self.busy: dict[int, str] = {}
        self.outage: Exception | None = None

    async def __call__(self, items, waits):
        self.batches.append((list(items), waits))
        self.begun.set()
        await self.gate.wait()
        if self.outage is not None and not waits:
            raise self.outage
        if self.bad & set(items):
            raise ValueError("bad item")
        return [Busy(self.busy[item]) if item in self.busy and not waits else item * 10 for item in items]


@pytest.fixture
def commits() -> Commits:
    return Commits()


@pytest.fixture
def batcher(commits: Commits) -> Batcher[int, int]:
    return Batcher("test", commits, max_size=4)


async def submit_while_busy(batcher, commits, *items):
    """Submit the first item, and the rest while its commit is in flight."""
    commits.gate.clear()
    first = batcher.submit(items[0])
    await commits.begun.wait()
    rest = [batcher.submit(item) for item in items[1:]]
    await asyncio.sleep(0)
    commits.gate.set()
    return await asyncio.gather(first, *rest, return_exceptions=True)


async def test_item_goes_at_once_when_idle(batcher, commits):
    assert await batcher.submit(1) == 10

    assert commits.batches == [([1], False)]


async def test_items_that_arrive_while_a_batch_is_in_flight_share_the_next(batcher, commits):
    assert await submit_while_busy(batcher, commits, 1, 2, 3, 4) == [10, 20, 30, 40]

    assert [items for items, _ in commits.batches] == [[1], [2, 3, 4]]


async def test_batch_has_a_largest_size(batcher, commits):
    await submit_while_busy(batcher, commits, *range(8))

    assert [items for items, _ in commits.batches] == [[0], [1, 2, 3, 4], [5, 6, 7]]


async def test_bad_item_fails_alone(batcher, commits):
    commits.bad = {3}

    results = await submit_while_busy(batcher, commits, 1, 2, 3, 4)

    assert [result for result in results if not isinstance(result, ValueError)] == [10, 20, 40]
    assert isinstance(results[2], ValueError)


async def test_outage_fails_the_whole_batch_without_splitting_it(batcher, commits):
    commits.outage = StoreUnavailable("away")

    results = await submit_while_busy(batcher, commits, 1, 2, 3, 4)

    assert [str(result) for result in results] == ["away"] * 4
    assert len(commits.batches) == 2


async def test_batcher_works_again_after_an_outage(batcher, commits):
    commits.outage = StoreUnavailable("away")
    await submit_while_busy(batcher, commits, 1, 2)
    commits.outage = None

    assert await batcher.submit(3) == 30


async def test_busy_item_waits_in_a_lane_while_others_go_on(batcher, commits):
    commits.busy = {2: "row"}

    assert await submit_while_busy(batcher, commits, 1, 2, 3) == [10, 20, 30]

    assert commits.batches[-1] == ([2], True)


async def test_item_that_is_busy_for_a_moment_goes_along_with_the_next_batch():
    batches = []

    async def busy_once(items, waits):
        batches.append((list(items), waits))
        return [Busy("row") if len(batches) == 1 and item == 1 else item * 10 for item in items]

    batcher: Batcher[int, int] = Batcher("test", busy_once, max_size=2)

    assert await asyncio.gather(*(batcher.submit(item) for item in (1, 2, 3))) == [10, 20, 30]
    assert batches == [([1, 2], False), ([3, 1], False)]


async def test_items_that_want_the_same_row_wait_for_it_together(batcher, commits):
    commits.busy = {1: "row", 2: "row", 3: "another"}

    await asyncio.gather(*(batcher.submit(item) for item in (1, 2, 3)))

    assert commits.batches == [([1, 2, 3], False)] * BATCH_ROUNDS + [([1, 2], True), ([3], True)]


async def test_item_that_is_still_busy_in_its_lane_gets_another_round(commits):
    rounds: list[list[int]] = []

    async def one_at_a_time(items, waits):
        rounds.append(list(items))
        return [item if waits and index == 0 else Busy("row") for index, item in enumerate(items)]

    batcher: Batcher[int, int] = Batcher("test", one_at_a_time)

    assert await asyncio.gather(*(batcher.submit(item) for item in (1, 2, 3))) == [1, 2, 3]
    assert rounds == [[1, 2, 3]] * BATCH_ROUNDS + [[1, 2, 3], [2, 3], [3]]


async def test_item_that_stays_busy_for_ever_fails_in_the_end():
    async def never(items, waits):
        return [Busy("row") for _ in items]

    batcher: Batcher[int, int] = Batcher("test", never)

    with pytest.raises(StoreUnavailable, match="stayed busy"):
        await batcher.submit(1)


async def test_lock_that_cannot_be_skipped_sends_each_item_to_a_lane_of_its_own(batcher, commits):
    commits.outage = LockTimeout("locked")

    assert await submit_while_busy(batcher, commits, 1, 2, 3) == [10, 20, 30]

    assert sorted(items for items, waits in commits.batches if waits) == [[1], [2], [3]]


async def test_bad_item_in_a_lane_fails_alone(batcher, commits):
    commits.busy = {1: "row", 2: "row"}
    commits.bad = set()
    original = commits.__call__

    async def bad_in_lane(items, waits):
        if waits and 1 in items:
            raise ValueError("bad item")
        return await original(items, waits)

    batcher._commit = bad_in_lane
    results = await asyncio.gather(batcher.submit(1), batcher.submit(2), return_exceptions=True)

    assert isinstance(results[0], ValueError)
    assert results[1] == 20


async def test_lanes_of_several_batchers_share_their_width(commits):
    waiting = 0
    most = 0

    async def commit(items, waits):
        nonlocal waiting, most
        if not waits:
            return [Busy(item) for item in items]
        waiting += 1
        most = max(most, waiting)
        await asyncio.sleep(0)
        waiting -= 1
        return items

    lane = asyncio.Semaphore(2)
    batchers: list[Batcher[int, int]] = [Batcher("test", commit, lane=lane) for _ in range(3)]

    await asyncio.gather(*(batcher.submit(item) for batcher in batchers for item in range(10)))

    assert most == 2


async def test_cancelled_caller_leaves_and_its_item_is_committed_all_the_same(batcher, commits):
    commits.gate.clear()
    caller = batcher.submit(1)
    await commits.begun.wait()

    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    commits.gate.set()
    await batcher.drain()

    assert commits.batches == [([1], False)]
    assert await batcher.submit(2) == 20


async def test_cancelled_caller_of_a_batch_that_fails_bothers_nobody(batcher, commits):
    commits.outage = StoreUnavailable("away")
    commits.gate.clear()
    caller = batcher.submit(1)
    await commits.begun.wait()
    caller.cancel()

    commits.gate.set()
    await batcher.drain()

    assert caller.cancelled() or caller.cancelling()
    with pytest.raises(asyncio.CancelledError):
        await caller


async def test_drain_waits_for_lanes_too(batcher, commits):
    commits.busy = {1: "row"}
    submitted = batcher.submit(1)
    await asyncio.sleep(0)

    await batcher.drain()

    assert submitted.done() or await submitted == 10
    assert commits.batches == [([1], False)] * BATCH_ROUNDS + [([1], True)]


async def test_batches_are_observed_with_their_size(commits):
    seen = []
    batcher: Batcher[int, int] = Batcher("test", commits, observe=lambda name, size, seconds: seen.append((name, size)))

    await submit_while_busy(batcher, commits, 1, 2, 3)

    assert seen == [("test", 1), ("test", 2)]
