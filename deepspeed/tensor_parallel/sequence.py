"""Sequences that stay split between the split regions, so that norms and what they save are divided, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from deepspeed.errors import UsageError
from deepspeed.parallel import AxisGroup
from deepspeed.tensor_parallel import regions

__all__ = ["Sequence"]


@dataclass
class Sequence:
    """Splits hidden states [batch, sequence, hidden] from the first block of a model to the last.

    Only in training: sequences of any length, such as those of a generation, pass whole in eval mode.
    """

    axis: AxisGroup
    active: bool = False
    """Whether the pass that goes on now has split sequences; the first block decides, in backward what it decided."""

    def __deepcopy__(self, _: Any) -> Sequence:
        return self

    def begin(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """At the first block: this rank's part of the sequence."""
        if torch._C._current_graph_task_id() == -1:  # no backward computes it again
            self.active = block.training
        if not self.active:
            return hidden
        if hidden.shape[1] % self.axis.size:
            raise UsageError(
                f"tensor_parallel.sequence_parallel: sequences of {hidden.shape[1]} tokens do not divide by "
                f"{self.axis.size} ranks; pad them to a multiple of {self.axis.size}"
            )
        return regions.scatter_sequence(hidden, self.axis, self._sizes(hidden.shape[1] // self.axis.size))

    def go_on(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """At a later block, which may be the first one here: what the block before it gave, as it is."""
        self.active = block.training
        return hidden

    def enter(self, hidden: Tensor) -> Tensor:
        """Into a split region, which takes the whole sequence."""
        if not self.active:
            return regions.enter(hidden, self.axis)
        return regions.gather_sequence(hidden, self.axis, self._sizes(hidden.shape[1]))

    def leave(self, output: Tensor) -> Tensor:
        """Out of a split region."""
        if not self.active:
            return regions.leave(output, self.axis)
        return regions.leave_to_sequence(output, self.axis, self._sizes(output.shape[1] // self.axis.size))

    def end(self, hidden: Tensor) -> Tensor:
        """Behind the last block: the whole sequence."""
        if not self.active:
            return hidden
        return regions.join_sequence(hidden, self.axis, self._sizes(hidden.shape[1]))

    def remember(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Behind all blocks: their backward, which may compute them again, goes as this pass went.

        Another pass may lie between both, such as one of an evaluation.
        """
        active = self.active

        def resume(_grad: Tensor) -> None:
            self.active = active

        for each in tree_leaves(output):
            if type(each) is Tensor and each.requires_grad:  # what is computed only if looked at stays that
                each.register_hook(resume)

    def _sizes(self, part: int) -> list[int]:
        return [part] * self.axis.size
