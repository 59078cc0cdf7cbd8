"""Plots of simulated fleets as SVG, written by these few lines: a plotting library would be a
dependency larger than all of this for two curves."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lookonce.simulate.simulation import Outcome

WIDTH, HEIGHT = 420, 260
LEFT, RIGHT, TOP, BOTTOM = 48, 14, 30, 36
COLOURS = ("#2166ac", "#b2182b", "#1b7837", "#762a83", "#b35806", "#01665e")
POINTS = 200
LINE = 16


def write_plots(path: Path, outcomes: Mapping[str, Outcome]) -> None:
    """Two panels: the share of requests whose first token, and of answers whose tokens, take at
    most so long. Seconds are on a logarithmic scale."""
    panels = {
        "first token, s": {name: each.first_token for name, each in outcomes.items()},
        "each further token, s": {name: each.per_token for name, each in outcomes.items()},
    }
    body = "".join(
        f'<g transform="translate({WIDTH * number},0)">{_panel(title, values)}</g>'
        for number, (title, values) in enumerate(panels.items())
    )
    legend = "".join(
        f'<path d="M{LEFT},{HEIGHT + LINE * n}h18" stroke="{_colour(n)}" stroke-width="3"/>'
        + _text(LEFT + 24, HEIGHT + LINE * n + 4, name, "start")
        for n, name in enumerate(outcomes)
    )
    width, height = WIDTH * len(panels), HEIGHT + LINE * (len(outcomes) + 1)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/>{body}{legend}</svg>\n',
        encoding="utf-8",
    )


def _panel(title: str, values: Mapping[str, NDArray[np.float64]]) -> str:
    listed = [each for each in values.values() if len(each)]
    least = min((max(float(each.min()), 1e-6) for each in listed), default=1e-3)
    most = max((float(each.max()) for each in listed), default=1.0)
    low, high = np.floor(np.log10(least)), np.ceil(np.log10(max(most, least * 1.01)))
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def across(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        place: NDArray[np.float64] = (np.log10(np.maximum(seconds, least)) - low) / max(
            high - low, 1.0
        )
        return LEFT + place * (right - LEFT)

    marks = [_text(WIDTH / 2, 18, title, "middle")]
    for power in range(int(low), int(high) + 1):
        at = float(across(np.array([10.0**power]))[0]) if power > low else float(LEFT)
        marks.append(_text(at, bottom + 16, f"{10.0**power:g}", "middle"))
        marks.append(f'<path d="M{at:.1f},{TOP}V{bottom}" stroke="#ddd"/>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = bottom - share * (bottom - TOP)
        marks.append(_text(LEFT - 6, y + 4, f"{share:.0%}", "end"))
        marks.append(f'<path d="M{LEFT},{y:.1f}H{right}" stroke="#ddd"/>')
    shares = np.linspace(0.0, 1.0, POINTS)
    for number, each in enumerate(values.values()):
        if len(each):
            xs = across(np.quantile(each, shares))
            ys = bottom - shares * (bottom - TOP)
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
            marks.append(
                f'<polyline points="{points}" fill="none" stroke="{_colour(number)}" '
                'stroke-width="1.6"/>'
            )
    return "".join(marks)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
