"""What we show type-checks as its readers' own code would: by `mypy --strict` and by pyright, from outside.

The programs lie in a directory of their own and find Coatcheck as an installed package, so they see its types only
through `py.typed`. Programs that do not use Coatcheck (foreign peers on pika) are none of our business.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests import npm
from tests.docs.pages import ROOT, Block, blocks, name_of

from coatcheck.cli.new import make_pages, write

pytestmark = pytest.mark.timeout(2 * 300)

HERE = Path(__file__).parent
# The app that the tests on the page on testing import.
SHOP = "docs/testing.md"
PATIENCE_S = 300.0
"""Cold, a checker reads every library that is imported: seconds on a free machine, minutes on a crowded one."""
SUITE = "store_conformance.suite import *"
"""A file of tests that takes a suite over by its names is read by pytest, and not by type checkers."""
OURS = re.compile(r"^(from|import) coatcheck\b", re.MULTILINE)

WRONG = """\
from coatcheck.worker import App, Context, Retry

app = App("wrong")


@app.task  # wrong
def plain(ctx: Context, topic: str) -> str:
    return topic


@app.task(retry=Retry(attempts=2))  # wrong
def plain_with_options(ctx: Context, topic: str) -> str:
    return topic


@app.task  # wrong
async def without_context(topic: str) -> str:
    return topic


@app.task
async def right(ctx: Context, topic: str, *, language: str = "en") -> str:
    length: int = await ctx.step(len, topic)
    answer = await ctx.call("search", topic, returns=str)
    maybe = await ctx.call("search", topic, returns=str | None)
    fastest: int = await ctx.first(ctx.step(len, topic), ctx.call("count", returns=int))
    return answer + 1  # wrong


@app.task(name="other", default=True)
async def also_right(ctx: Context) -> None:
    ctx.progress(1, 2, "half")


async def other_code(ctx: Context) -> str:
    return await right(ctx, 1)  # wrong: decorating it did not lose its types
"""


@dataclass(frozen=True)
class Checkers:
    """The two checkers, told to look at a directory. Each answers with lines of `file:line: complaint`."""

    cache: Path
    pyright_at: Path

    def mypy(self, directory: Path) -> list[str]:
        options = ["--config-file", str(HERE / "mypy.ini"), "--cache-dir", str(self.cache), "--no-error-summary"]
        done = self._run([sys.executable, "-m", "mypy", *options, "."], directory)
        assert done.stderr == ""
        return [line for line in done.stdout.splitlines() if ": note:" not in line]

    def pyright(self, directory: Path) -> list[str]:
        program = ["node", str(self.pyright_at / "node_modules/pyright/index.js")]
        done = self._run([*program, "--pythonpath", sys.executable, "--outputjson", "."], directory)
        found = json.loads(done.stdout)
        assert found["summary"]["filesAnalyzed"], done.stdout
        return [
            f"{Path(it['file']).relative_to(directory)}:{it['range']['start']['line'] + 1}: {it['message']}"
            for it in found["generalDiagnostics"]
        ]

    def _run(self, command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "MYPYPATH"}}
        return subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )


@pytest.fixture(scope="module")
def checkers(tmp_path_factory: pytest.TempPathFactory) -> Checkers:
    return Checkers(tmp_path_factory.mktemp("mypy_cache"), tmp_path_factory.mktemp("pyright"))


@pytest.fixture(scope="module")
def pyright(checkers: Checkers) -> Checkers:
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / name, checkers.pyright_at)
    npm.install(checkers.pyright_at, purpose="pyright")
    return checkers


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every program we show that uses Coatcheck: on the pages, among the examples, and a project as `new` writes it."""
    directory = tmp_path_factory.mktemp("programs").resolve()
    for block in blocks("python", "py"):
        if OURS.search(block.text) and SUITE not in block.text:
            place = directory / name_of(block.page).removesuffix(".md") / f"line_{block.line}.py"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(module_of(block))
    shop = next(block for block in blocks("python") if name_of(block.page) == SHOP)
    (directory / "shop.py").write_text(shop.text)
    shutil.copytree(ROOT / "examples", directory / "examples", ignore=shutil.ignore_patterns("node_modules"))
    for path in (directory / "examples").rglob("*.py"):
        is_package_of_ours = any(OURS.search(it.read_text()) for it in path.parent.glob("*.py"))
        if not is_package_of_ours or path.name == "peer.py":
            path.unlink()
    write(directory, make_pages("bakery"))
    return directory


def module_of(block: Block) -> str:
    """A block as a module. A block may await on its top level, which a type checker allows in functions only."""
    tree = ast.parse(block.text)
    if not any(isinstance(it, ast.AsyncWith | ast.AsyncFor) for it in tree.body):
        return block.text
    return "async def main() -> None:\n" + textwrap.indent(block.text, "    ")


def test_there_is_something_to_check(programs: Path):
    names = {str(path.relative_to(programs)) for path in programs.rglob("*.py")}

    assert {"shop.py", "bakery/service.py", "tests/test_service.py", "examples/research.py"} <= names
    assert sum(name.startswith("docs/handlers/") for name in names) >= 5
    assert sum(name.startswith("README/") for name in names) == 1


def test_what_we_show_is_clean_under_mypy_strict(checkers: Checkers, programs: Path):
    assert checkers.mypy(programs) == []


def test_what_we_show_is_clean_under_pyright(pyright: Checkers, programs: Path):
    assert pyright.pyright(programs) == []


def test_a_handler_that_cannot_be_one_is_flagged_by_mypy(checkers: Checkers, tmp_path: Path):
    (tmp_path / "wrong.py").write_text(WRONG)

    assert lines_of(checkers.mypy(tmp_path)) == wrong_lines()


def test_a_handler_that_cannot_be_one_is_flagged_by_pyright(pyright: Checkers, tmp_path: Path):
    (tmp_path / "wrong.py").write_text(WRONG)

    assert lines_of(pyright.pyright(tmp_path.resolve())) == wrong_lines()


def lines_of(complaints: list[str]) -> set[int]:
    return {int(line.split(":")[1]) for line in complaints}


def wrong_lines() -> set[int]:
    return {number for number, line in enumerate(WRONG.splitlines(), start=1) if "# wrong" in line}
