"""`docs/operations.md` lists every setting, with its default as the code has it."""

from tests.docs.settings_table import make_table, read_table

from coatcheck.worker.settings import ENVIRONMENT


def test_the_table_of_settings_is_what_the_code_says():
    assert read_table() == make_table(), "run `python -m tests.docs.settings_table`"


def test_every_variable_is_in_the_table():
    assert [variable for variable in ENVIRONMENT if f"| `{variable}` |" not in read_table()] == []
