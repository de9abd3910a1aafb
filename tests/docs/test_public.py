"""Whatever is public is documented: every name that can be imported, every method of what users hold in their hands."""

import re

import pytest
from tests.docs.pages import PAGES

import coatcheck.testing
import coatcheck.worker
from coatcheck.worker import App, Client, Context, Ticket

TEXT = "\n".join(page.read_text() for page in PAGES)
HELD = {"ctx": Context, "client": Client, "ticket": Ticket, "app": App}
# Parts that only our own command line and test kit need.
INNER = {"app.find_handler", "app.explain_unknown", "app.handlers", "app.load_settings", "app.names"} | {
    *("client.store", "client.broker", "client.find", "client.lines", "ticket.service", "ticket.correlation_id"),
}


@pytest.mark.parametrize("name", [*coatcheck.worker.__all__, *coatcheck.testing.__all__])
def test_every_public_name_is_in_the_docs(name: str):
    assert re.search(rf"\b{name}\b", TEXT)


@pytest.mark.parametrize(
    "written",
    [f"{held}.{name}" for held, kind in HELD.items() for name in dir(kind) if not name.startswith("_")],
)
def test_every_method_is_in_the_docs(written: str):
    if written not in INNER:
        assert re.search(rf"\b{re.escape(written)}\b", TEXT), f"no page shows `{written}`"
