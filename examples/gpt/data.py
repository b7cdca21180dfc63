"""The source text of Python's standard library as tokens, cut into windows for training and validation."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

VOCABULARY = 256
"""A token is a byte, but the four spaces of an indentation are one token, the tab."""

_INDENTATION = b"    "

_HELD_OUT = 10  # every so manieth file is for validation


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of `context` tokens, each with the same piece one token later: what the model is to predict."""

    def __init__(self, text: Tensor, context: int) -> None:
        if len(text) <= context:
            raise ValueError(f"the text has {len(text)} tokens; one window needs more than the context of {context}")
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        piece = self.text[index * self.context :][: self.context + 1].long()
        return piece[:-1], piece[1:]


def encode(text: bytes) -> Tensor:
    """The tokens of a text."""
    folded = text.replace(b"\t", _INDENTATION).replace(_INDENTATION, b"\t")
    return torch.frombuffer(bytearray(folded), dtype=torch.uint8)


def decode(tokens: Tensor) -> str:
    """The text of tokens, in ASCII: a byte that is none of it is shown by its code."""
    return bytes(tokens.tolist()).replace(b"\t", _INDENTATION).decode("ascii", errors="backslashreplace")


def source_files(folder: Path | None = None) -> list[Path]:
    """The modules of the standard library, in the same order on every rank."""
    folder = Path(os.__file__).parent if folder is None else folder
    # The build's own settings, which one module lists, are no source text.
    files = [file for file in folder.glob("*.py") if not file.name.startswith("_sysconfigdata")]
    if len(files) < _HELD_OUT:
        raise FileNotFoundError(
            f"{folder} has {len(files)} Python files, {_HELD_OUT} are needed; this Python seems to come without its "
            "source text"
        )
    return sorted(files, key=lambda file: file.name)


def read(files: list[Path]) -> tuple[Tensor, Tensor]:
    """Training text and validation text; no file is in both."""
    held_out = set(files[_HELD_OUT - 1 :: _HELD_OUT])
    return _joined([file for file in files if file not in held_out]), _joined(sorted(held_out))


def spread(windows: Windows, count: int) -> Subset[tuple[Tensor, Tensor]]:
    """At most `count` of the windows, evenly spread over the text."""
    count = min(count, len(windows))
    return Subset(windows, [index * len(windows) // count for index in range(count)])


def _joined(files: list[Path]) -> Tensor:
    return encode(b"\n\n".join(file.read_bytes() for file in files))
