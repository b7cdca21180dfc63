"""`Fingerprint`: sums over the bits of a tensor that tell whether, and where, it was changed.

[Note: sums of rows and columns] The bits of a tensor are read as integers and laid out as a matrix. The sums of its
rows and columns are kept. A change of one element changes one row and one column by the same amount: so the place and
the former value of the element are known without a copy of the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed.verify.findings import WORDS, Finding, bits, place_of

_COLUMNS = 4096


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor in the widest integers that fit its place in memory."""
    flat = bits(tensor)
    size, at = flat.element_size(), int(flat.storage_offset())
    for wide in (8, 4, 2):
        ratio = wide // size
        if ratio > 1 and at % ratio == 0 and flat.numel() % ratio == 0 and flat.data_ptr() % wide == 0:
            return flat.view(WORDS[wide])
    return flat


@dataclass(frozen=True)
class Fingerprint:
    """See [Note: sums of rows and columns]."""

    rows: Tensor
    columns: Tensor
    rest: Tensor
    """What fills no row, as it was."""

    @classmethod
    def of(cls, tensor: Tensor) -> Fingerprint:
        """That of a tensor as it is now."""
        words = _words(tensor)
        whole = words.numel() // _COLUMNS * _COLUMNS
        matrix = words[:whole].view(-1, _COLUMNS)
        rest = words[whole:].clone()
        return cls(matrix.sum(1, dtype=torch.int64), matrix.sum(0, dtype=torch.int64), rest)

    def same(self, other: Fingerprint) -> bool:
        """True if the tensors had equal bits."""
        return torch.equal(self.rows, other.rows) and torch.equal(self.rest, other.rest)

    def find(self, tensor: Tensor, name: str, rank: int, shape: tuple[int, ...], offset: int) -> Finding:
        """What changed in a tensor that had this fingerprint; it begins at `offset` of one of that shape."""
        now, words = Fingerprint.of(tensor), _words(tensor)
        changed = (now.rest != self.rest).nonzero().view(-1)
        rows = (now.rows != self.rows).nonzero().view(-1)
        source = "the last time it was written"
        if len(changed):
            at = int(changed[0])
            before, word = self.rest[at], words.numel() - self.rest.numel() + at
        elif len(rows) == 1 and int((now.columns != self.columns).sum()) == 1:
            column = int((now.columns != self.columns).nonzero()[0])
            word = int(rows[0]) * _COLUMNS + column
            before = words[word] - (now.rows[rows[0]] - self.rows[rows[0]]).to(words.dtype)
        else:
            places = len(rows) * _COLUMNS * words.element_size() // tensor.element_size()
            return Finding(rank, name, "changed in several elements", "as it was", source, None, places)
        old = before.reshape(1).view(tensor.dtype)
        new = words[word : word + 1].clone().view(tensor.dtype)
        inside = int((bits(old) != bits(new)).to(torch.uint8).argmax())
        index = word * len(old) + inside
        return Finding(rank, name, new[inside].item(), old[inside].item(), source, place_of(offset + index, shape))


def sum_of_bits(tensor: Tensor) -> Tensor:
    """The sum of the bits of a tensor, read as integers: any change of one element changes it."""
    return bits(tensor).sum(dtype=torch.int64)
