"""Half a minute of every attack at once; `make hostile` goes on for an hour."""

import pytest
from tests.conftest import ServiceNames
from tests.hostile.attacks import ATTACKS
from tests.hostile.run import run

SECONDS = 30.0


@pytest.mark.timeout(600)
async def test_every_well_behaved_request_is_answered_under_every_attack(
    broker_url: str, store_url: str, service_names: ServiceNames
) -> None:
    verdict = await run(broker_url, store_url, service_names, seconds=SECONDS, per_s=5)

    assert not verdict.faults, str(verdict)
    assert verdict.asked_count > SECONDS
    assert len(verdict.counts) > len(ATTACKS)
