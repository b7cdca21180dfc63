"""Convolutions of which the ranks of the world hold some channels each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.fragments import even
from deepspeed.parallel.regions import Members, enter, leave

__all__ = ["TensorParallelConv2d", "TensorParallelIcShardConv2d", "TensorParallelOcShardConv2d"]


class TensorParallelConv2d(nn.Module):
    """A convolution split by its output channels (`shard_by_oc`) or by its input channels."""

    def __init__(self, conv: nn.Conv2d, rank: int, world_size: int, shard_by_oc: bool) -> None:
        super().__init__()
        self.rank, self.world_size, self.shard_by_oc = rank, world_size, shard_by_oc
        if conv.groups != 1 or conv.padding_mode != "zeros":
            raise UsageError(
                f"a Conv2d with groups={conv.groups} and padding_mode={conv.padding_mode!r} cannot be split; expected "
                "1 and 'zeros'"
            )
        channels = conv.out_channels if shard_by_oc else conv.in_channels
        if channels < world_size:
            raise UsageError(f"a Conv2d of {channels} channels cannot be split over {world_size} ranks")
        self.options: tuple[Any, Any, Any] = conv.stride, conv.padding, conv.dilation
        self.shard_weights(conv)

    @torch.no_grad()
    def shard_weights(self, conv: nn.Conv2d) -> None:
        """Take over this rank's channels of a convolution."""
        dim = 0 if self.shard_by_oc else 1
        start, stop = even(conv.weight.shape[dim], self.world_size)[self.rank]
        self.weight = nn.Parameter(conv.weight.narrow(dim, start, stop - start).clone())
        bias = conv.bias
        if bias is not None and self.shard_by_oc:
            bias = nn.Parameter(bias[start:stop].clone())
        self.bias = bias

    def forward(self, input: Tensor) -> Tensor:
        """The whole input → this rank's output channels."""
        inputs = input if self.world_size == 1 else enter(input, self._peers())
        return F.conv2d(inputs, self.weight, self.bias, *self.options)

    def _peers(self) -> Members:
        group = comm.get_world_group()
        if group.size() != self.world_size:
            raise UsageError(f"the layer was cut for {self.world_size} ranks, but the world has {group.size()}")
        return Members(group)


class TensorParallelOcShardConv2d(TensorParallelConv2d):
    """Split by output channels."""

    def __init__(self, conv: nn.Conv2d, rank: int, world_size: int) -> None:
        super().__init__(conv, rank, world_size, True)


class TensorParallelIcShardConv2d(TensorParallelConv2d):
    """Split by input channels; the outputs of all ranks are summed, and the bias is added once."""

    def __init__(self, conv: nn.Conv2d, rank: int, world_size: int) -> None:
        super().__init__(conv, rank, world_size, False)

    def forward(self, input: Tensor) -> Tensor:
        """This rank's input channels → all output channels."""
        output = F.conv2d(input, self.weight, None, *self.options)
        output = output if self.world_size == 1 else leave(output, self._peers())
        return output if self.bias is None else output + self.bias.view(-1, 1, 1)
