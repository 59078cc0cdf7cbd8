"""What every benchmark prints and writes: a table for people, the same figures as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

Cell = str | float | int | None


@dataclass(slots=True)
class Report:
    """Rows of figures under named columns. `notes` say what was compared, in words."""

    name: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: Cell) -> None:
        """Raises `ValueError` when the row does not fit the columns."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(cells)

    def show(self) -> None:
        table = Table(title=f"lookonce bench {self.name}", title_justify="left")
        for column in self.columns:
            table.add_column(column, justify="left" if column is self.columns[0] else "right")
        for row in self.rows:
            table.add_row(*map(_text, row))
        console = Console()
        console.print(table)
        for note in (*self.notes, machine()):
            console.print(note, style="dim")

    def write_json(self, path: Path) -> None:
        path.write_text(json.dumps(self.figures(), indent=1) + "\n")

    def figures(self) -> dict[str, object]:
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"bench": self.name, "machine": machine(), "rows": rows, "notes": self.notes}


def write_json(path: Path, reports: Sequence[Report]) -> None:
    """Several tables of one benchmark in one file: a list."""
    path.write_text(json.dumps([report.figures() for report in reports], indent=1) + "\n")


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.3g}" if abs(cell) < 100 else f"{cell:,.0f}"
    return str(cell)


def machine() -> str:
    """One line about where the figures come from."""
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
