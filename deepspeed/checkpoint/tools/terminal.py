"""What the tools show: text out of files as it is, without a character that a terminal or a markup would obey."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from deepspeed.printable import printable

__all__ = ["bar", "shown", "tell"]


_EVERY = 10.0  # seconds between lines about progress in a file


def shown(value: object, style: str = "") -> Text:
    """A text for a table or a line; on one line."""
    return Text(printable(value).replace("\n", "\\n"), style)


def tell(value: object, *, style: str = "", stderr: bool = False) -> None:
    """Print a line."""
    Console(stderr=stderr, soft_wrap=True).print(shown(value, style), highlight=False)


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a function (done, of how many) that moves a bar on standard error, or writes lines where that is a file."""
    console = Console(stderr=True)
    last = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)

        def move(done: int, total: int) -> None:
            nonlocal last
            progress.update(task, completed=done, total=total)
            if not console.is_terminal and time.monotonic() >= last + _EVERY:
                last = time.monotonic()
                tell(f"{what}: {done} of {total}", stderr=True)

        yield move
