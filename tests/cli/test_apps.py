"""From `module:app` to an App: every mistake has its own answer."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest

from coatcheck.cli.apps import ImportFailed, load_app
from coatcheck.worker import App


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a module into the current directory of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    yield write
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


APP = 'from coatcheck.worker import App\napp = App("research")\n'


def complaint(reference: str) -> str:
    with pytest.raises(click.UsageError) as caught:
        load_app(reference)
    return caught.value.message


def test_an_app_in_the_current_directory_is_found(write):
    write("my_research.py", APP)

    assert load_app("my_research:app").service == "research"
    assert isinstance(load_app("my_research"), App)


def test_an_app_in_a_package_is_found(write):
    write("my_shop/__init__.py", "")
    write("my_shop/orders.py", APP)

    assert load_app("my_shop.orders:app").service == "research"


def test_a_missing_module_is_named_with_where_it_was_looked_for(write, tmp_path: Path):
    assert complaint("no_such_module:app").startswith(f"there is no module 'no_such_module' in {tmp_path}")


def test_a_missing_part_of_a_package_is_named(write):
    write("my_half/__init__.py", "")

    assert "there is no module 'my_half.orders'" in complaint("my_half.orders:app")


def test_a_missing_attribute_lists_the_apps_there_are(write):
    write("my_apps.py", APP + 'other = App("other")\n')

    text = complaint("my_apps:ap")

    assert "my_apps has no 'ap'" in text
    assert "it has my_apps:app, my_apps:other" in text
    assert "did you mean my_apps:app?" in text


def test_a_module_with_two_apps_needs_a_choice(write):
    write("my_two.py", APP + 'other = App("other")\n')

    assert "say which App of my_two to run; it has my_two:app, my_two:other" in complaint("my_two")


def test_a_module_without_an_app_says_how_to_make_one(write):
    write("my_none.py", "x = 1\n")

    assert 'it has no App at all; make one: app = App("name")' in complaint("my_none:app")


def test_something_that_is_no_app_is_called_what_it_is(write):
    write("my_thing.py", APP + "thing = 3\n")

    assert complaint("my_thing:thing") == "my_thing:thing is a int, not an App; it has my_thing:app"


@pytest.mark.parametrize(
    ("path", "module"), [("research.py", "research:app"), ("./jobs/research.py:app", "jobs.research:app")]
)
def test_a_path_is_answered_with_the_module_it_means(write, path: str, module: str):
    assert f"name the module instead: {module}" in complaint(path)


def test_no_module_at_all_is_wrong_usage(write):
    assert "names no module" in complaint(":app")


def test_an_error_in_the_module_shows_the_users_lines_only(write):
    write("my_broken.py", "def make():\n    raise ValueError('no such thing')\n\nmake()\n")

    with pytest.raises(ImportFailed) as caught:
        load_app("my_broken:app")

    assert caught.value.message == "my_broken cannot be imported: ValueError: no such thing"
    assert "line 4, in <module>" in caught.value.trace
    assert "line 2, in make" in caught.value.trace
    assert "importlib" not in caught.value.trace
    assert "coatcheck" not in caught.value.trace


def test_a_missing_import_inside_the_module_is_not_a_missing_module(write):
    write("my_needy.py", "import no_such_dependency\n")

    with pytest.raises(ImportFailed) as caught:
        load_app("my_needy:app")

    assert "my_needy cannot be imported: ModuleNotFoundError" in caught.value.message
    assert "import no_such_dependency" in caught.value.trace


def test_a_syntax_error_shows_its_line(write):
    write("my_typo.py", "def broken(:\n")

    with pytest.raises(ImportFailed) as caught:
        load_app("my_typo:app")

    assert "def broken(:" in caught.value.trace
    assert "importlib" not in caught.value.trace


def test_a_handler_that_cannot_be_one_points_at_the_users_line(write):
    write("my_handler.py", APP + "@app.task\ndef not_async(ctx):\n    pass\n")

    with pytest.raises(ImportFailed) as caught:
        load_app("my_handler:app")

    assert "my_handler.py" in caught.value.trace
    assert "not_async" in caught.value.message
