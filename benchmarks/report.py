"""What every benchmark prints and writes: tables, the same figures as JSON, SVG plots."""

from __future__ import annotations

import html
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

Cell = str | float | int | None
WIDE = Console(width=240).options
"""Lines longer than any table's."""


@dataclass(slots=True)
class Report:
    """Rows of figures under named columns. `notes` say in words what was compared."""

    name: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: Cell) -> None:
        """Raises `ValueError` when the row does not fit the columns."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(cells)

    def print_last(self) -> None:
        """The newest row in a line, for who waits for the table."""
        cells = zip(self.columns, self.rows[-1], strict=True)
        print("; ".join(f"{column} {_text(cell)}" for column, cell in cells), flush=True)

    def show(self) -> None:
        console = Console()
        table = self._table()
        if Measurement.get(console, WIDE, table).maximum > console.width:
            table = self._table(stacked=True)
            least = Measurement.get(console, WIDE, table).maximum
            console.width = max(console.width, least)  # rather than cut a word or wrap a row
        console.print(table)
        for note in (*self.notes, machine()):
            console.print(note, style="dim")

    def _table(self, *, stacked: bool = False) -> Table:
        """`stacked`: each word of a column's name has a line of its own."""
        table = Table(title=f"lookonce bench {self.name}", title_justify="left")
        for column in self.columns:
            first = column is self.columns[0]
            named = column.replace(" ", "\n") if stacked and not first else column
            table.add_column(named, justify="left" if first else "right")
        for row in self.rows:
            table.add_row(*map(_text, row))
        return table

    def figures(self) -> dict[str, object]:
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"bench": self.name, "machine": machine(), "rows": rows, "notes": self.notes}


def publish(reports: Sequence[Report], path: Path | None) -> None:
    """Print the tables; write them to `path`, where given: one as an object, several as a list."""
    for report in reports:
        report.show()
    write_json(path, reports)


def write_json(path: Path | None, reports: Sequence[Report]) -> None:
    """Write the tables to `path`, where given: one as an object, several as a list."""
    if path is not None:
        figures = [report.figures() for report in reports]
        path.write_text(json.dumps(figures if len(figures) > 1 else figures[0], indent=1) + "\n")


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.3g}" if abs(cell) < 100 else f"{cell:,.0f}"
    return str(cell)


def machine() -> str:
    """The machine that the figures come from, in one line."""
    return f"{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}"


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile. Raises `ValueError` for no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    rank = max(0, min(len(ordered) - 1, round(percent / 100 * len(ordered) + 0.5) - 1))
    return ordered[rank]


# --- Plots ---------------------------------------------------------------------------------------

WIDTH, HEIGHT = 380, 240
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 30, 34
LEGEND = 28
COLOURS = ("#2166ac", "#b2182b", "#1b7837", "#762a83", "#b35806", "#01665e")
TICKS = 4


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of axes. `values`: name of each line → its values in `unit`."""

    title: str
    unit: str
    values: Mapping[str, Sequence[float]]


def write_shares(path: Path, panels: Sequence[Panel]) -> None:
    """Plot for each line the share of values below x (an empirical distribution function) as SVG.

    Panels stand side by side over one legend; a name has the same colour in all panels.
    """
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
    marks = [_svg_text(WIDTH / 2, 18, f"{panel.title} ({panel.unit})", "middle")]
    for tick in range(TICKS + 1):
        share = tick / TICKS
        x, y = LEFT + share * (right - LEFT), bottom - share * (bottom - TOP)
        marks.append(_svg_text(x, bottom + 16, f"{share * top:.3g}", "middle"))
        marks.append(_svg_text(LEFT - 6, y + 4, f"{share:.0%}", "end"))
        marks.append(f'<path d="M{LEFT},{y:.1f}H{right}" stroke="#ddd"/>')
    for name, values in panel.values.items():
        marks.append(
            f'<path d="{_steps(sorted(values), top)}" fill="none" stroke="{colours[name]}" '
            f'stroke-width="1.6"/>'
        )
    return "".join(marks)


def _steps(ordered: Sequence[float], top: float) -> str:
    """The SVG path of one line: it rises by 1 / len(ordered) at each value."""
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
        marks.append(_svg_text(x + 24, y + 4, name, "start"))
        x += 44 + 7 * len(name)
    return "".join(marks)


def _svg_text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
