"""The bench runs against real servers and leaves nothing behind; its bare loop loses nothing when it is killed."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.client import Client, wait_for
from bench.run import Bench, database, delete_queues

ROOT = Path(__file__).parents[2]


def run_bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture
def servers(broker_url: str, postgres_url: str) -> dict[str, str]:
    return {"COATCHECK_BROKER": broker_url, "COATCHECK_STORE": postgres_url}


def test_quick_run_measures_a_loop_and_a_worker(servers: dict[str, str], tmp_path: Path) -> None:
    ran = run_bench(
        "--quick", "--rows", "naive,fan-4", "--count", "20", "--json", "--directory", str(tmp_path), **servers
    )

    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert json.loads(next(tmp_path.iterdir()).read_text()) == found
    for name in ("naive", "fan-4"):
        (measured,) = found["rows"][name]
        assert measured["per_second"] > 0
        assert len(measured["latencies_ms"]) == 10
        assert measured["cost"]["messages"] == 10  # a request, four calls, four replies, an answer
        assert measured["cost"]["cpu_ms"].keys() >= {"worker", "peer", "client"}
        assert measured["idle_cost"]["write_transactions"] >= 1
    assert "not in this run" in {each["word"] for each in found["verdicts"]}


def test_unknown_row_is_refused_before_anything_is_made() -> None:
    ran = run_bench("--rows", "fan-4,fan-9")

    assert ran.returncode == 2
    assert "no row 'fan-9'; there are naive, batched, fan-4" in ran.stderr


def test_missing_server_is_named(broker_url: str) -> None:
    ran = run_bench("--quick", COATCHECK_BROKER=broker_url, COATCHECK_STORE="postgresql://nobody@localhost:1/none")

    assert ran.returncode == 2
    assert ran.stderr.startswith("no Postgres:")
    assert "COATCHECK_STORE" in ran.stderr


async def test_batched_loop_loses_nothing_when_it_is_killed(broker_url: str, postgres_url: str) -> None:
    async with database(postgres_url) as store:
        bench = Bench(broker_url, store)
        loop = ("-m", "bench.bare", "batched", bench.queue("batched"), bench.queue("echo"))
        try:
            await bench.start("-m", "bench.echo", bench.queue("echo"), awaits="ready")
            first = await bench.start(*loop, awaits="ready")
            async with Client(broker_url) as client:
                answers = [client.ask(bench.queue("batched"), None)[1] for _ in range(300)]
                await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
                first.kill()
                await bench.start(*loop, awaits="ready")
                await wait_for(answers, "requests to a loop that was killed")
        finally:
            await bench.stop()
            await delete_queues(bench)

    assert {answer.result() for answer in answers} == {b"4"}


def test_interrupted_run_leaves_nothing_behind(servers: dict[str, str]) -> None:
    command = [sys.executable, "-m", "bench", "--quick", "--rows", "bare", "--rounds", "50"]
    ours = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **servers}, stderr=subprocess.PIPE, text=True)
    assert ours.stderr is not None
    assert "round 1" in ours.stderr.readline()
    children = _children_of(ours.pid)
    ours.send_signal(2)
    _, said = ours.communicate(timeout=60)

    assert ours.returncode == 130
    assert "are gone" in said
    assert children
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def _children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
