"""Which tokens of a sequence each rank holds: arithmetic without process groups.

With ring attention a rank has two pieces, one from the front and its mirror image from the back ("zig-zag"): under a
causal mask early tokens look at little and late ones at much, so that every rank has the same work in every round.
The ranks of a Ulysses group cut what one ring position holds into parts side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed.errors import UsageError

__all__ = ["TokenOrder"]


@dataclass(frozen=True)
class TokenOrder:
    """`ulysses` × `ring` ranks share a sequence; rank = ring position × ulysses + place among its neighbours."""

    ulysses: int
    ring: int

    @property
    def size(self) -> int:
        """Ranks that share a sequence."""
        return self.ulysses * self.ring

    @property
    def multiple(self) -> int:
        """What the length of a sequence must be a multiple of."""
        return self.size if self.ring == 1 else 2 * self.size

    def check(self, length: int) -> None:
        """Raise if a sequence of this length cannot be shared out."""
        if length % self.multiple or length == 0:
            pieces = "" if self.ring == 1 else ", in two pieces each for ring attention"
            raise UsageError(
                f"a sequence of {length} tokens cannot be shared out over {self.size} sequence-parallel ranks{pieces}: "
                f"the length must be a multiple of {self.multiple}. Pad it, for example with pad_to_multiple_of="
                f"{self.multiple} in the collator."
            )

    def on_ring(self, length: int, position: int) -> Tensor:
        """The indices of the tokens at a position of the ring, in rising order."""
        if self.ring == 1:
            return torch.arange(length)
        piece = length // (2 * self.ring)
        front, back = position * piece, (2 * self.ring - 1 - position) * piece
        return torch.cat([torch.arange(front, front + piece), torch.arange(back, back + piece)])

    def of_rank(self, length: int, rank: int) -> Tensor:
        """The indices of the tokens that a rank holds."""
        self.check(length)
        position, place = divmod(rank, self.ulysses)
        return self.on_ring(length, position).chunk(self.ulysses)[place]
