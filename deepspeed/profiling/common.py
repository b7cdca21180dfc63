"""What profiles share: where a report goes, the other stages of a pipeline, modes that watch from call to call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from deepspeed.log import logger


def write_report(text: str, output_file: str) -> None:
    """Write a file, in a folder that is made if it has to be."""
    target = Path(output_file)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


def to_file_or_output(key: str, output_file: str | None, show: Callable[[str | None], None]) -> None:
    """show(file), or show(None) where there is none or it cannot be written: a job does not end for its report."""
    try:
        show(output_file)
    except OSError as error:
        if output_file is None:
            raise
        logger.warning("%s: %r cannot be written (%s); the report goes to standard output", key, output_file, error)
        show(None)


@dataclass(frozen=True)
class StageGroup:
    """One rank of each stage: those that profile, of which the first prints."""

    name: str
    """This rank and its stages, as a heading."""
    prints: bool
    passes: int
    """Forwards in which a micro-batch passes through this rank: it may hold several stages."""
    gather: Callable[[Any], list[Any]]
    """What all of them say, in the order of the stages; called by all of them together."""
    counted_elsewhere: Callable[[], int]
    """How many of this rank's parameters a stage before it has, too."""


def leave(mode: TorchDispatchMode) -> None:
    """Leave a mode that was entered by this thread, also one that others were entered in; those go on."""
    stack = _get_current_dispatch_mode_stack()
    if mode not in stack:
        return
    inner = stack[stack.index(mode) + 1 :]
    # torch takes the innermost mode off, whichever is asked to exit; what else a mode does at its end is not meant
    for other in reversed(inner):
        TorchDispatchMode.__exit__(other, None, None, None)
    TorchDispatchMode.__exit__(mode, None, None, None)
    for other in inner:
        TorchDispatchMode.__enter__(other)


def tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among what an operation of torch takes or gives: in a row, or in lists of it."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(value)
