"""`coatcheck audit`: verdicts, entries, exports, seals and keys; and the verifier that needs nothing of ours."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from tests.cli.kit import Cli
from tests.services import run_sync
from tests.store.histories import NOON, chain_of, insert, settle
from tests.store.kit import new_id

from coatcheck.cli.doctor import Status, judge_seals
from coatcheck.store import Store, TaskId, encode
from coatcheck.store.audits import SealLag
from coatcheck.store.seals import Seal, SealKey, SinkMark
from coatcheck.worker.seal_sinks import parse_sinks
from coatcheck.worker.sealing import Sealer

KEY = SealKey(bytes(range(32)))
EVIL = '<script>alert(1)</script>\x1b[31m"&'


async def write(url: str, task_id: TaskId, *, seals: bool = True, sink: Path | None = None, **given: Any) -> None:
    sql = await asyncpg.connect(url)
    store = Store(url, pool_size=2)
    try:
        await insert(sql, task_id, chain_of(task_id, 3, **given))
        await settle(sql)
        if seals:
            await Sealer(store, KEY, sinks=parse_sinks(f"file:{sink}" if sink else "")).seal()
    finally:
        await store.close()
        await sql.close()


async def execute(url: str, statement: str) -> None:
    sql = await asyncpg.connect(url)
    await sql.execute(statement)
    await sql.close()


@pytest.fixture
def task_id(store_url: str) -> TaskId:
    made = new_id()
    run_sync(write(store_url, made, actor="alice", data=encode({"choice": EVIL})))
    return made


# --- verify ---


def test_verify_gives_both_verdicts_and_says_what_is_not_covered(store_cli: Cli, task_id: TaskId):
    result = store_cli("audit", "verify", "--public-key", str(KEY.public))

    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert "integrity     ok" in lines
    assert "completeness  ok" in lines
    assert "Not covered" in lines
    assert any("give --sink" in line for line in lines)


def test_verify_names_the_first_bad_entry_and_exits_with_1(store_cli: Cli, store_url: str, task_id: TaskId):
    run_sync(execute(store_url, "UPDATE coatcheck.history SET actor = 'eve' WHERE number > 1"))

    found = store_cli.json("audit", "verify", str(task_id), "--public-key", str(KEY.public), exit_code=1)
    shown = store_cli("audit", "verify", "--public-key", str(KEY.public))

    [flaw] = found["flaws"]
    assert (flaw["kind"], flaw["task_id"], flaw["entry"]) == ("entry_altered", str(task_id), 2)
    assert (found["is_ok"], found["integrity"], found["completeness"]) == (False, False, True)
    assert shown.exit_code == 1
    assert f"entry_altered  {task_id}  2" in shown.stdout


def test_verify_takes_the_key_of_the_sweeper_from_its_variable(store_cli: Cli, task_id: TaskId):
    cli = Cli({**store_cli.environ, "COATCHECK_SEAL_KEY": KEY.secret_text()})

    found = cli.json("audit", "verify")

    assert not any("signatures" in text for text in found["not_covered"])
    assert KEY.secret_text() not in cli("audit", "verify").output


def test_verify_explains_a_public_key_that_is_none(store_cli: Cli):
    result = store_cli("audit", "verify", "--public-key", "nonsense")

    assert result.exit_code == 1
    assert "'nonsense' is no public key" in result.stderr


def test_verify_compares_with_a_sink(store_cli: Cli, store_url: str, tmp_path: Path):
    sink = tmp_path / "seals.jsonl"
    for _ in range(2):
        run_sync(write(store_url, new_id(), sink=sink))
    run_sync(execute(store_url, "DELETE FROM coatcheck.seal WHERE number = 2"))

    found = store_cli.json("audit", "verify", "--public-key", str(KEY.public), "--sink", str(sink), exit_code=1)

    assert {flaw["kind"] for flaw in found["flaws"]} >= {"seal_missing"}


# --- query ---


def test_query_filters_and_goes_on_where_a_page_ended(store_cli: Cli, store_url: str, task_id: TaskId):
    run_sync(write(store_url, new_id(), actor="bob", seals=False))

    first = store_cli.json("audit", "query", "--actor", "alice", "--limit", "2")
    rest = store_cli.json("audit", "query", "--actor", "alice", "--limit", "2", "--after", first["next"])

    assert [entry["number"] for entry in first["entries"] + rest["entries"]] == [1, 2, 3]
    assert rest["next"] is None
    assert first["entries"][0]["data"]["value"] == {"choice": EVIL}
    assert len(store_cli.json("audit", "query", "--kind", "accepted")["entries"]) == 2
    assert len(store_cli.json("audit", "query", "--task", str(task_id))["entries"]) == 3
    assert store_cli.json("audit", "query", "--service", "svc")["entries"] == []
    assert store_cli.json("audit", "query", "--since", "2026-02-01")["entries"] == []
    assert store_cli.json("audit", "query", "--until", "2026-01-02T12:00:01+00:00")["entries"] == []


def test_query_shows_a_table_and_refuses_what_is_no_time(store_cli: Cli, task_id: TaskId):
    result = store_cli("audit", "query", "--limit", "1")

    assert str(task_id) in result.stdout
    assert "1 entry; more with --after 2026-01-02T12:00:01+00:00/" in result.stderr
    assert store_cli("audit", "query", "--since", "yesterday").exit_code == 2
    assert store_cli("audit", "query", "--after", "x/y/z").exit_code == 2


# --- export ---


def run_verifier(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-O", "audit_verify.py", *arguments]  # asserts are off: it must not live by them
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=60, check=False)


def export(cli: Cli, task_id: TaskId, path: Path, *options: str) -> None:
    key = ("--public-key", str(KEY.public))
    result = cli("audit", "export", str(task_id), "-o", str(path), "--with-verifier", *key, *options)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("kind", ["jsonl", "html"])
def test_export_is_verified_by_a_program_that_does_not_need_us(
    store_cli: Cli, task_id: TaskId, tmp_path: Path, kind: str
):
    export(store_cli, task_id, tmp_path / "task", "--format", kind)

    done = run_verifier(tmp_path, "task", str(KEY.public))

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"signed with the key {KEY.key_id}"
    assert "coatcheck.store" not in (tmp_path / "audit_verify.py").read_text()


def alter_entry(documents: list[Any]) -> None:
    documents[2]["actor"] = "eve"


def alter_data(documents: list[Any]) -> None:
    documents[2]["data"] = "AAAA"


def remove_entry(documents: list[Any]) -> None:
    del documents[2]


def cut(documents: list[Any]) -> None:
    del documents[3]


def alter_seal(documents: list[Any]) -> None:
    documents[-1]["seal"]["sealed_at_us"] += 1


def alter_proof(documents: list[Any]) -> None:
    documents[-1]["proof"]["size"] = 4


def without_seal(documents: list[Any]) -> None:
    documents[-1]["seal"] = None


@pytest.mark.parametrize(
    "tamper",
    [alter_entry, alter_data, remove_entry, cut, alter_seal, alter_proof, without_seal],
    ids=lambda it: it.__name__,
)
def test_altered_export_is_refused_by_the_program(store_cli: Cli, task_id: TaskId, tmp_path: Path, tamper: Any):
    export(store_cli, task_id, tmp_path / "task")
    documents = [json.loads(line) for line in (tmp_path / "task").read_text().splitlines()]
    tamper(documents)
    (tmp_path / "task").write_text("".join(json.dumps(each) + "\n" for each in documents))

    done = run_verifier(tmp_path, "task", str(KEY.public))

    assert done.returncode == 1
    assert done.stderr.startswith("FAILED: ")


def test_export_signed_with_another_key_is_refused_by_the_program(store_cli: Cli, task_id: TaskId, tmp_path: Path):
    export(store_cli, task_id, tmp_path / "task")

    assert run_verifier(tmp_path, "task", str(SealKey.generate().public)).returncode == 1
    assert "by the export's own word" in run_verifier(tmp_path, "task").stdout


def test_page_runs_nothing_that_was_recorded(store_cli: Cli, task_id: TaskId):
    page = store_cli("audit", "export", str(task_id), "--format", "html").stdout

    assert "<script" not in page
    assert "\x1b" not in page
    assert "default-src 'none'" in page


def test_export_of_a_task_without_history_says_so(store_cli: Cli):
    result = store_cli("audit", "export", str(new_id()))

    assert result.exit_code == 1
    assert "has no history" in result.stderr


# --- seals and keys ---


def test_seals_are_listed_with_what_the_sinks_have(store_cli: Cli, store_url: str, tmp_path: Path):
    run_sync(write(store_url, new_id(), sink=tmp_path / "seals.jsonl"))

    found = store_cli.json("audit", "seals")

    assert [seal["number"] for seal in found["seals"]] == [1]
    assert found["sinks"] == {f"file:{tmp_path}/seals.jsonl": 1}
    assert KEY.key_id in store_cli("audit", "seals").stdout


def test_keygen_writes_a_key_for_its_owner_alone_and_overwrites_none(bare_cli: Cli, tmp_path: Path):
    path = tmp_path / "seal.key"

    made = bare_cli.json("audit", "keygen", "-o", str(path))
    again = bare_cli("audit", "keygen", "-o", str(path))

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (tmp_path / "seal.key.pub").read_text().strip() == made["public_key"]
    assert path.read_text() not in json.dumps(made)
    assert again.exit_code == 1
    assert "is there already" in again.stderr
    assert set(bare_cli.json("audit", "keygen")) == {"key_id", "public_key", "secret_key"}


# --- the sweeper ---


def test_sweeper_with_a_key_seals_and_shows_the_key_nowhere(cli: Cli, store_url: str, tmp_path: Path):
    (tmp_path / "key").write_text(KEY.secret_text())
    sealing = {"COATCHECK_SEAL_KEY": KEY.secret_text(), "COATCHECK_SEAL_EVERY": "0.1", "COATCHECK_SEAL_SINK": "log:"}
    run_sync(write(store_url, new_id(), seals=False))

    with Cli({**cli.environ, **sealing, "COATCHECK_LOG_FORMAT": "json"}).start("sweeper") as process:
        started = process.wait_for("sweeper_started")
        made = process.wait_for("seal_made")

    assert started["settings"]["seal_key"] == "***"
    assert (made["number"], made["entry_count"], made["key_id"]) == (1, 3, KEY.key_id)


def test_sweeper_with_a_key_that_is_none_does_not_start(cli: Cli):
    done = Cli({**cli.environ, "COATCHECK_SEAL_KEY": "/no/such/file"}).run("sweeper")

    assert done.returncode == 1
    assert "COATCHECK_SEAL_KEY: it is no key in base64, and a file of that name cannot be read" in done.stderr


# --- doctor ---


def test_doctor_warns_of_seals_and_sinks_that_are_behind_and_is_quiet_where_nothing_is_sealed():
    minute, now = timedelta(minutes=1), NOON
    seal = Seal(5, now, 0, 1, 1, b"", b"", 0, KEY.key_id)
    behind = SinkMark("log:", 3, now - 2 * minute)

    assert judge_seals(SealLag(None, now - 2 * minute, now), minute) == []
    assert [it.status for it in judge_seals(SealLag(seal, None, now), minute)] == [Status.OK]
    assert [it.check for it in judge_seals(SealLag(seal, now - 2 * minute, now, (behind,)), minute)] == [
        "seals",
        "sinks",
    ]
    assert [it.status for it in judge_seals(SealLag(seal, now, now, (SinkMark("log:", 5, now),)), minute)] == [
        Status.OK
    ]
