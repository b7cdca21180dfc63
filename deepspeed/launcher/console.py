"""How the programs that print tables write to stdout: for a terminal, for a file, for a reader that has had enough."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable

from rich import box
from rich.console import Console
from rich.table import Table

_PIPED_WIDTH = 160

Draw = Callable[[Console], None]


def emit(what: str | Draw) -> None:
    """Write to stdout: text, or what is drawn on a console."""
    try:
        sys.stdout.write(what if isinstance(what, str) else _text(what))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _text(draw: Draw) -> str:
    """What is drawn, for where stdout goes: coloured and fitted on a terminal, plain and wide elsewhere."""
    real = Console()
    encoding = sys.stdout.encoding or "utf-8"
    # The file has stdout's encoding, so that lines are drawn in ASCII and strange letters become ? in a C locale.
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
    if real.is_terminal:
        console = Console(file=out, force_terminal=True, width=real.width, markup=False)
    else:
        console = Console(file=out, force_terminal=False, width=_PIPED_WIDTH, color_system=None, markup=False)
    draw(console)
    out.seek(0)
    lines = out.read().splitlines()
    return "".join((line if real.is_terminal else line.rstrip()) + "\n" for line in lines)


def plain_table(*columns: str) -> Table:
    """A table of words with a line under its head, and none around it."""
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=False, safe_box=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
