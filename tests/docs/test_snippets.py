"""What the documentation shows is true: code runs, commands parse, JSON is JSON, variables and links exist.

A Python block is executed as a module of its own; `await` on its top level is allowed. A comment right before the fence
says otherwise:

    <!-- not run: REASON -->      nobody runs it; the reason is for the reader of the page's source
    <!-- run by: TEST -->         a test of that name in tests/docs/ or tests/security/ runs it, with what it needs
                                  around it
"""

import ast
import asyncio
import importlib
import inspect
import json
import re
import sys
import types
from pathlib import Path

import click
import pytest
from tests.docs.pages import (
    PAGES,
    ROOT,
    Block,
    Command,
    anchors_of,
    blocks,
    commands,
    every_block,
    links_of,
    name_of,
    variables_of,
)

from coatcheck.broker.bodies import CONTENT_TYPES
from coatcheck.cli.main import main
from coatcheck.worker.settings import ENVIRONMENT

# Variables of the test suite, not of a process of ours.
TEST_VARIABLES = re.compile(r"COATCHECK_(TEST_\w+|CRASH\w*|PG_BIN)")
# Reasons an exception may carry that never become a dead letter: a body of ours, and a value of the handler's.
NOT_FOR_LETTERS = {"unencodable", "does_not_fit"}

PYTHON = blocks("python", "py")
TEMPLATES = ROOT / "worker/coatcheck/cli/templates"
PROGRAMS = sorted([*(ROOT / "examples").rglob("*.py"), *TEMPLATES.glob("*.py.tmpl")])


def _id(place: Block | Path) -> str:
    return place.place if isinstance(place, Block) else name_of(place)


# --- Python ---


@pytest.mark.parametrize("block", [it for it in PYTHON if it.directive == ""], ids=_id)
def test_python_block_runs(block: Block, monkeypatch: pytest.MonkeyPatch):
    for variable in ENVIRONMENT:
        monkeypatch.delenv(variable, raising=False)

    run_block(block)


def run_block(block: Block) -> types.ModuleType:
    """Execute a block as a module, with its lines numbered as on its page."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile("\n" * (block.line - 1) + block.text, block.place, "exec", flags=flags, dont_inherit=True)
    module = types.ModuleType(f"snippet_{abs(hash(block.place))}")
    sys.modules[module.__name__] = module
    try:
        running = eval(code, module.__dict__)
        if inspect.iscoroutine(running):
            asyncio.run(running)
    finally:
        del sys.modules[module.__name__]
    return module


def test_who_is_said_to_run_a_block_exists():
    folders = (ROOT / "tests/docs", ROOT / "tests/security")
    sources = "\n".join(path.read_text() for folder in folders for path in folder.glob("test_*.py"))
    named = {block.argument for block in every_block() if block.directive == "run by"}

    assert named
    assert {name for name in named if f"def {name}(" not in sources} == set()


def test_every_fence_names_its_language():
    assert [block.place for block in every_block() if not block.language] == []


def test_every_page_with_python_is_seen():
    seen = {name_of(block.page) for block in PYTHON}

    assert {"README.md", "docs/handlers.md", "docs/wire.md"} <= seen


@pytest.mark.parametrize("place", [*PYTHON, *PROGRAMS], ids=_id)
def test_public_names_come_from_where_they_are_public(place: Block | Path):
    text = place.text if isinstance(place, Block) else place.read_text()
    imports = re.findall(r"^ *from (coatcheck[\w.]*) import (\(.*?\)|.+?)$", text, flags=re.MULTILINE | re.DOTALL)
    found = {(module, name) for module, names in imports for name in re.findall(r"\w+", names.partition("#")[0])}

    packages = ("worker", "testing", "testing.store_conformance", "store")
    public = {(it, name) for it in packages for name in _public_names(it)}
    assert {(module.removeprefix("coatcheck."), name) for module, name in found} - public == set()
    assert not re.search(r"^ *import coatcheck", text, flags=re.MULTILINE)


def _public_names(package: str) -> list[str]:
    names: list[str] = importlib.import_module(f"coatcheck.{package}").__all__
    return names


# --- JSON ---


@pytest.mark.parametrize("block", blocks("json"), ids=_id)
def test_json_block_is_json(block: Block):
    json.loads(block.text)


# --- commands ---


COMMANDS = [it for it in commands() if it.words[:1] != ("COMMAND",)]  # a placeholder for any of them


@pytest.mark.parametrize("command", COMMANDS, ids=lambda it: f"{it.place}: {' '.join(it.words)[:40]}")
def test_command_parses(command: Command):
    try:
        parse(main, list(command.words), name="coatcheck")
    except click.exceptions.Exit:
        pass  # --help and --version end there
    except click.MissingParameter:
        assert command.is_mention, f"{command.place}: an argument is missing"
    except click.UsageError as error:
        pytest.fail(f"{command.place}: coatcheck {' '.join(command.words)}: {error.format_message()}")


def parse(command: click.Command, words: list[str], *, name: str, parent: click.Context | None = None) -> None:
    """Parse a command line to its end and do nothing. Raises click.UsageError where it is wrong."""
    if not isinstance(command, click.Group):
        command.make_context(name, words, parent=parent)
        return
    if not words:
        return  # the group itself is meant
    ctx = command.make_context(name, words, parent=parent)
    found, inner, rest = command.resolve_command(ctx, [*ctx._protected_args, *ctx.args])
    assert found is not None
    assert inner is not None
    parse(inner, rest, name=found, parent=ctx)


def test_a_wrong_command_is_noticed():
    for words in (["wroker", "a:b"], ["worker"], ["worker", "a:b", "--concurency", "3"], ["dead", "lst", "research"]):
        with pytest.raises(click.UsageError):
            parse(main, words, name="coatcheck")


# --- variables, links, lists ---


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_variables_exist(page: Path):
    unknown = {it for it in variables_of(page) if it not in ENVIRONMENT and not TEST_VARIABLES.fullmatch(it)}

    assert unknown == set()


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_links_resolve(page: Path):
    broken = [target for target in links_of(page) if not _resolves(page, target)]

    assert broken == []


def _resolves(page: Path, target: str) -> bool:
    if re.match(r"https?://|mailto:", target):
        return True
    path, _, anchor = target.partition("#")
    found = (page.parent / path).resolve() if path else page
    return found.exists() and (not anchor or anchor in anchors_of(found))


def test_the_index_lists_every_page_of_docs():
    index = ROOT / "docs/README.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in links_of(index)}

    assert {name_of(page) for page in (ROOT / "docs").rglob("*.md") if page != index and page not in linked} == set()


def test_files_named_in_the_docs_exist():
    roots = ("worker", "broker", "store", "examples", "tests", "bench")
    sources = {path.name for root in roots for path in (ROOT / root).rglob("*")} | {"research.py", "audit_verify.py"}
    name = re.compile(r"`(?:[\w…]+/)*([a-z_0-9]+\.(?:py|js))\b")
    named = {(name_of(page), found) for page in PAGES for found in name.findall(page.read_text())}

    assert named
    assert {(page, file) for page, file in named if file not in sources} == set()


def test_every_reason_of_a_dead_letter_is_in_the_contract():
    raised = r"(?:Malformed|Oversized)Message\(\s*\"([a-z_]+)\""
    sources = [path for root in ("broker", "worker") for path in (ROOT / root).rglob("*.py")]
    reasons = {code for path in sources for code in re.findall(raised, path.read_text())} - NOT_FOR_LETTERS
    text = (ROOT / "docs/wire.md").read_text()

    assert {reason for reason in reasons if f"`{reason}`" not in text} == set()


def test_every_content_type_we_write_is_in_the_contract():
    text = (ROOT / "docs/wire.md").read_text()

    known = {"text/plain; charset=utf-8": "text/…", "application/octet-stream": "anything else"}
    assert [mime for mime in CONTENT_TYPES.values() if known.get(mime, mime) not in text] == []


def test_every_header_is_in_the_contract():
    names = re.findall(r'= "(cc-[a-z-]+)"', (ROOT / "broker/coatcheck/broker/headers.py").read_text())
    text = (ROOT / "docs/wire.md").read_text()

    assert names
    assert {name for name in names if f"`{name}`" not in text and f"`{name}:" not in text} == {"cc-broken"}
