"""What a test of the suite gets: a store on empty rows, and one of another replica. `bench` is the user's own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from coatcheck.store import Store
from coatcheck.testing.store_conformance.bench import Bench


@pytest.fixture
async def store(bench: Bench) -> AsyncIterator[Store]:
    store = bench.replica()
    yield store
    await store.close()


@pytest.fixture
async def other(bench: Bench) -> AsyncIterator[Store]:
    """The store of another replica."""
    store = bench.replica()
    yield store
    await store.close()
