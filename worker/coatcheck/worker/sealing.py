"""The sweeper's other job: to seal what histories have gained, and to write the seals where the database is not.

    read what is not sealed ──► tree and signature, in a thread ──► insert seal and leaves ──► each sink ──► note it

A crash before the insertion leaves nothing behind. After it, the seal is in its row, and any sweeper with the same
sinks writes it there: a sink's note says up to where it has them. Several sweepers may seal; a number is taken once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from coatcheck.errors import InvalidSettings, Rejected, TransientError
from coatcheck.log import get_logger
from coatcheck.points import reach
from coatcheck.store.front import Store
from coatcheck.store.seals import Seal, SealKey, decode_key, make_seal
from coatcheck.worker.metrics import Metrics
from coatcheck.worker.seal_sinks import Sink, SinkUnavailable, parse_sinks
from coatcheck.worker.settings import Settings

log = get_logger(__name__)

MOST_ENTRIES = 100_000
"""About how many entries one seal covers; more are sealed by the next, at once."""
SINK_BATCH = 100
LARGEST_KEY_FILE = 4096
LONGEST_SINK_PAUSE_S = 60.0
LONGEST_SINK_TURN_S = 5.0
"""For so long a sink is brought up to date before the next seal is made. One that is new, or slow, takes many turns."""


def load_key(written: str) -> SealKey:
    """The key that `COATCHECK_SEAL_KEY` gives or names. Raises InvalidSettings, and UsageError without the extra."""
    secret = decode_key(written)
    if secret is None:
        secret = decode_key(_read_key(written))
    if secret is None:
        raise InvalidSettings(
            "COATCHECK_SEAL_KEY: the file has no key in it; `coatcheck audit keygen -o FILE` makes one that has"
        )
    return SealKey(secret)


def _read_key(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return file.read(LARGEST_KEY_FILE).decode("ascii", "replace")
    except OSError as error:
        raise InvalidSettings(
            f"COATCHECK_SEAL_KEY: it is no key in base64, and a file of that name cannot be read: {error.strerror}; "
            "`coatcheck audit keygen -o FILE` makes one"
        ) from None


class Sealer:
    """Seals every so often, until stopped. `keep` is how long history is kept; None: for ever."""

    def __init__(
        self, store: Store, key: SealKey, *, sinks: Sequence[Sink] = (), metrics: Metrics | None = None,
        every: timedelta = timedelta(seconds=10), keep: timedelta | None = None,
    ) -> None:  # fmt: skip
        self._store = store
        self._key = key
        self._outlets = [_Outlet(store, sink) for sink in sinks]
        self._metrics = metrics or Metrics()
        self._every_s = every.total_seconds()
        self._keep = keep
        self._newest = 0

    @classmethod
    def from_settings(cls, settings: Settings, store: Store, metrics: Metrics) -> Sealer | None:
        """None: no key is set, and nothing is sealed. Raises InvalidSettings."""
        if settings.seal_key is None:
            return None
        key, sinks = load_key(settings.seal_key), parse_sinks(settings.seal_sink)
        return cls(store, key, sinks=sinks, metrics=metrics, every=settings.seal_every, keep=settings.keep_history)

    async def run(self) -> None:
        """Seal until cancelled. Outages are waited out."""
        while True:
            has_more = False
            try:
                has_more = await self.seal()
            except TransientError as error:
                log.warning("sealing_interrupted", error=str(error))
            except Rejected as error:
                log.error("seal_refused", error=str(error))
            except Exception:
                log.exception("sweep_surprised")
            await asyncio.sleep(0 if has_more else self._every_s)

    async def seal(self) -> bool:
        """Make one seal, if there is something to seal, and bring the sinks up to date. True: there may be more."""
        unsealed = await self._store.read_unsealed(limit=MOST_ENTRIES, keep=self._keep)
        lag = unsealed.now - unsealed.oldest_at if unsealed.oldest_at else timedelta()
        self._metrics.seal_lag.set(max(lag.total_seconds(), 0.0))
        self._watch(unsealed.last)
        if unsealed.leaves:
            seal = await asyncio.to_thread(make_seal, unsealed, self._key)
            reach("before_seal")
            if await self._store.add_seal(seal, unsealed.leaves):
                reach("after_seal")
                self._newest = seal.number
                self._metrics.seals.inc()
        await asyncio.gather(*(outlet.bring_up_to_date() for outlet in self._outlets))
        return unsealed.entry_count >= MOST_ENTRIES

    def _watch(self, last: Seal | None) -> None:
        """Say when seals that this process has seen are gone: the database alone would not show it."""
        number = last.number if last else 0
        if number < self._newest:
            log.error("seals_removed", newest=number, seen=self._newest)
        self._newest = number


class _Outlet:
    """One sink and how far it is. While it refuses, it is tried again after pauses that grow."""

    def __init__(self, store: Store, sink: Sink) -> None:
        self._store = store
        self._sink = sink
        self._written: int | None = None
        self._again_at_s = -math.inf
        self._pause_s = 1.0

    async def bring_up_to_date(self) -> None:
        """Write the seals that the sink does not have, in order, until its turn is over. One that is refused is logged
        and left for later.
        """
        if (began_s := time.monotonic()) < self._again_at_s:
            return
        if self._written is None:
            marks = {mark.sink: mark.number for mark in await self._store.read_sinks()}
            self._written = marks.get(self._sink.name, 0)
        try:
            until_s = began_s + LONGEST_SINK_TURN_S
            while time.monotonic() <= until_s and (
                seals := await self._store.read_seals(after=self._written, limit=SINK_BATCH)
            ):
                await self._write(seals, until_s)
            self._pause_s = 1.0
        except SinkUnavailable as error:
            log.warning("seal_not_written", sink=self._sink.name, error=str(error), retry_in_s=self._pause_s)
            self._again_at_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_SINK_PAUSE_S)

    async def _write(self, seals: Sequence[Seal], until_s: float) -> None:
        before = self._written
        try:
            for seal in seals:
                await self._sink.write(seal)
                self._written = seal.number
                if time.monotonic() > until_s:
                    return
        finally:
            if self._written is not None and self._written != before:
                reach("after_sink")
                await self._store.mark_sink(self._sink.name, self._written)
