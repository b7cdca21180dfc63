"""A plan as a table: for people at a terminal, and as plain text for logs."""

from __future__ import annotations

import sys
from typing import TextIO

from deepspeed.config.memory import size_text
from deepspeed.memory.budget import Plan

__all__ = ["plan_lines", "show"]

_HEAD = ("tier", "states", "elements", "bytes", "of the budget")
_LEFT = 2  # columns of words


def plan_lines(plan: Plan) -> list[str]:
    """The table as text with columns side by side."""
    table = [_HEAD, *_cells(plan)]
    widths = [max(len(row[column]) for row in table) for column in range(len(_HEAD))]
    return [
        "  ".join(
            cell.ljust(width) if column < _LEFT else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def show(plan: Plan, file: TextIO | None = None, *, title: str = "Where the model states of a rank live") -> None:
    """Print the table to standard output or to `file`; in colours only where that is a terminal."""
    out = sys.stdout if file is None else file
    if not out.isatty():
        out.write("\n".join([title, *plan_lines(plan)]) + "\n")
        return
    from rich.console import Console  # slow to import, and of no use without a terminal
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for column, name in enumerate(_HEAD):
        table.add_column(name, justify="left" if column < _LEFT else "right", no_wrap=True)
    last = None
    for row in _cells(plan):
        if last is not None and row[0] != last:
            table.add_section()
        last = row[0]
        table.add_row(*row)
    Console(file=out).print(table)


def _cells(plan: Plan) -> list[tuple[str, ...]]:
    """A row of text for each kind in each tier, and one for the whole of every tier that has a limit."""
    rows: list[tuple[str, ...]] = []
    for budget in plan.budgets:
        held = [row for row in plan.rows if row.tier == budget.tier]
        for row in held:
            share = "no limit" if row.share is None else f"{row.share:.1%}"
            rows.append((row.tier, row.kind, f"{row.elements:,}" if row.elements else "", size_text(row.nbytes), share))
        if budget.limit is not None:
            nbytes = sum(row.nbytes for row in held)
            share = f"{nbytes / budget.limit:.1%} of {size_text(budget.limit)}" if budget.limit else "0 B"
            rows.append((budget.tier, "all", "", size_text(nbytes), share))
    return rows
