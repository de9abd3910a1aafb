"""`examples/README.md` names every example, and every command in it names something that exists."""

import ast
import re

import pytest
from tests.examples.processes import README, ROOT

EXAMPLES = ROOT / "examples"
SECTIONS = re.split(r"^## ", README, flags=re.MULTILINE)[1:]
MODULES = sorted(set(re.findall(r"python -m (examples\.[\w.]+)", README)))


def test_every_example_is_described():
    programs = [path for path in EXAMPLES.iterdir() if path.suffix == ".py"]
    programs += [*EXAMPLES.glob("tutorial_six/*.py"), *EXAMPLES.glob("tutorial_six/*.js")]
    folders = [path for path in EXAMPLES.iterdir() if (path / "__main__.py").is_file()]

    assert programs
    assert [path.name for path in programs if path.name not in README] == []
    assert folders
    assert [path.name for path in folders if f"`{path.name}/`" not in README] == []


def test_every_command_names_what_is_there():
    modules = re.findall(r"\bexamples\.[\w.]+", README)
    files = re.findall(r"\bexamples/[\w./]+\.(?:py|js)\b", README)

    assert modules
    assert files
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module
    assert all((ROOT / file).is_file() for file in files)


def test_every_example_has_a_command():
    assert all(re.search(r"^    \S", section, flags=re.MULTILINE) for section in SECTIONS)


@pytest.mark.parametrize("module", MODULES)
def test_every_example_says_what_it_is_and_how_it_runs(module):
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text())) or ""

    assert f"python -m {module}" in text


def test_every_command_is_run_by_a_test():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests/examples").glob("test_*.py"))
    headings = [section.partition("\n")[0] for section in SECTIONS if "    python -m" in section]
    elsewhere = {"A peer without our library"}  # by its module's name, with arguments

    assert {heading for heading in headings if f'command_of("{heading}")' not in tests} == elsewhere
