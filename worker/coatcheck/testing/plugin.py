"""The pytest plugin: one fixture. Nothing of the kit is imported before a test asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from coatcheck.testing import Stage


@pytest.fixture
def coatcheck() -> Iterator[Stage]:
    """A stage of the test's own: apps under test, fake peers, and a clock to move. It is cleaned up after the test."""
    from coatcheck.testing import Stage

    stage = Stage()
    yield stage
    stage.scene.close_from_outside()
