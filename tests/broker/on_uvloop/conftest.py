"""Tests below here run on uvloop."""

import asyncio
from collections.abc import Callable

import pytest


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": pytest.importorskip("uvloop").new_event_loop}
