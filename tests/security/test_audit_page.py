"""The commands and the program of docs/audit.md, run as they stand there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest
from tests.docs.pages import blocks
from tests.docs.test_snippets import run_block
from tests.store.histories import chain_of, insert, settle
from tests.store.kit import new_id

from coatcheck.store import Store
from coatcheck.worker.seal_sinks import parse_sinks
from coatcheck.worker.sealing import Sealer, load_key

PAGE = "test_the_audit_page_runs"


async def test_the_audit_page_runs(store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    setup, look = [block.text for block in blocks("bash") if block.argument == PAGE]
    [program] = [block for block in blocks("python") if block.argument == PAGE]
    monkeypatch.chdir(tmp_path)
    task_id = new_id()
    run_shell(setup, store_url)
    sql, store = await asyncpg.connect(store_url), Store(store_url, pool_size=2)
    await insert(sql, task_id, chain_of(task_id, 3, kind="finished"))
    await settle(sql)
    await Sealer(store, load_key("seal.key"), sinks=parse_sinks("file:seals.jsonl")).seal()
    await sql.close()
    await store.close()

    said = run_shell(look, store_url, TASK=str(task_id))

    assert "integrity     ok" in said
    assert said.splitlines()[-1].startswith("signed with the key ")
    monkeypatch.setenv("COATCHECK_STORE", store_url)
    assert await run_block(program).is_sound("seal.key.pub")


def run_shell(text: str, store_url: str, **environ: str) -> str:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environ = os.environ | {"PATH": path, "COATCHECK_STORE": store_url} | environ
    done = subprocess.run(["bash", "-euc", text], env=environ, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
