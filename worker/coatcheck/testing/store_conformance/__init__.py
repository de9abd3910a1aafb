"""The tests that every store passes, for a store of your own (docs/stores.md).

They need pytest and pytest-asyncio with `asyncio_mode = "auto"`. A test file has a fixture `bench`:

    from coatcheck.testing.store_conformance.suite import *

    @pytest.fixture
    async def bench():
        yield MyBench()

A `Bench` opens stores on shared, empty rows, changes rows by hand, reads them, and moves the time.
"""

import pytest

_TESTS = ("accepts", "cancels", "claims", "kit", "puts", "services", "sweeps", "values")
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _TESTS))

from coatcheck.testing.store_conformance.bench import Bench, MemoryBench, Row, Rows  # noqa: E402

__all__ = ["Bench", "MemoryBench", "Row", "Rows"]
