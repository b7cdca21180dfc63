"""`snip_momentum`: which blocks of a weight go at which step, by how much the loss depends on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed.compression.utils import TopKBinarizer
from deepspeed.errors import UsageError

__all__ = ["MOMENTUM", "BlockRemoval"]

MOMENTUM = 0.9
"""What is left of a score after a step, to which that step's adds."""
_MEMORY = 64
"""Steps after which a score is forgotten: 0.9^64 is 0.1 %."""


@dataclass(frozen=True, slots=True)
class BlockRemoval:
    """Blocks `[rows, columns]` of a weight that go from the step `first` to the step `last`, every `stride` steps."""

    ratio: float
    """The share that stays in the end."""
    block: tuple[int, int]
    first: int
    last: int
    stride: int = 1

    def share(self, step: int) -> float:
        """The share that stays at a step: it falls fast at first, when there is much that does not matter."""
        if step >= self.last:
            return self.ratio
        left = 1 - (step - self.first) / (self.last - self.first)
        return self.ratio + (1 - self.ratio) * left**3

    def removes(self, step: int) -> bool:
        """Whether blocks go at a step."""
        return step == self.last or (self.first < step < self.last and (step - self.first) % self.stride == 0)

    def watches(self, step: int) -> bool:
        """Whether the gradients of a step matter to what goes later."""
        return self.first - _MEMORY <= step < self.last

    def counts(self, shape: tuple[int, ...], name: str) -> tuple[int, int]:
        """The blocks of a weight of this shape, along rows and columns."""
        rows, columns = shape[0], torch.Size(shape[1:]).numel()
        if rows % self.block[0] or columns % self.block[1]:
            raise UsageError(
                f"compression_training.sparse_pruning.shared_parameters.block_pattern is "
                f"{self.block[0]}x{self.block[1]}, which does not divide the weight {rows}x{columns} of {name}; use "
                "one that does, or add the module to excluded_modules"
            )
        return rows // self.block[0], columns // self.block[1]

    def summed(self, elements: Tensor) -> Tensor:
        """The sums of blocks of what a weight's elements have."""
        rows, columns = self.block
        flat = elements.flatten(1)
        return flat.view(len(flat) // rows, rows, -1, columns).sum((1, 3))

    def spread(self, blocks: Tensor, shape: torch.Size) -> Tensor:
        """For each element of a weight what its block has."""
        return blocks.repeat_interleave(self.block[0], 0).repeat_interleave(self.block[1], 1).view(shape)

    def kept(self, scores: Tensor, alive: Tensor, step: int) -> Tensor:
        """The blocks that stay at a step, of those that are there: the ones with the largest scores."""
        ranked = scores.masked_fill(~alive, -1.0)
        chosen: Tensor = TopKBinarizer.apply(ranked, self.share(step), False)  # type: ignore[no-untyped-call]
        return chosen.bool()
