"""Bars side by side as an SVG file, which needs nothing but this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Panel", "draw"]

COLOURS = ("#4878a8", "#e49444", "#6a9f58", "#d1605e", "#85b6b2", "#a87c9f", "#bbb0ac")
_WIDTH, _ROW, _HEAD, _GAP, _LETTER = 300, 26, 34, 70, 7


@dataclass(frozen=True)
class Panel:
    """A title, and for each row the parts that its bar is made of."""

    title: str
    parts: Sequence[Mapping[str, float]]
    digits: int = 0


def draw(rows: Sequence[str], panels: Sequence[Panel]) -> str:
    """The text of the picture: a row for each name, a column for each panel."""
    left = 20 + _LETTER * max((len(name) for name in rows), default=0)
    kinds = list(dict.fromkeys(kind for panel in panels for bar in panel.parts if len(bar) > 1 for kind in bar))
    colours = {kind: COLOURS[place % len(COLOURS)] for place, kind in enumerate(kinds)}
    height = _HEAD + _ROW * len(rows) + 30
    width = left + len(panels) * (_WIDTH + _GAP)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *(_text(10, _HEAD + _ROW * place + 16, name) for place, name in enumerate(rows)),
    ]
    for place, panel in enumerate(panels):
        drawn += _panel(panel, left + place * (_WIDTH + _GAP), colours)
    for place, kind in enumerate(kinds):
        x = 10 + place * 130
        drawn += [_bar(x, height - 20, 12, 12, colours[kind]), _text(x + 16, height - 10, kind)]
    return "\n".join([*drawn, "</svg>", ""])


def _panel(panel: Panel, x: float, colours: Mapping[str, str]) -> list[str]:
    longest = max((sum(bar.values()) for bar in panel.parts), default=0.0) or 1.0
    drawn = [_text(x, 20, panel.title)]
    for place, bar in enumerate(panel.parts):
        at, y = x, _HEAD + _ROW * place
        for kind, value in bar.items():
            size = _WIDTH * value / longest
            drawn.append(_bar(at, y + 3, size, _ROW - 8, colours.get(kind, COLOURS[0])))
            at += size
        if bar:
            drawn.append(_text(at + 4, y + 16, f"{sum(bar.values()):,.{panel.digits}f}"))
    return drawn


def _bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{colour}"/>'


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
