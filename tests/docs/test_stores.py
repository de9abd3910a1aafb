"""The store that docs/stores.md shows, run through the public suite as a project of its own."""

import os
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import ROOT, blocks_of


def test_the_store_on_the_stores_page_passes_the_suite(tmp_path: Path):
    (block,) = [it for it in blocks_of(ROOT / "docs/stores.md") if it.argument.startswith("test_the_store")]
    (tmp_path / "test_store.py").write_text(block.text)

    ended = run_suite(tmp_path)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert int(ended.stdout.split(" passed")[0].split()[-1]) > 150


def test_store_that_breaks_a_promise_fails_the_suite(tmp_path: Path):
    (block,) = [it for it in blocks_of(ROOT / "docs/stores.md") if it.argument.startswith("test_the_store")]
    careless = block.text.replace(
        "        return await super().put(", "        puts = list(reversed(puts))\n        return await super().put("
    )
    (tmp_path / "test_store.py").write_text(careless)

    ended = run_suite(tmp_path)

    assert ended.returncode == 1
    assert " failed" in ended.stdout


def run_suite(directory: Path) -> subprocess.CompletedProcess[str]:
    plugins = ["-p", "pytest_asyncio.plugin", "-p", "no:cacheprovider"]
    options = ["-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function", "-W", "error", "-q"]
    roots = os.pathsep.join(str(ROOT / each) for each in ("worker", "broker", "store"))
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *options],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": roots, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
