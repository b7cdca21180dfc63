"""`Whole`: what attention must know of a whole sequence besides its tokens, and the masks that follow from it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from deepspeed.errors import UsageError

__all__ = ["Run", "Whole", "allowed"]


@dataclass(frozen=True)
class Run:
    """Tokens [begin, end) of a row that see each other and nothing else."""

    begin: int
    end: int
    padding: bool = False
    """They are none, and nobody looks at what they see."""


@dataclass(frozen=True, eq=False)
class Whole:
    """Sequences as they are before they are shared out."""

    length: int
    documents: Tensor | None = None
    """The number of the document of each token, [batch, length]; None where a row is one document."""
    present: Tensor | None = None
    """False for padding, [batch, length]; None where there is none."""
    target: Whole | None = None
    """What a decoder makes of these, where a model has one beside its encoder."""

    @classmethod
    def of(cls, length: int, positions: Tensor | None, present: Tensor | None) -> Whole:
        """Look for padding, and for the documents of packed rows, which begin where positions do not go on.

        Positions of padding may be anything and say nothing about documents.
        """
        if present is not None and bool(present.all()):
            present = None
        documents = None
        if positions is not None:
            if positions.dim() != 2:
                raise UsageError(
                    f"position ids of shape {tuple(positions.shape)} were found, expected [batch, length]: positions "
                    "in several dimensions cannot be shared out over sequence-parallel ranks yet."
                )
            begins = positions[:, 1:] != positions[:, :-1] + 1
            if present is not None:
                begins = begins & present[:, 1:] & present[:, :-1]
            if bool(begins.any()):
                documents = torch.nn.functional.pad(begins.long().cumsum(1), (1, 0))
        return cls(length, documents, present)

    @property
    def plain(self) -> bool:
        """True if every token of a row belongs to one document without padding."""
        return self.documents is None and self.present is None

    @cached_property
    def runs(self) -> list[list[Run]] | None:
        """Each row as runs of tokens that see only each other; None where padding lies between tokens.

        Looked up once for all layers, because the host waits for the device to know it.
        """
        keys = [key for key in (self.documents, self.present) if key is not None]
        if not keys:
            return None
        rows: list[list[Run]] = []
        for row in range(keys[0].shape[0]):
            present = self.present[row] if self.present is not None else None
            if present is not None and int((present[1:] != present[:-1]).sum()) > 1 + int(not present[0]):
                return None
            changes = torch.stack([key[row, 1:] != key[row, :-1] for key in keys]).any(0)
            borders = [0, *(changes.nonzero().flatten() + 1).tolist(), self.length]
            empty = [False] * self.length if present is None else (~present).tolist()
            rows.append([Run(begin, end, empty[begin]) for begin, end in itertools.pairwise(borders)])
        return rows


def allowed(whole: Whole, queries: Tensor, keys: Tensor, *, causal: bool, window: int | None) -> Tensor:
    """Which queries see which keys, [batch or 1, 1, queries, keys]; both are indices into the whole sequence."""
    ahead, behind = queries[:, None], keys[None, :]
    seen = ahead >= behind if causal else torch.ones_like(ahead >= behind)
    if window is not None:
        seen = seen & (ahead - behind < window)
    seen = seen[None]
    if whole.documents is not None:
        seen = seen & (whole.documents[:, queries, None] == whole.documents[:, None, keys])
    if whole.present is not None:
        seen = seen & whole.present[:, None, keys]
    return seen[:, None]
