"""Connections that a third party on the way could read or change: found by their addresses, said once at the start."""

from __future__ import annotations

from dataclasses import dataclass

from coatcheck.broker.connecting import find_risk as find_broker_risk
from coatcheck.log import get_logger
from coatcheck.store.postgres.database import find_risk as find_store_risk
from coatcheck.worker.settings import Checkpointing, Settings, is_embedded

log = get_logger(__name__)

SILENCE = "COATCHECK_ALLOW_PLAINTEXT=true if the network encrypts by itself"


@dataclass(frozen=True, slots=True)
class Exposure:
    """A connection to a server elsewhere that TLS does not protect. `risk` says how, and the remedy."""

    setting: str
    risk: str


def find_exposures(settings: Settings) -> list[Exposure]:
    """Look at both addresses; those on this machine are fine. Raises InvalidSettings for one that cannot be read."""
    if settings.allow_plaintext:
        return []
    risks = {"COATCHECK_BROKER": find_broker_risk(settings.broker)}
    if settings.checkpointing is not Checkpointing.OFF and not is_embedded(settings.store):
        risks["COATCHECK_STORE"] = find_store_risk(settings.store)
    return [Exposure(setting, risk) for setting, risk in risks.items() if risk is not None]


def warn_of_exposures(settings: Settings) -> None:
    for exposure in find_exposures(settings):
        log.warning("connection_exposed", setting=exposure.setting, risk=exposure.risk, silence=SILENCE)
