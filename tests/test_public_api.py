"""What users, peers and operators rely on is as recorded in `tests/public_api.txt`."""

import re
import types
from collections.abc import Callable

import pytest
from tests.public_api import MODULES, RECORD, _annotation_text, describe

from coatcheck.store import Task
from coatcheck.worker import Retry
from coatcheck.worker.settings import LogLevel


def test_public_api_is_as_recorded():
    assert describe().splitlines() == RECORD.read_text().splitlines(), "is it meant? `python -m tests.public_api`"


def test_record_names_no_internal_module():
    named = re.findall(r"(?<!')\bcoatcheck\.[\w.]+", RECORD.read_text())

    assert tuple(named) == MODULES


@pytest.mark.parametrize(
    ("annotation", "written"),
    [
        ("Retry | None", "Retry | None"),
        ("somewhere.Retry", "Retry"),
        (Retry, "Retry"),
        ("LogLevel", "…"),
        (LogLevel, "…"),
        ("list[Other]", "list[…]"),
        ("coatcheck.worker.retry.Retry", "Retry"),
        ("coatcheck.worker.settings.LogLevel", "…"),
        ("Annotated[int, LogLevel(3)]", "int"),
        ("Alias", "Callable[[Task], …]"),
    ],
)
def test_annotation_is_written_with_public_names_alone(annotation: object, written: str):
    home = types.SimpleNamespace(Retry=Retry, LogLevel=LogLevel, Alias=Callable[[Task], LogLevel])

    assert _annotation_text(annotation, vars(home)) == written
