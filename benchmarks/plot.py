"""Small SVG plots without a plotting library: what share of values lies below x, one line each."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

WIDTH, HEIGHT = 380, 240
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 30, 34
LEGEND = 28
COLOURS = ("#2166ac", "#b2182b", "#1b7837", "#762a83", "#b35806", "#01665e")
TICKS = 4


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of axes: name of each line → its values, in `unit`."""

    title: str
    unit: str
    values: Mapping[str, Sequence[float]]


def write_shares(path: Path, panels: Sequence[Panel]) -> None:
    """Panels side by side, a legend below; lines of one name have one colour in all panels."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.values))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    width, height = WIDTH * len(panels), HEIGHT + LEGEND
    body = [
        f'<g transform="translate({WIDTH * index},0)">{_panel(panel, colours)}</g>'
        for index, panel in enumerate(panels)
    ]
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/>'
        f"{''.join(body)}{_legend(colours)}</svg>\n",
        encoding="utf-8",
    )


def _panel(panel: Panel, colours: Mapping[str, str]) -> str:
    top = max((max(values) for values in panel.values.values() if values), default=1.0) or 1.0
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    marks = [_text(WIDTH / 2, 18, f"{panel.title} ({panel.unit})", "middle")]
    for tick in range(TICKS + 1):
        share = tick / TICKS
        x, y = LEFT + share * (right - LEFT), bottom - share * (bottom - TOP)
        marks.append(_text(x, bottom + 16, f"{share * top:.3g}", "middle"))
        marks.append(_text(LEFT - 6, y + 4, f"{share:.0%}", "end"))
        marks.append(f'<path d="M{LEFT},{y:.1f}H{right}" stroke="#ddd"/>')
    for name, values in panel.values.items():
        marks.append(
            f'<path d="{_steps(sorted(values), top)}" fill="none" stroke="{colours[name]}" '
            f'stroke-width="1.6"/>'
        )
    return "".join(marks)


def _steps(ordered: Sequence[float], top: float) -> str:
    """The line climbs by one share at each value."""
    width, height = WIDTH - RIGHT - LEFT, HEIGHT - BOTTOM - TOP
    commands = [f"M{LEFT},{TOP + height}"]
    for rank, value in enumerate(ordered, 1):
        y = TOP + height * (1 - rank / len(ordered))
        commands.append(f"H{LEFT + width * value / top:.1f}V{y:.1f}")
    return "".join(commands)


def _legend(colours: Mapping[str, str]) -> str:
    marks, x, y = [], LEFT, HEIGHT + 8
    for name, colour in colours.items():
        marks.append(f'<path d="M{x},{y}h18" stroke="{colour}" stroke-width="3"/>')
        marks.append(_text(x + 24, y + 4, name, "start"))
        x += 44 + 7 * len(name)
    return "".join(marks)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
