"""A hostile run: real replicas, a sweeper, clients that behave, and every attack at once for as long as asked.

It is sound if every request of the well-behaved clients got its right answer, no replica ended, hung or grew without
bound, and no stranger was answered with what is not theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.flow.harness import Process, Rig, rig_on
from tests.fuzz.world import Knowledge
from tests.hostile.attacks import ATTACKS, run_attack
from tests.hostile.crowd import KINDS, Client, serve_full, serve_good
from tests.hostile.scene import Scene
from tests.services import free_port

SETTLE_S = 420.0
"""After the last attack every open request must be answered within this: the sweeper's longest pause, and some more."""
LIVE_WITHIN_S = 10.0
MOST_RSS_MB = 700
MOST_REPEATS = 10
"""A requester whose queue is full may get its answer more often than once, but not without bound. One more for each
connection that the malicious broker broke: what was not acked by then is answered again.
"""


@dataclass
class Verdict:
    """What a run came to."""

    length_s: float
    asked_count: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    waits_s: dict[str, list[float]] = field(default_factory=dict)
    rss_mb: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of each process: the most, and what it held at the end."""
    most_repeats: int = 0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.length_s / 60:.1f} minutes, {self.asked_count:,} well-behaved requests"]
        for kind, waits in sorted(self.waits_s.items()):
            ordered = sorted(waits)
            middle, late = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
            lines.append(f"  {kind:10} {len(ordered):7,} answered, p50 {middle:.2f} s, p99 {late:.2f} s")
        lines += [f"  {count:9,}  {name}" for name, count in sorted(self.counts.items())]
        lines += [
            f"  {name}: at most {most:.0f} MB, {last:.0f} MB at the end" for name, (most, last) in self.rss_mb.items()
        ]
        lines.append(f"  the same answer came again at most {self.most_repeats} times")
        lines += [f"WRONG: {fault}" for fault in self.faults[:50]] or [
            "every well-behaved request was answered rightly"
        ]
        return "\n".join(lines)


class Watch:
    """Looks at the processes: alive, answering on their health port, and how much memory they hold."""

    def __init__(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._places: list[tuple[Process, int | None]] = []

    def add(self, process: Process, port: int | None = None) -> None:
        self._places.append((process, port))

    async def run(self) -> None:
        while True:
            for process, port in self._places:
                self._look(process)
                if port is not None and not await _is_live(port):
                    self._verdict.faults.append(f"{process.name} did not answer /livez within {LIVE_WITHIN_S:.0f} s")
            await asyncio.sleep(2)

    def _look(self, process: Process) -> None:
        if process.process.returncode is not None:
            fault = f"{process.name} ended with {process.process.returncode}"
            if fault not in self._verdict.faults:
                self._verdict.faults.append(f"{fault}:\n{process.tail()}")
            return
        rss = _rss_mb(process.process.pid)
        most = max(rss, self._verdict.rss_mb.get(process.name, (0.0, 0.0))[0])
        self._verdict.rss_mb[process.name] = (most, rss)
        del process.output[:-2000]


async def _is_live(port: int) -> bool:
    try:
        async with asyncio.timeout(LIVE_WITHIN_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            status = await reader.readline()
            writer.close()
            return b" 200 " in status
    except (OSError, TimeoutError):
        return False


def _rss_mb(pid: int) -> float:
    with contextlib.suppress(OSError):
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        if found:
            return int(found[1]) / 1024
    return 0.0


async def run(
    broker: str, store: str, names: Any, *, seconds: float, per_s: float = 10.0, only: Iterable[str] | None = None
) -> Verdict:
    """Attack for so long, with every attack or with a few, then let everything settle, and say what came of it."""
    attacks = [*(only or ATTACKS)]
    service = names.new("hostile")
    for role in ("guarded", "good", "full", "evil"):
        names.queues += [f"{service}-{role}{suffix}" for suffix in ("", ".replies", ".control", ".dead")]
        names.exchanges.append(f"{service}-{role}.broadcast")
    names.also_delete(
        f"{service}-thief", f"{service}-sink", *(f"{service}-client-{name}" for name in ("steady", "slow"))
    )
    verdict = Verdict(seconds)
    async with rig_on(broker, store, names) as rig:
        scene = Scene(broker, service, _made_up_knowledge(service))
        clients = [
            Client(scene, "steady", per_s=per_s, kinds=KINDS),
            Client(scene, "slow", per_s=per_s / 4, kinds=("plain", "ask"), is_slow=True),
        ]
        beside: list[asyncio.Task[None]] = []
        await scene.evil.start()
        try:
            beside += [asyncio.create_task(serve(scene)) for serve in (serve_good, serve_full)]
            watch = await _start_ours(rig, scene, verdict)
            beside.append(asyncio.create_task(watch.run()))
            await _attack(scene, clients, beside, attacks=attacks, seconds=seconds)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            await scene.evil.stop()
        _judge(verdict, scene, clients, attacks)
    return verdict


def _made_up_knowledge(service: str) -> Knowledge:
    """Ids to fuzz with that belong to no well-behaved request; the hostile peer adds calls that it was sent."""
    knowledge = Knowledge(service, f"{service}-sink")
    for ids in (knowledge.opened, knowledge.answered, knowledge.tasks, knowledge.identities):
        ids += [str(uuid.uuid4()) for _ in range(20)]
    return knowledge


async def _start_ours(rig: Rig, scene: Scene, verdict: Verdict) -> Watch:
    watch = Watch(verdict)
    environment = {"HOSTILE_SERVICE": scene.service, "COATCHECK_SWEEPER_QUEUE": scene.queues["hints"]}
    rig.names.also_delete(scene.queues["hints"])
    places = (
        ("replica-1", "app", scene.broker),
        ("besieged", "app", scene.evil.url),
        ("guarded", "guarded", scene.broker),
    )
    for name, app, broker in places:
        port = free_port()
        process = await rig.worker_process(
            f"tests.hostile.app:{app}",
            name=name,
            COATCHECK_BROKER=broker,
            COATCHECK_HEALTH_PORT=str(port),
            **environment,
        )
        scene.health_ports.append(port)
        watch.add(process, port)
        if name == "besieged":
            assert process.reading is not None
            process.reading.cancel()  # its log fills a pipe that has no reader
    watch.add(await rig.sweeper_process(**environment))
    return watch


async def _attack(
    scene: Scene, clients: list[Client], beside: list[asyncio.Task[None]], *, attacks: list[str], seconds: float
) -> None:
    asking = [asyncio.create_task(client.run()) for client in clients]
    attacking = [asyncio.create_task(run_attack(scene, name)) for name in attacks]
    try:
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            done = [task for task in (*asking, *attacking, *beside) if task.done()]
            for task in done:
                task.result()
            await asyncio.sleep(0.5)
        scene.ends.set()
        await asyncio.wait(asking, timeout=SETTLE_S)
        await asyncio.gather(*attacking)
    finally:
        for task in (*asking, *attacking):
            task.cancel()
        await asyncio.gather(*asking, *attacking, return_exceptions=True)


def _judge(verdict: Verdict, scene: Scene, clients: list[Client], attacks: list[str]) -> None:
    verdict.counts = dict(scene.counts)
    for client in clients:
        tally = client.tally
        verdict.asked_count += tally.asked_count
        verdict.faults += tally.wrong
        verdict.faults += [f"{tally.name}: {kind} of {n} was never answered" for n, kind, _ in tally.open.values()]
        verdict.most_repeats = max(verdict.most_repeats, *tally.repeats.values(), 0)
        for kind, waits in tally.waits_s.items():
            verdict.waits_s.setdefault(kind, []).extend(waits)
    if verdict.most_repeats > MOST_REPEATS + sum(scene.evil.played.values()):
        verdict.faults.append(f"one answer came {verdict.most_repeats} times more than once")
    for name, (most, _) in verdict.rss_mb.items():
        if most > MOST_RSS_MB:
            verdict.faults.append(f"{name} held {most:.0f} MB; {MOST_RSS_MB} are the limit")
    if stolen := scene.counts["repeats without the token: ANSWERED"]:
        verdict.faults.append(f"{stolen} repeats without the token were answered with more than a refusal")
    verdict.faults += [f"no {name}: the attack did nothing" for name in attacks if not _count_of(scene, name)]


def _count_of(scene: Scene, attack: str) -> int:
    return sum(count for name, count in scene.counts.items() if name.startswith(attack))
