"""A task's history as one file that proves itself: JSON lines, or a page that shows them and holds them.

The first line says whose it is, then there is a line for each entry, and the last line has seal, leaf, proof and key.
"""

from __future__ import annotations

import base64
import json
from html import escape
from importlib.resources import files
from typing import Any

from coatcheck.cli.output import read_blob
from coatcheck.store.chain import HistoryEntry, to_microseconds
from coatcheck.store.seals import PublicKey, document_of
from coatcheck.worker.auditing import Sealed
from coatcheck.worker.redaction import clean

FORMAT = "coatcheck.audit.1"
LONGEST_VALUE = 4000
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; vertical-align: top; padding: .3rem .6rem;
border-bottom: 1px solid #ddd } code, td.v { font: 12px/1.4 ui-monospace, monospace; overflow-wrap: anywhere }
pre { overflow: auto; background: #f6f6f6; padding: 1rem; font-size: 12px } .no { color: #a00 }
"""


def make_lines(sealed: Sealed, key: PublicKey | None) -> str:
    """The export as JSON lines. `key` is the public key that signed; None: it is not known here."""
    head = {
        "format": FORMAT,
        "task_id": str(sealed.task_id),
        "entry_count": len(sealed.entries),
        "previous": sealed.previous.hex(),
    }
    leaf, proof = sealed.leaf, sealed.proof
    end = {
        "seal": None if sealed.seal is None else document_of(sealed.seal),
        "leaf": None if leaf is None else {"entry_count": leaf.entry_count, "head": leaf.head.hex()},
        "proof": None
        if proof is None
        else {"place": proof.place, "size": proof.size, "path": [each.hex() for each in proof.path]},
        "public_key": None if key is None else str(key),
    }
    documents = [head, *(_document(entry) for entry in sealed.entries), end]
    return "".join(f"{json.dumps(document, separators=(',', ':'))}\n" for document in documents)


def _document(entry: HistoryEntry) -> dict[str, Any]:
    return {
        "number": entry.number,
        "kind": entry.kind,
        "at": entry.at.isoformat(),
        "at_us": to_microseconds(entry.at),
        "replica": entry.replica,
        "epoch": entry.epoch,
        "actor": entry.actor,
        "key": entry.key,
        "data": None if entry.data is None else base64.b64encode(entry.data).decode(),
        "digest": entry.digest.hex(),
        "hash": entry.hash.hex(),
    }


def make_html(sealed: Sealed, lines: str) -> str:
    """A page without scripts or links: the entries to read, and the lines to verify. All that it shows is escaped."""
    titles = ("#", "time", "kind", "actor", "key", "replica", "data")
    head = "".join(f"<th>{title}</th>" for title in titles)
    rows = "".join(_row(entry) for entry in sealed.entries)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>History of {sealed.task_id}</title><style>{_STYLE}</style></head><body>"
        f"<h1>History of task <code>{sealed.task_id}</code></h1>{_seal_text(sealed)}"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        "<h2>Proof</h2><p>This page proves nothing by its looks. The lines below do: "
        "<code>python audit_verify.py THIS_FILE PUBLIC_KEY</code></p>"
        f'<details><summary>JSON lines</summary><pre id="coatcheck-audit">{escape(lines)}</pre></details>'
        "</body></html>\n"
    )


def _row(entry: HistoryEntry) -> str:
    shown = "" if entry.data is None else read_blob(entry.data).as_text(LONGEST_VALUE)
    texts = (str(entry.number), entry.at.isoformat(), entry.kind, entry.actor, entry.key, entry.replica)
    cells = "".join(f"<td>{escape(clean(text or ''))}</td>" for text in texts)
    return f'<tr>{cells}<td class="v">{escape(clean(shown))}</td></tr>'


def _seal_text(sealed: Sealed) -> str:
    if sealed.seal is None or sealed.leaf is None:
        return '<p class="no">No seal has this history yet: it proves nothing against who can write the database.</p>'
    later = len([entry for entry in sealed.entries if entry.number > sealed.leaf.entry_count])
    since = f' <span class="no">{later} came after it.</span>' if later else ""
    return (
        f"<p>Seal {sealed.seal.number} of {sealed.seal.sealed_at.isoformat()}, made with the key "
        f"<code>{escape(sealed.seal.key_id)}</code>, has entries up to {sealed.leaf.entry_count}.{since}</p>"
    )


def verifier_text() -> str:
    """The program that checks an export, for those who have no Coatcheck."""
    return (files("coatcheck.cli") / "data" / "audit_verify.py.tmpl").read_text(encoding="utf-8")
