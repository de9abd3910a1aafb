"""One task as one HTML page: no script, nothing fetched from anywhere, every text escaped. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from coatcheck.cli.output import clock_time, duration
from coatcheck.cli.timeline import Bar, Look, Piece, Timeline
from coatcheck.worker.redaction import clean


@dataclass(frozen=True, slots=True)
class Section:
    """A title and texts below it, as they are."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Grid:
    """A table with its title."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    state: str
    facts: Sequence[tuple[str, str | None]]
    why: str | None
    timeline: Timeline | None
    grids: Sequence[Grid]
    sections: Sequence[Section]
    made: str


def render(page: Page) -> str:
    """The page as text."""
    state = _text(page.state)
    parts = [
        f"<header><h1>{_text(page.title)} <span class='state {state}'>{state}</span></h1></header>",
        _card("Why it stands here", f"<p class=why>{_lines(page.why)}</p>") if page.why else "",
        _card("Facts", _facts(page.facts)),
        _card("Timeline", _timeline(page.timeline)) if page.timeline is not None else "",
        *(_card(grid.title, _grid(grid)) for grid in page.grids if grid.rows),
        *(_card(each.title, f"<pre>{_text(each.text)}</pre>") for each in page.sections),
        f"<footer>{_text(page.made)}</footer>",
    ]
    return (
        HEAD.format(title=_text(page.title), style=STYLE) + "\n".join(filter(None, parts)) + "\n</main></body></html>\n"
    )


def _card(title: str, inside: str) -> str:
    return f"<section><h2>{_text(title)}</h2>\n{inside}\n</section>"


def _facts(facts: Iterable[tuple[str, str | None]]) -> str:
    rows = (f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts if value)
    return f"<dl>{''.join(rows)}</dl>"


def _grid(grid: Grid) -> str:
    head = "".join(f"<th scope=col>{_text(each)}</th>" for each in grid.heads)
    rows = "\n".join(f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>" for row in grid.rows)
    note = f"<p class=note>{_text(grid.note)}</p>" if grid.note else ""
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>{note}"


def _cell(text: str) -> str:
    return f"<span class='{_text(text)}'>{_text(text)}</span>" if text in STATES else _text(text)


# --- the timeline ---


def _timeline(timeline: Timeline) -> str:
    """A row of text and a picture for each bar. Places are shares of the width, so it fits every screen."""
    begin, end = (clock_time(at, day_of=timeline.begin) for at in (timeline.begin, timeline.end))
    ends = f"<span>{begin}</span><span>{duration(timeline.span)}</span><span>{end}</span>"
    axis = f"<div class=bar><span></span><span></span><div class=axis>{ends}</div></div>"
    bars = "\n".join(_bar(timeline, bar) for bar in timeline.bars)
    return f"{PATTERN}\n<div class=bars>{axis}\n{bars}</div>\n{LEGEND}"


def _bar(timeline: Timeline, bar: Bar) -> str:
    name = f"{bar.what} {bar.name}".strip()
    took = "" if bar.took is None else duration(bar.took)
    at = clock_time(bar.begin, day_of=timeline.begin)
    said = ", ".join(part for part in (name, f"at {at}", took, bar.state, bar.by) if part)
    drawn = "".join(_piece(timeline, bar, piece) for piece in bar.pieces)
    tail = " ".join(part for part in (_cell(bar.state), _text(bar.by)) if part)
    return (
        f"<div class=bar><span class=name>{_text(name)}</span><span class=when>{at} <b>{took or '-'}</b> {tail}</span>"
        f"<svg role=img aria-label='{_text(said)}'><title>{_text(said)}</title>"
        f"<rect class=lane x=0 y=0 width='100%' height='100%'/>{drawn}</svg></div>"
    )


def _piece(timeline: Timeline, bar: Bar, piece: Piece) -> str:
    begin, end = timeline.share(piece.begin) * 100, timeline.share(piece.end) * 100
    if piece.look is Look.MARK:
        return f"<circle class='mark {_text(bar.state)}' cx='{min(max(begin, 0.6), 99.4):.3f}%' cy='50%' r=5 />"
    width = max(end - begin, 0.0)
    begin = min(begin, 99.6)
    return f"<rect class='{piece.look.value} {_text(bar.state)}' x='{begin:.3f}%' y=3 width='{width:.3f}%' height=12 />"


def _text(value: str | None) -> str:
    """Escaped for text and for quoted attributes; control characters are spelled out."""
    return escape(clean(value or ""), quote=True)


def _lines(value: str | None) -> str:
    return _text(value).replace("\n", "<br>")


STATES = frozenset({"ok", "open", "failed", "timed_out", "closed"})
PATTERN = """<svg width=0 height=0 aria-hidden=true class=defs><defs>
<pattern id=hatch width=6 height=6 patternUnits=userSpaceOnUse patternTransform='rotate(45)'>
<rect width=6 height=6 class=hatch-back /><rect width=3 height=6 class=hatch-line /></pattern></defs></svg>"""
LEGEND = """<p class=note><span class='key runs'></span> a run works
<span class='key waits'></span> the task waits
<span class='key mark'></span> a note, a send, or a step of unknown length.
Runs and waits are as near as the rows tell: a run begins with the last reply before its first commit.</p>"""
HEAD = """<!doctype html>
<html lang=en><head><meta charset=utf-8>
<meta name=viewport content="width=device-width, initial-scale=1">
<meta name=color-scheme content="light dark">
<meta http-equiv=Content-Security-Policy content="default-src 'none'; style-src 'unsafe-inline'">
<meta name=referrer content=no-referrer>
<title>{title}</title>
<style>{style}</style></head><body><main>
"""
STYLE = """
:root{--back:#f6f7f9;--card:#fff;--ink:#1b1f24;--dim:#5b6470;--line:#dfe3e8;--lane:#eef1f4;--runs:#0b7285;
--waits:#8fa7c9;--waits-back:#dbe4f2;--ok:#2b8a3e;--bad:#c92a2a;--open:#1864ab;--warn:#a05a00}
@media (prefers-color-scheme:dark){:root{--back:#14171b;--card:#1c2026;--ink:#e6e9ed;--dim:#9aa4b0;--line:#30363e;
--lane:#262b32;--runs:#3bc9db;--waits:#5f7da8;--waits-back:#2b3646;--ok:#69db7c;--bad:#ff8787;--open:#74c0fc;
--warn:#ffc078}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:72rem;margin:0 auto;padding:1rem}
h1{font-size:1.25rem;margin:.5rem 0 1rem;overflow-wrap:anywhere}
h2{font-size:1rem;margin:0 0 .6rem}
section{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:1rem;margin:0 0 1rem}
.state{font-size:.8rem;font-weight:600;padding:.15rem .6rem;border-radius:1rem;border:1px solid currentcolor;
vertical-align:middle;white-space:nowrap;color:var(--open)}
.state.done,.ok{color:var(--ok)}.state.failed,.failed,.timed_out{color:var(--bad)}
.state.held,.state.retrying,.state.paused{color:var(--warn)}.state.cancelled,.closed{color:var(--dim)}.open{color:var(--open)}
.why{margin:0}.note,footer{color:var(--dim);font-size:.85rem;margin:.75rem 0 0}footer{margin:0 0 1rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem;margin:0}
dt{color:var(--dim)}dd{margin:0;overflow-wrap:anywhere}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.45 ui-monospace,monospace}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.87rem}
th,td{text-align:left;padding:.35rem .8rem .35rem 0;vertical-align:top;border-top:1px solid var(--line)}
th{color:var(--dim);font-weight:600;border-top:0;white-space:nowrap}
td{font-variant-numeric:tabular-nums}
td:not(:last-child){white-space:nowrap}td:last-child{overflow-wrap:anywhere;min-width:12rem}
.defs{position:absolute}
.bar{display:grid;grid-template-columns:minmax(7rem,15rem) minmax(12rem,22rem) 1fr;gap:0 .8rem;align-items:center;
font-size:.85rem;padding:.12rem 0}
.axis{display:flex;justify-content:space-between;color:var(--dim);font-variant-numeric:tabular-nums}
.name{overflow-wrap:anywhere}.when{color:var(--dim);font-variant-numeric:tabular-nums}.when b{color:var(--ink)}
svg{display:block;width:100%;height:18px;overflow:visible}.defs{width:0;height:0}
.lane{fill:var(--lane)}
rect.runs{fill:var(--runs);stroke:var(--runs);stroke-width:1.5}
rect.waits{fill:url(#hatch);stroke:var(--waits);stroke-width:1.5}
rect.failed,rect.timed_out{stroke:var(--bad)}
.hatch-back{fill:var(--waits-back)}.hatch-line{fill:var(--waits)}
.mark{fill:var(--ok)}.mark.failed{fill:var(--bad)}
.key{display:inline-block;width:1.4rem;height:.7rem;border-radius:2px;margin:0 .2rem 0 .6rem}
.key.runs{background:var(--runs);margin-left:0}
.key.waits{background:repeating-linear-gradient(135deg,var(--waits) 0 3px,var(--waits-back) 3px 6px)}
.key.mark{background:var(--ok);width:.7rem;border-radius:50%}
@media (max-width:45rem){main{padding:.6rem}section{padding:.8rem}
.bar{grid-template-columns:1fr;padding:.35rem 0}dl{grid-template-columns:1fr;gap:0}dd{margin:0 0 .4rem}}
@media print{body{background:#fff}section{break-inside:avoid}}
"""
