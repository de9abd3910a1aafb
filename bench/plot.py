"""SVG without a library: the document and the parts of the plots in this folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

from bench.spread import Spread

COLOURS = ("#1f6f8b", "#c4622d", "#5b8c3a", "#8a4f9e", "#b0903a", "#7a7a7a")
WIDTH, LEFT, BAR, TOP = 620, 110, 24, 40


def document(parts: Iterable[str], *, width: int, height: int) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def label(x: float, y: float, words: str, *, anchor: str = "start", colour: str = "black") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'


def bars(figures: Sequence[tuple[str, Spread]], *, top: float, title: str) -> list[str]:
    """A bar for each figure, as long as its median, with a line from its lowest to its highest."""
    highest = max((figure.high for _, figure in figures), default=0.0) or 1.0
    drawn = [label(0, top, title)]
    for index, (name, figure) in enumerate(figures):
        y = top + 12 + index * BAR
        low, middle, high = (LEFT + each / highest * WIDTH for each in (figure.low, figure.median, figure.high))
        drawn += [
            label(LEFT - 6, y + 13, name, anchor="end"),
            _block(name, LEFT, y, width=middle - LEFT, colour=COLOURS[0]),
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y + 9}" y2="{y + 9}" stroke="black"/>',
            label(high + 6, y + 13, f"{figure.median:,.4g}"),
        ]
    return drawn


def stacks(figures: Sequence[tuple[str, dict[str, float]]], *, top: float, title: str) -> list[str]:
    """A bar for each row, made of its parts, with the colours explained above."""
    highest = max((sum(parts.values()) for _, parts in figures), default=0.0) or 1.0
    colours = dict(zip(dict.fromkeys(part for _, parts in figures for part in parts), COLOURS, strict=False))
    drawn = [label(0, top, title)]
    drawn += [label(LEFT + index * 90, top + 18, part, colour=colours[part]) for index, part in enumerate(colours)]
    for index, (name, parts) in enumerate(figures):
        x, y = float(LEFT), top + 28 + index * BAR
        drawn.append(label(LEFT - 6, y + 13, name, anchor="end"))
        for part, value in parts.items():
            width = value / highest * WIDTH
            drawn.append(_block(f"{name} {part}", x, y, width=width, colour=colours[part]))
            x += width
        drawn.append(label(x + 6, y + 13, f"{sum(parts.values()):,.3g}"))
    return drawn


def _block(name: str, x: float, y: float, *, width: float, colour: str) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR - 6}"'
    return f'<rect data-name="{escape(name)}" {where} fill="{colour}"/>'


def height_of(row_count: int) -> int:
    """How much room a chart of so many rows takes, its title included."""
    return TOP + 28 + row_count * BAR
