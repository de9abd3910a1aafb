"""What a newcomer reads, and the promise that the reference knows every command and option."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from tests.cli.kit import Cli

from coatcheck.cli import main
from coatcheck.cli.main import COMMANDS as TABLE

ROOT = Path(__file__).parent.parent.parent
REFERENCE = ROOT / "docs/cli.md"


def _commands(group: click.Group = main, path: tuple[str, ...] = ()) -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found[" ".join((*path, name))] = command
        if isinstance(command, click.Group):
            found |= _commands(command, (*path, name))
    return found


COMMANDS = _commands()
PRINTS_NO_DATA = {"worker", "sweeper", "dead", "audit", "dev", "new"}


def test_the_commands_are_those_that_were_promised():
    promised = {
        "demo",
        "new",
        "dev",
        "worker",
        "sweeper",
        "migrate",
        "declare",
        "submit",
        "result",
        "ps",
        "show",
        "checkpoints",
        "history",
        "check",
        "cancel",
        "fork",
        "pause",
        "resume",
        "retry",
        "rewind",
        "dead",
        "audit",
        "doctor",
        "version",
    }

    assert set(main.list_commands(click.Context(main))) == promised
    assert {name for name in COMMANDS if name.startswith("dead ")} == {
        f"dead {it}" for it in ("ls", "show", "redrive", "drop")
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_with_an_example(bare_cli: Cli, name: str):
    result = bare_cli(*name.split(), "--help")

    assert result.exit_code == 0
    assert re.search(rf"Example:\n +coatcheck {name}", result.stdout)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_help_text(name: str):
    options = [it for it in COMMANDS[name].params if isinstance(it, click.Option)]

    assert [option.name for option in options if not option.help] == []


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - PRINTS_NO_DATA))
def test_every_command_that_prints_data_prints_json(name: str):
    assert any("--json" in option.opts for option in COMMANDS[name].params)


def test_the_list_of_commands_cuts_no_sentence(bare_cli: Cli):
    listed = bare_cli("--help").stdout.partition("Commands:")[2]

    assert "..." not in listed
    assert listed.index("migrate") < listed.index("worker") < listed.index("doctor")


def test_the_list_says_of_each_command_what_the_command_says_of_itself():
    said = {name: COMMANDS[name].get_short_help_str(limit=200) for name in TABLE}

    assert {name: about for name, (_, about) in TABLE.items()} == said


@pytest.mark.parametrize("asked", ["--help", "--version"])
def test_help_and_version_wait_for_nothing_heavy(asked: str):
    """Not by the clock, which a busy machine stretches: by what was imported."""
    program = (
        "import sys; from coatcheck.cli import main; main([sys.argv[1]], standalone_mode=False); "
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, asked], capture_output=True, text=True, check=True)

    assert done.stdout.startswith(("Usage: ", "coatcheck "))
    heavy = {"aio_pika", "aiormq", "alembic", "asyncpg", "msgspec", "pydantic", "rich", "sqlalchemy", "structlog"}
    assert heavy & set(done.stderr.split()) == set()


def test_options_that_have_a_variable_name_it(bare_cli: Cli):
    shown = " ".join(bare_cli("worker", "--help").stdout.split())

    for variable in ("BROKER", "STORE", "CONCURRENCY", "HEALTH_PORT", "CHECKPOINTING"):
        assert f"env: COATCHECK_{variable}" in shown


def _section(name: str) -> str:
    text = REFERENCE.read_text()
    found = re.search(rf"^##+ `coatcheck {name}`\n(.*?)(?=^##|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    assert found, f"docs/cli.md has no section for coatcheck {name}"
    return found[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_reference_has_every_command_with_its_options_and_an_example(name: str):
    section = _section(name)

    options = [it for it in COMMANDS[name].params if isinstance(it, click.Option)]
    assert [option.opts[0] for option in options if f"`{option.opts[0]}" not in section] == []
    assert f"coatcheck {name}" in section.partition("```")[2]


def test_the_reference_names_nothing_that_is_not_there():
    text = REFERENCE.read_text()
    known = {opt for command in COMMANDS.values() for param in command.params for opt in param.opts}

    assert set(re.findall(r"`(--[a-z-]+)", text)) <= known | {"--help", "--version"}
    assert set(re.findall(r"^##+ `coatcheck ([a-z ]+)`$", text, flags=re.MULTILINE)) == set(COMMANDS)


def test_version_is_told_both_ways(bare_cli: Cli):
    assert bare_cli("--version").stdout.startswith("coatcheck ")
    found = bare_cli.json("version")

    assert set(found) == {"coatcheck", "schema", "python"}
    assert found["coatcheck"] in bare_cli("version").stdout


def test_wrong_usage_exits_with_2(bare_cli: Cli):
    assert bare_cli("nonsense").exit_code == 2
    assert bare_cli("ps", "--nonsense").exit_code == 2
    assert bare_cli("ps", "--state", "waiting").exit_code == 2
    assert bare_cli("worker", "x:y", "--concurrency", "0").exit_code == 2


def test_a_bad_setting_is_wrong_usage_and_shows_no_password(bare_cli: Cli):
    result = bare_cli("ps", "--store", "mysql://me:secret@host/db")

    assert result.exit_code == 2
    assert "must be a URL that begins with postgresql://" in result.stderr
    assert "secret" not in result.output


def test_an_unknown_variable_is_a_warning_on_stderr(store_cli: Cli):
    result = Cli({**store_cli.environ, "COATCHECK_STROE": "x"})("ps", "--json")

    assert result.exit_code == 0
    assert "Warning: the variable COATCHECK_STROE has no effect; did you mean COATCHECK_STORE?" in result.stderr
    assert result.stdout == "[]\n"
