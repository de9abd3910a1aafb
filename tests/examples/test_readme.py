"""`examples/README.md` names every example, and every command in it names something that exists."""

import re

from tests.examples.processes import ROOT

README = (ROOT / "examples/README.md").read_text()
EXAMPLES = ROOT / "examples"


def test_every_example_is_described():
    programs = [path for path in EXAMPLES.iterdir() if path.suffix == ".py"]
    programs += [*EXAMPLES.glob("tutorial_six/*.py"), *EXAMPLES.glob("tutorial_six/*.js")]

    assert programs
    assert [path.name for path in programs if path.name not in README] == []
    assert "examples.demo" in README


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
    sections = re.split(r"^## ", README, flags=re.MULTILINE)[1:]

    assert all(re.search(r"^    \S", section, flags=re.MULTILINE) for section in sections)
