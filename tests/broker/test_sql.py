"""The statements of the Postgres adapter are named, described and used."""

import re
from pathlib import Path

import coatcheck.broker.postgres as package
from coatcheck.broker.postgres.sql import SQL

HERE = Path(package.__file__).parent


def test_every_statement_is_used_and_every_used_one_is_there():
    used = {name for path in HERE.glob("*.py") for name in re.findall(r'\bSQL\["(\w+)"\]', path.read_text())}

    assert used == SQL.keys()


def test_every_statement_and_every_part_of_it_is_described():
    text = (HERE / "statements.sql").read_text()

    assert not re.findall(r"^-- name: (\w+)\n(?!-- \w)", text, flags=re.MULTILINE)
    assert not re.findall(r"(?<!\n)\n(?!-- )[^\n]*\n(\w+) AS (?:MATERIALIZED )?\(", text)


def test_no_comment_is_sent():
    assert not [name for name, statement in SQL.items() if "--" in statement or statement.endswith(";")]
