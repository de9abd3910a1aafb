"""The tests that docs/testing.md shows, run as a project of their own beside the app that it shows."""

import os
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import ROOT, blocks_of

PAGE = ROOT / "docs/testing.md"


def test_the_tests_on_the_testing_page_pass(tmp_path: Path):
    found = [block for block in blocks_of(PAGE) if block.language == "python"]
    (tmp_path / "shop.py").write_text(found[0].text)
    tests = [block for block in found if block.argument == "test_the_tests_on_the_testing_page_pass"]
    for block in tests:
        (tmp_path / f"test_at_line_{block.line}.py").write_text(block.text)

    plugins = ["-p", "pytest_asyncio.plugin", "-p", "coatcheck.testing.plugin", "-p", "no:cacheprovider"]
    options = ["-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function", "-W", "error", "-q"]
    roots = os.pathsep.join(str(ROOT / each) for each in ("worker", "broker", "store"))
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": roots, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
    shown = sum(block.text.count("\ndef test_") + block.text.count("\nasync def test_") for block in tests)
    assert f"{shown} passed" in ended.stdout
