"""The crew of `coatcheck dev`: replicas of each App and a sweeper, kept running, renewed when the code changes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from coatcheck.cli.dev_members import Bond, Member
from coatcheck.cli.dev_screen import Screen
from coatcheck.cli.dev_sources import Offer
from coatcheck.worker.settings import Checkpointing, Settings

SWEEPER = "sweeper"
ALONE = ("--processes", "1")
"""The replicas are ours to look after, whatever the environment or an App says about processes."""
KILL_SLACK_S = 4.0
"""What a process may need beyond its grace time to write its last acks and leave."""


class Crew:
    """All processes. `async with Crew(…) as crew: …`; leaving stops them: replicas first, then the sweeper."""

    def __init__(
        self,
        offers: Sequence[Offer],
        settings: Settings,
        *,
        replica_count: int,
        environ: Mapping[str, str],
        screen: Screen,
    ) -> None:
        lifeline, self._our_end = os.pipe()
        bond = Bond(environ, lifeline, settings.grace.total_seconds() + KILL_SLACK_S)
        self._screen = screen
        self._replicas = [
            [
                Member(name, ("worker", offer.reference, *ALONE, "--name", name), bond=bond, screen=screen)
                for name in names_of(offer.service, replica_count, is_alone=len(offers) == 1)
            ]
            for offer in offers
        ]
        needs_sweeper = settings.checkpointing is not Checkpointing.OFF
        sweeper = Member(SWEEPER, ("sweeper", "--name", SWEEPER), bond=bond, screen=screen)
        self._sweepers = [sweeper] if needs_sweeper else []
        self._lifeline = lifeline
        self._group = asyncio.TaskGroup()
        screen.add(*(member.name for member in self.members))

    @property
    def members(self) -> list[Member]:
        return [member for replicas in self._replicas for member in replicas] + self._sweepers

    async def lost(self) -> None:
        """Return when not one replica is left and none will start by itself."""
        await asyncio.gather(*(member.given_up.wait() for replicas in self._replicas for member in replicas))

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        for member in self.members:
            self._group.create_task(member.keep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await asyncio.gather(*(member.stop() for replicas in self._replicas for member in replicas))
            await asyncio.gather(*(member.stop() for member in self._sweepers))
        finally:
            await self._group.__aexit__(kind, error, trace)
            os.close(self._our_end)
            os.close(self._lifeline)

    async def renew(self) -> bool:
        """Replace the replicas of each App one after the other, so that there is always one; tell whether all have
        started. An App whose first one does not start keeps the others as they are. The sweeper runs no code of the
        user's, so it is only started if it was given up.
        """
        lost = [[sweeper] for sweeper in self._sweepers if sweeper.given_up.is_set()]
        return all(await asyncio.gather(*(_replace_in_turn(members) for members in [*self._replicas, *lost])))

    def kill(self) -> None:
        for member in self.members:
            member.kill()


def names_of(service: str, count: int, *, is_alone: bool) -> list[str]:
    """What the replicas are called: w1, w2…, or by their service where there are several."""
    return [f"w{number}" if is_alone else f"{service}-{number}" for number in range(1, count + 1)]


async def _replace_in_turn(members: Sequence[Member]) -> bool:
    for member in members:
        if not await member.replace():
            return False
    return True
