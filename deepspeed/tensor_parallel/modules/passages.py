"""What tensors pass between whole and split activations, in the shape of autograd functions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.errors import UsageError
from deepspeed.parallel.regions import Members
from deepspeed.tensor_parallel import regions
from deepspeed.tensor_parallel.overlap import Gate

__all__ = [
    "AsyncColumnParallel",
    "ColumnParallel",
    "GatherFromTensorParallelRegion",
    "RowParallel",
    "ScatterToTensorParallelRegion",
]


class ColumnParallel:
    """`ColumnParallel.apply(group, input)`: as it is; its gradient is summed over ranks."""

    @staticmethod
    def apply(group: ProcessGroup | None, input: Tensor) -> Tensor:
        """The input inside a split region."""
        return input if group is None else regions.enter(input, Members(group))


class AsyncColumnParallel:
    """`AsyncColumnParallel.apply(group, input, weight, bias)`: a linear layer's product.

    The gradient of the input is summed while that of the weight is computed.
    """

    @staticmethod
    def apply(group: ProcessGroup, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[…, inputs] → […, outputs of this rank]."""
        return Gate(Members(group)).linear(input, weight, bias)


class RowParallel:
    """`RowParallel.apply(group, input, is_inference_mode)`: summed over ranks; its gradient is as it is."""

    @staticmethod
    def apply(group: ProcessGroup | None, input: Tensor, is_inference_mode: bool = False) -> Tensor:
        """The sum; a pass without gradients needs no other way than one with them."""
        return input if group is None else regions.leave(input, Members(group))


class GatherFromTensorParallelRegion:
    """`GatherFromTensorParallelRegion.apply(group, input, partition_sizes)`: parts of the last dim side by side."""

    @staticmethod
    def apply(group: ProcessGroup | None, input: Tensor, partition_sizes: Sequence[int]) -> Tensor:
        """The whole; its gradient is this rank's part."""
        return input if group is None else regions.gather(input, Members(group), partition_sizes)


class ScatterToTensorParallelRegion:
    """`ScatterToTensorParallelRegion.apply(group, input, partition_sizes, tp_index)`: a part of the last dim."""

    @staticmethod
    def apply(group: ProcessGroup | None, input: Tensor, partition_sizes: Sequence[int], tp_index: int) -> Tensor:
        """This rank's part; its gradient is gathered."""
        if group is None:
            return input
        peers = Members(group)
        if tp_index != peers.rank:
            raise UsageError(f"tp_index is {tp_index}, but this rank is {peers.rank} in the group; a part is its own")
        return regions.scatter(input, peers, partition_sizes)
