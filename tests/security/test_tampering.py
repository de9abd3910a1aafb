"""Every way to tamper with histories that full write access to the tables allows, tried: caught, or listed here as out
of reach.

Two tasks with three entries each are sealed twice. Then something is changed behind the seals, and `verify` is asked.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from msgspec.structs import replace
from tests.store.histories import chain_of, entry_of, insert, settle
from tests.store.kit import new_id

from coatcheck.errors import InvalidSettings
from coatcheck.store import MemoryStore, Store, Tables, TaskId
from coatcheck.store.chain import HistoryEntry
from coatcheck.store.seals import Seal, SealKey, Unsealed, header_of, make_seal
from coatcheck.store.verification import FlawKind
from coatcheck.worker import Client
from coatcheck.worker.auditing import AuditReport, CannotProve, find_sealed, verify
from coatcheck.worker.seal_sinks import FileSink, Sink, SinkUnavailable, parse_sinks
from coatcheck.worker.sealing import Sealer, load_key

KEY = SealKey(bytes(range(32)))
THIEF = SealKey(bytes(32))


@dataclass
class Scene:
    """A database with sealed histories, and a sink that has the seals."""

    url: str
    sql: asyncpg.Connection
    store: Store
    sink: Path
    tasks: list[TaskId] = field(default_factory=list)
    chains: dict[TaskId, list[HistoryEntry]] = field(default_factory=dict)

    async def add(self, task_id: TaskId, count: int, **given: Any) -> None:
        chain = self.chains.setdefault(task_id, [])
        more = chain_of(task_id, count, after=chain, **given)
        await insert(self.sql, task_id, more)
        chain += more
        await self.sql.execute(
            "UPDATE coatcheck.task SET entry_count = $2, head = $3 WHERE id = $1", task_id, len(chain), chain[-1].hash
        )
        await settle(self.sql)

    async def seal(self, key: SealKey = KEY) -> None:
        await Sealer(self.store, key, sinks=[FileSink(str(self.sink))]).seal()

    async def verify(self, task_id: UUID | None = None, *, has_sink: bool = True, key: SealKey = KEY) -> AuditReport:
        sinks = [self.sink] if has_sink else []
        return await verify(self.store, task_id, public_keys=[key.public], sinks=sinks)

    async def rewrite(self, task_id: TaskId, chain: Sequence[HistoryEntry]) -> None:
        """Write a history anew, with fresh and right hashes, and its row with it."""
        xids = await self.sql.fetch("SELECT number, xid FROM coatcheck.history WHERE task_id = $1", task_id)
        await self.sql.execute("DELETE FROM coatcheck.history WHERE task_id = $1", task_id)
        await insert(self.sql, task_id, chain)
        for row in xids:
            await self.sql.execute(
                "UPDATE coatcheck.history SET xid = $3 WHERE task_id = $1 AND number = $2", task_id, row[0], row[1]
            )
        await self.sql.execute(
            "UPDATE coatcheck.task SET entry_count = $2, head = $3 WHERE id = $1", task_id, len(chain), chain[-1].hash
        )


@pytest.fixture
async def scene(store_url: str, tmp_path: Path) -> AsyncIterator[Scene]:
    sql = await asyncpg.connect(store_url)
    store = Store(store_url, pool_size=3)
    made = Scene(store_url, sql, store, tmp_path / "seals.jsonl", tasks=sorted([new_id(), new_id()]))
    for task_id in made.tasks:
        await sql.execute(
            "INSERT INTO coatcheck.task (id, service, version, state, epoch, digest, request, history, due_at, "
            "look_at) VALUES ($1, 'svc', '1', 'running', 1, '', '', 1, now(), now())",
            task_id,
        )
        await made.add(task_id, 2)
    await made.seal()
    for task_id in made.tasks:
        await made.add(task_id, 1)
    await made.seal()
    yield made
    await store.close()
    await sql.close()


def kinds_of(report: AuditReport) -> set[FlawKind]:
    return {flaw.kind for flaw in report.flaws}


async def test_untouched_histories_pass_both_verdicts_and_what_is_not_covered_is_said(scene: Scene):
    await scene.add(scene.tasks[0], 2)

    report = await scene.verify()

    assert report.flaws == ()
    assert (report.has_integrity, report.is_complete) == (True, True)
    assert (report.task_count, report.entry_count, report.unsealed_count, report.seal_count) == (2, 8, 2, 2)
    assert report.not_covered[0] == "2 entries since the last seal: a writer of the database can change them"


# --- one change each ---


async def alter(scene: Scene, victim: TaskId) -> None:
    await scene.sql.execute("UPDATE coatcheck.history SET actor = 'eve' WHERE task_id = $1 AND number = 2", victim)


async def alter_data(scene: Scene, victim: TaskId) -> None:
    await scene.sql.execute("UPDATE coatcheck.history SET data = 'other' WHERE task_id = $1 AND number = 2", victim)


async def alter_time(scene: Scene, victim: TaskId) -> None:
    await scene.sql.execute(
        "UPDATE coatcheck.history SET at = at - interval '1 day' WHERE task_id = $1 AND number = 2", victim
    )


async def alter_time_beyond_reading(scene: Scene, victim: TaskId) -> None:
    await scene.sql.execute("UPDATE coatcheck.history SET at = 'infinity' WHERE task_id = $1 AND number = 2", victim)


async def remove(scene: Scene, victim: TaskId) -> None:
    await scene.sql.execute("DELETE FROM coatcheck.history WHERE task_id = $1 AND number = 2", victim)


async def remove_first(scene: Scene, victim: TaskId) -> None:
    await scene.sql.execute("DELETE FROM coatcheck.history WHERE task_id = $1 AND number = 1", victim)


async def reorder(scene: Scene, victim: TaskId) -> None:
    for old, new in ((1, 100), (2, 1), (100, 2)):
        await scene.sql.execute(
            "UPDATE coatcheck.history SET number = $3 WHERE task_id = $1 AND number = $2", victim, old, new
        )


async def insert_before(scene: Scene, victim: TaskId) -> None:
    await insert(scene.sql, victim, [replace(entry_of(victim, 1), number=0)])


async def insert_a_sealed_one(scene: Scene, victim: TaskId) -> None:
    """A right next entry, dated back among the sealed ones."""
    await insert(scene.sql, victim, chain_of(victim, 1, after=scene.chains[victim]))
    await scene.sql.execute("UPDATE coatcheck.history SET xid = '3' WHERE task_id = $1 AND number = 4", victim)
    last = await scene.sql.fetchval("SELECT hash FROM coatcheck.history WHERE task_id = $1 AND number = 4", victim)
    await scene.sql.execute("UPDATE coatcheck.task SET entry_count = 4, head = $2 WHERE id = $1", victim, last)


async def truncate(scene: Scene, victim: TaskId) -> None:
    """The tail goes, and the row is made to fit."""
    await scene.rewrite(victim, scene.chains[victim][:2])


async def remove_task(scene: Scene, victim: TaskId) -> None:
    await scene.sql.execute("DELETE FROM coatcheck.history WHERE task_id = $1", victim)
    await scene.sql.execute("DELETE FROM coatcheck.task WHERE id = $1", victim)


async def remove_task_and_leaves(scene: Scene, victim: TaskId) -> None:
    await remove_task(scene, victim)
    await scene.sql.execute("DELETE FROM coatcheck.seal_leaf WHERE task_id = $1", victim)


async def rechain(scene: Scene, victim: TaskId) -> None:
    await scene.rewrite(victim, chain_of(victim, 3, actor="eve"))


async def rechain_with_leaves(scene: Scene, victim: TaskId) -> None:
    forged = chain_of(victim, 3, actor="eve")
    await scene.rewrite(victim, forged)
    for number, count in ((1, 2), (2, 3)):
        await scene.sql.execute(
            "UPDATE coatcheck.seal_leaf SET head = $3 WHERE task_id = $1 AND seal = $2",
            victim,
            number,
            forged[count - 1].hash,
        )


async def change_row(scene: Scene, victim: TaskId) -> None:
    await scene.sql.execute("UPDATE coatcheck.task SET head = $2 WHERE id = $1", victim, bytes(32))


async def alter_seal(scene: Scene, victim: TaskId) -> None:
    await scene.sql.execute("UPDATE coatcheck.seal SET entry_count = entry_count + 1 WHERE number = 1")


async def set_clock_of_seal_back(scene: Scene, victim: TaskId) -> None:
    await scene.sql.execute("UPDATE coatcheck.seal SET sealed_at = sealed_at - interval '1 day' WHERE number = 2")


async def replay_seal(scene: Scene, victim: TaskId) -> None:
    """An old seal, with its good signature, in the place of the new one."""
    names = "sealed_at, horizon, task_count, entry_count, root, previous, trimmed_to, key_id, signature"
    await scene.sql.execute("DELETE FROM coatcheck.seal WHERE number = 2")
    await scene.sql.execute(
        f"INSERT INTO coatcheck.seal (number, {names}) SELECT 2, {names} FROM coatcheck.seal WHERE number = 1"
    )


async def remove_seal(scene: Scene, victim: TaskId) -> None:
    await scene.sql.execute("DELETE FROM coatcheck.seal WHERE number = 1")


async def remove_newest_seal(scene: Scene, victim: TaskId) -> None:
    """Back to what was before it, history and rows too."""
    await scene.sql.execute("DELETE FROM coatcheck.seal WHERE number = 2")
    await scene.sql.execute("DELETE FROM coatcheck.seal_leaf WHERE seal = 2")
    for task_id in scene.tasks:
        await scene.rewrite(task_id, scene.chains[task_id][:2])


async def trim_without_leave(scene: Scene, victim: TaskId) -> None:
    """As retention does, and no seal says that it may."""
    await scene.sql.execute("DELETE FROM coatcheck.history WHERE task_id = $1 AND number <= 2", victim)
    await scene.sql.execute("UPDATE coatcheck.seal SET trimmed_to = 2 WHERE number = 2")


async def reseal(scene: Scene, victim: TaskId, key: SealKey = THIEF, *, key_id: str | None = None) -> None:
    """All of it anew: chain, leaves, roots, headers, signed with another key."""
    await rechain_with_leaves(scene, victim)
    last: Seal | None = None
    for seal in await scene.store.read_seals():
        found = await scene.store.read_leaves(after=seal.number - 1, last=seal.number, limit=9)
        leaves = tuple(leaf for _, leaf in found)
        made = make_seal(Unsealed(last, seal.sealed_at, seal.horizon, seal.entry_count, leaves), key)
        named = replace(made, key_id=key_id or made.key_id)
        last = replace(named, signature=key.sign(header_of(named)))
        await scene.sql.execute(
            "UPDATE coatcheck.seal SET root = $2, previous = $3, key_id = $4, signature = $5 WHERE number = $1",
            *(last.number, last.root, last.previous, last.key_id, last.signature),
        )


async def reseal_under_the_right_name(scene: Scene, victim: TaskId) -> None:
    await reseal(scene, victim, key_id=KEY.key_id)


Tamper = Callable[[Scene, TaskId], Awaitable[None]]
CAUGHT: list[tuple[Tamper, FlawKind]] = [
    (alter, FlawKind.ENTRY_ALTERED),
    (alter_data, FlawKind.DATA_ALTERED),
    (alter_time, FlawKind.ENTRY_ALTERED),
    (alter_time_beyond_reading, FlawKind.ENTRY_ALTERED),
    (remove, FlawKind.ENTRY_MISSING),
    (remove_first, FlawKind.ENTRY_MISSING),
    (reorder, FlawKind.ENTRY_ALTERED),
    (insert_before, FlawKind.ENTRY_MISSING),
    (insert_a_sealed_one, FlawKind.NOT_SEALED),
    (truncate, FlawKind.TAIL_MISSING),
    (remove_task, FlawKind.TASK_MISSING),
    (remove_task_and_leaves, FlawKind.SEAL_ALTERED),
    (rechain, FlawKind.SEALED_OTHERWISE),
    (rechain_with_leaves, FlawKind.SEAL_ALTERED),
    (change_row, FlawKind.ROW_DIFFERS),
    (alter_seal, FlawKind.SEAL_ALTERED),
    (set_clock_of_seal_back, FlawKind.SEAL_TIME_WENT_BACK),
    (replay_seal, FlawKind.SEAL_REPLACED),
    (remove_seal, FlawKind.SEAL_MISSING),
    (trim_without_leave, FlawKind.SEAL_ALTERED),
    (reseal, FlawKind.SEAL_UNSIGNED),
    (reseal_under_the_right_name, FlawKind.SEAL_ALTERED),
]


@pytest.mark.parametrize(("tamper", "kind"), CAUGHT, ids=[tamper.__name__ for tamper, _ in CAUGHT])
async def test_tampering_is_caught_by_the_database_alone(scene: Scene, tamper: Tamper, kind: FlawKind):
    await tamper(scene, scene.tasks[1])

    report = await scene.verify(has_sink=False)

    assert kind in kinds_of(report), report.flaws
    assert not report.is_ok


@pytest.mark.parametrize(("tamper", "kind"), CAUGHT[:10], ids=[tamper.__name__ for tamper, _ in CAUGHT[:10]])
async def test_tampering_with_one_task_is_caught_when_it_alone_is_looked_at(
    scene: Scene, tamper: Tamper, kind: FlawKind
):
    await tamper(scene, scene.tasks[1])

    assert kind in kinds_of(await scene.verify(scene.tasks[1]))
    assert (await scene.verify(scene.tasks[0])).flaws == ()


async def test_first_bad_entry_of_each_task_is_named(scene: Scene):
    for task_id in scene.tasks:
        await scene.sql.execute("UPDATE coatcheck.history SET actor = 'eve' WHERE task_id = $1 AND number > 1", task_id)

    report = await scene.verify()

    assert [(flaw.task_id, flaw.entry) for flaw in report.flaws] == [(task_id, 2) for task_id in scene.tasks]


async def test_chains_longer_than_a_page_are_followed_across_pages(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("coatcheck.worker.auditing.PAGE", 2)
    assert (await scene.verify()).flaws == ()

    await truncate(scene, scene.tasks[0])
    await remove_task(scene, scene.tasks[1])

    assert kinds_of(await scene.verify()) == {FlawKind.TAIL_MISSING, FlawKind.TASK_MISSING}


# --- what only a sink shows ---


async def test_newest_seal_and_all_that_it_sealed_removed_is_shown_by_the_sink_alone(scene: Scene):
    await remove_newest_seal(scene, scene.tasks[0])

    alone, compared = await scene.verify(has_sink=False), await scene.verify()

    assert alone.is_ok
    assert "seals removed from the end, with all that they sealed: give --sink, which has them too" in alone.not_covered
    assert kinds_of(compared) == {FlawKind.SEAL_MISSING}


async def test_other_history_sealed_after_the_newest_seal_was_removed_is_shown_by_the_sink(scene: Scene):
    await remove_newest_seal(scene, scene.tasks[0])
    forged = chain_of(scene.tasks[0], 1, after=scene.chains[scene.tasks[0]][:2], actor="eve")
    await insert(scene.sql, scene.tasks[0], forged)
    await scene.sql.execute(
        "UPDATE coatcheck.task SET entry_count = 3, head = $2 WHERE id = $1", scene.tasks[0], forged[0].hash
    )
    await settle(scene.sql)
    await scene.seal()  # with the right key: the sweeper does not know better

    assert (await scene.verify(has_sink=False)).is_ok
    assert FlawKind.SEAL_REPLACED in kinds_of(await scene.verify())


async def test_seals_kept_from_the_sink_by_its_note_in_the_database_are_missed_there(scene: Scene):
    await scene.sql.execute("UPDATE coatcheck.seal_sink SET number = 99")
    await scene.add(scene.tasks[0], 1)
    await scene.seal()

    assert kinds_of(await scene.verify()) == {FlawKind.NOT_IN_SINK}


async def test_second_line_of_one_number_in_the_sink_counts_for_nothing(scene: Scene):
    first, _ = scene.sink.read_text().splitlines()
    document = json.loads(first)
    with scene.sink.open("a") as file:
        file.write(json.dumps(document | {"root": "00" * 32}) + "\nnonsense\n")

    report = await scene.verify()

    details = [flaw.detail for flaw in report.flaws]
    assert details == [
        "in the sink seals.jsonl, line 3 has another seal 1 than a line before it",
        "in the sink seals.jsonl, line 4 is no seal",
    ]


# --- what is out of reach, and said so ---


async def test_out_of_reach_history_rewritten_before_it_was_sealed(scene: Scene):
    """Between two seals a writer of the database can make anything of what was not sealed."""
    victim = scene.tasks[0]
    await scene.add(victim, 1)
    await scene.rewrite(
        victim, [*scene.chains[victim][:3], *chain_of(victim, 1, after=scene.chains[victim][:3], actor="eve")]
    )

    report = await scene.verify()

    assert report.is_ok
    assert "1 entries since the last seal: a writer of the database can change them" in report.not_covered


async def test_out_of_reach_false_events_that_are_fed_before_a_seal(scene: Scene):
    await scene.add(new_id(), 3, actor="a false witness")
    await scene.seal()

    assert (await scene.verify()).is_ok


async def test_out_of_reach_everything_if_the_key_is_stolen_and_there_is_no_sink(scene: Scene):
    await reseal(scene, scene.tasks[0], KEY)

    assert (await scene.verify(has_sink=False)).is_ok
    assert FlawKind.SEAL_REPLACED in kinds_of(await scene.verify())


async def test_without_a_public_key_a_forged_seal_passes_and_the_report_says_that_it_might(scene: Scene):
    await reseal(scene, scene.tasks[0])

    report = await verify(scene.store)

    assert report.is_ok
    assert "signatures were not checked, so the seals may be forged: give --public-key" in report.not_covered


@pytest.mark.parametrize(
    "statement", ["DELETE FROM coatcheck.seal WHERE number = 2", "UPDATE coatcheck.seal SET task_count = 0"]
)
async def test_proof_from_seals_that_were_altered_is_refused_with_what_tells_more(scene: Scene, statement: str):
    await scene.sql.execute(statement)

    with pytest.raises(CannotProve, match="coatcheck audit verify"):
        await find_sealed(scene.store, scene.tasks[0])


# --- retention ---


async def trim(scene: Scene) -> None:
    """What retention may remove: what the newest seal says."""
    await scene.add(scene.tasks[0], 1)
    await Sealer(scene.store, KEY, sinks=[FileSink(str(scene.sink))], keep=timedelta()).seal()
    part = (
        "h.number <= (SELECT max(entry_count) FROM coatcheck.seal_leaf l WHERE l.task_id = h.task_id AND l.seal <= 2)"
    )
    await scene.sql.execute(f"DELETE FROM coatcheck.history h WHERE {part}")


async def test_history_that_a_seal_allows_to_go_is_no_flaw_and_is_listed(scene: Scene):
    await trim(scene)

    report = await scene.verify()

    assert report.flaws == ()
    assert "history that retention removed, up to seal 2" in report.not_covered


async def test_first_entry_that_is_left_after_retention_is_still_checked(scene: Scene):
    await trim(scene)
    await scene.sql.execute("UPDATE coatcheck.history SET actor = 'eve'")

    assert kinds_of(await scene.verify()) == {FlawKind.ENTRY_ALTERED}


async def test_history_that_retention_removes_while_an_audit_reads_is_no_flaw(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
):
    read, gone = scene.store.read_chains, scene.tasks[1]

    async def remove_then_read(**wanted: Any) -> Any:
        monkeypatch.undo()
        await scene.add(scene.tasks[0], 1)
        await Sealer(scene.store, KEY, keep=timedelta()).seal()
        await scene.sql.execute("DELETE FROM coatcheck.history WHERE task_id = $1", gone)
        await scene.sql.execute("DELETE FROM coatcheck.task WHERE id = $1", gone)
        return await read(**wanted)

    monkeypatch.setattr(scene.store, "read_chains", remove_then_read)

    assert (await scene.verify()).flaws == ()


async def test_history_that_is_gone_though_no_later_seal_lets_it_go_is_a_flaw(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
):
    read, gone = scene.store.read_chains, scene.tasks[1]

    async def remove_then_read(**wanted: Any) -> Any:
        monkeypatch.undo()
        await scene.add(scene.tasks[0], 1)
        await Sealer(scene.store, SealKey.generate(), keep=timedelta()).seal()  # forged: verify has another key
        await scene.sql.execute("DELETE FROM coatcheck.history WHERE task_id = $1", gone)
        return await read(**wanted)

    monkeypatch.setattr(scene.store, "read_chains", remove_then_read)

    report = await scene.verify()
    assert [(flaw.kind, flaw.task_id) for flaw in report.flaws] == [(FlawKind.TASK_MISSING, gone)]
    assert report.flaw_count == 1


async def test_seal_that_is_made_while_an_audit_reads_is_not_part_of_it(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    read = scene.store.read_seals

    async def seal_then_read(**wanted: Any) -> Any:
        monkeypatch.undo()
        await scene.add(scene.tasks[0], 1)
        await scene.seal()
        return await read(**wanted)

    monkeypatch.setattr(scene.store, "read_seals", seal_then_read)

    report = await scene.verify()
    assert report.flaws == ()
    assert (report.seal_count, report.unsealed_count) == (2, 1)


async def test_part_of_sql_that_retention_uses_lets_go_of_nothing_that_is_not_sealed_away(scene: Scene):
    from coatcheck.store.postgres.sql import PARTS

    count = f"SELECT count(*) FROM coatcheck.history h WHERE {PARTS['may_go']}"

    assert await scene.sql.fetchval(count) == 0
    await scene.add(scene.tasks[0], 1)
    await Sealer(scene.store, KEY, keep=timedelta()).seal()
    assert await scene.sql.fetchval(count) == 6


# --- sweepers and sinks ---


class Stubborn:
    """A sink that refuses as often as it is told to."""

    name = "stubborn:"

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.taken: list[int] = []

    async def write(self, seal: Seal) -> None:
        if self.refusals:
            self.refusals -= 1
            raise SinkUnavailable("not now")
        self.taken.append(seal.number)


async def test_sink_that_refuses_gets_every_seal_in_order_later(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    sink: Sink = Stubborn(2)
    sealer = Sealer(scene.store, KEY, sinks=[sink])
    now_s = 0.0
    monkeypatch.setattr("coatcheck.worker.sealing.time.monotonic", lambda: now_s)
    for _ in range(3):
        await sealer.seal()
        await sealer.seal()  # in its pause it is left alone
        now_s += 10

    assert sink.taken == [1, 2]  # type: ignore[attr-defined]
    assert {mark.sink: mark.number for mark in await scene.store.read_sinks()}["stubborn:"] == 2


PROGRAM = """
import asyncio, sys
from coatcheck.points import arm_from_environment
from coatcheck.store import Store
from coatcheck.worker.sealing import Sealer, load_key
from coatcheck.worker.seal_sinks import parse_sinks
arm_from_environment()
url, key, sink = sys.argv[1:]
async def main():
    store = Store(url, pool_size=2)
    await Sealer(store, load_key(key), sinks=parse_sinks(sink)).seal()
    await store.close()
asyncio.run(main())
"""


def run_sealer(scene: Scene, *, crash: str = "") -> int:
    command = [sys.executable, "-c", PROGRAM, scene.url, KEY.secret_text(), f"file:{scene.sink}"]
    environ = os.environ | ({"COATCHECK_CRASH": crash} if crash else {})
    return subprocess.run(command, env=environ, timeout=60, check=False, capture_output=True).returncode


@pytest.mark.parametrize("point", ["before_seal", "after_seal", "after_sink"])
async def test_sweeper_that_dies_while_sealing_leaves_nothing_undone_for_the_next(scene: Scene, point: str):
    await scene.add(scene.tasks[0], 1)

    assert run_sealer(scene, crash=point) in (137, -signal.SIGKILL)
    assert run_sealer(scene) == 0

    report = await scene.verify()
    assert report.flaws == ()
    assert (report.seal_count, report.unsealed_count) == (3, 0)


async def test_two_sweepers_that_seal_at_once_leave_one_line_of_seals(scene: Scene):
    other = Store(scene.url, pool_size=3)
    sealers = [Sealer(store, KEY, sinks=[FileSink(str(scene.sink))]) for store in (scene.store, other)]
    for _ in range(5):
        await scene.add(scene.tasks[0], 1)
        await asyncio.gather(*(sealer.seal() for sealer in sealers))
    await other.close()

    report = await scene.verify()
    assert report.flaws == ()
    assert report.seal_count == 7


async def test_file_sink_ends_a_line_that_was_cut_off(scene: Scene):
    scene.sink.write_bytes(scene.sink.read_bytes()[:-9])
    await scene.add(scene.tasks[0], 1)

    await scene.seal()

    lines = scene.sink.read_text().splitlines()
    assert [json.loads(line)["number"] for line in (lines[0], lines[2])] == [1, 3]


@pytest.mark.parametrize("written", ["file:", "log:x", "http://example.org/", "ftp://x/", "nonsense", "https://"])
def test_sink_that_cannot_be_is_refused_with_those_that_can(written: str):
    with pytest.raises(InvalidSettings, match="must be file:PATH, log:, or https://HOST/PATH"):
        parse_sinks(written)


def test_key_is_read_from_a_file_or_as_it_is_and_a_bad_one_is_not_shown(tmp_path: Path):
    (tmp_path / "key").write_text(KEY.secret_text() + "\n")
    (tmp_path / "bad").write_text("s3cret")

    assert load_key(str(tmp_path / "key")).key_id == load_key(KEY.secret_text()).key_id == KEY.key_id
    for bad in (str(tmp_path / "bad"), str(tmp_path / "none"), "s3cret"):
        with pytest.raises(InvalidSettings, match="coatcheck audit keygen -o FILE") as raised:
            load_key(bad)
        assert "s3cret" not in str(raised.value)


async def test_client_verifies_with_keys_and_sinks_as_they_are_written(scene: Scene):
    async with Client(store=scene.url, broker="amqp://guest@127.0.0.1:1/") as client:
        report = await client.verify(public_keys=[str(KEY.public)], sinks=[scene.sink])
        seals = await client.seals(after=1)

    assert report.is_ok
    assert [seal.number for seal in seals] == [2]


async def test_seals_that_vanish_under_a_sweeper_are_an_error_in_its_log(
    scene: Scene, capsys: pytest.CaptureFixture[str]
):
    sealer = Sealer(scene.store, KEY)
    await sealer.seal()
    await remove_newest_seal(scene, scene.tasks[0])
    await sealer.seal()

    assert "seals_removed" in capsys.readouterr().out


# --- webhooks ---


class Hook:
    """An address that takes seals by POST, and answers as it is told."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.posts: list[tuple[str, dict[str, Any]]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        fields = dict(line.split(": ", 1) for line in head.splitlines()[1:] if line)
        body = await reader.readexactly(int(fields["content-length"]))
        self.posts.append((fields["idempotency-key"], json.loads(body)))
        writer.write(f"HTTP/1.1 {self.answers.pop(0)}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()


async def test_webhook_gets_each_seal_and_only_a_2xx_counts(scene: Scene):
    hook = Hook("503 Later", "302 Found\r\nlocation: /elsewhere", "204 Kept")
    server = await asyncio.start_server(hook.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    [sink] = parse_sinks(f"http://127.0.0.1:{port}/seals?token=s3cret")
    [seal, _] = await scene.store.read_seals()

    for status in ("503", "302"):
        with pytest.raises(SinkUnavailable, match=f"answered {status} to seal 1"):
            await sink.write(seal)
    await sink.write(seal)
    server.close()

    assert "s3cret" not in sink.name
    assert [(key, document["number"]) for key, document in hook.posts] == [("coatcheck-seal-1", 1)] * 3
    with pytest.raises(SinkUnavailable, match="cannot be reached"):
        await sink.write(seal)


async def test_webhook_that_speaks_no_http_refuses_and_no_secret_is_told(scene: Scene):
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"NONSENSE\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    [seal, _] = await scene.store.read_seals()

    for query in ("", "?sig=s3cret and a blank"):
        [sink] = parse_sinks(f"http://127.0.0.1:{port}/seals{query}")
        with pytest.raises(SinkUnavailable, match="cannot be used") as raised:
            await sink.write(seal)
        assert "s3cret" not in str(raised.value)
    server.close()


async def test_webhook_is_told_the_password_of_its_address(scene: Scene):
    heads = list[str]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(b"HTTP/1.1 204 Kept\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    [sink] = parse_sinks(f"http://me:s3%2Fcret@127.0.0.1:{port}/seals")
    [seal, _] = await scene.store.read_seals()
    await sink.write(seal)
    server.close()

    assert f"Authorization: Basic {base64.b64encode(b'me:s3/cret').decode()}" in heads[0]
    assert "cret" not in sink.name


class Slow(Stubborn):
    """A sink that takes a minute for each seal."""

    def __init__(self) -> None:
        super().__init__(0)
        self.now_s = 0.0

    async def write(self, seal: Seal) -> None:
        self.now_s += 60
        await super().write(seal)


async def test_sink_that_is_slow_or_far_behind_keeps_no_seal_from_being_made(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
):
    sink = Slow()
    monkeypatch.setattr("coatcheck.worker.sealing.time.monotonic", lambda: sink.now_s)
    sealer = Sealer(scene.store, KEY, sinks=[sink])

    await sealer.seal()
    assert sink.taken == [1]
    await sealer.seal()
    assert sink.taken == [1, 2]


# --- in memory ---


async def test_store_in_memory_seals_and_is_audited_alike():
    tables = Tables()
    store = MemoryStore(tables)
    one, two = new_id(), new_id()
    for task_id in (one, two):
        tables.history[task_id] = chain_of(task_id, 3)
    await Sealer(store, KEY).seal()
    sound = await verify(store, public_keys=[KEY.public])

    tables.history[one].pop()
    del tables.history[two]
    flawed = await verify(store, public_keys=[KEY.public])

    assert (sound.flaws, sound.entry_count, sound.seal_count) == ((), 6, 1)
    assert {(flaw.kind, flaw.task_id) for flaw in flawed.flaws} == {
        (FlawKind.TAIL_MISSING, one),
        (FlawKind.TASK_MISSING, two),
    }
