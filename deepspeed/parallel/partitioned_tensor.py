"""`PartitionedTensor`: a tensor of which each rank of a group keeps one flat part, and how to send such a part on."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.parallel.balance import partition_uniform


class PartitionedTensor:
    """This rank's part of a tensor that all ranks of `group` have; `full` puts the parts together again."""

    def __init__(self, tensor: Tensor, group: Any, partition_meta: Tensor | None = None) -> None:
        """Cut `tensor`; with `partition_meta`, what `to_meta` said, it is this rank's part already."""
        self.group = group
        self.num_parts = comm.get_world_size(group)
        self.rank = comm.get_rank(group)
        if partition_meta is None:
            self.orig_size = list(tensor.shape)
            self.orig_device = tensor.device
            self.partition = partition_uniform(tensor.numel(), self.num_parts)
            start, stop = self.partition[self.rank], self.partition[self.rank + 1]
            self.local_data = tensor.detach().reshape(-1)[start:stop].clone()
        else:
            self.orig_device = tensor.device
            self.local_data = tensor
            self._take(partition_meta)

    @classmethod
    def from_meta(
        cls, meta: Tensor, local_part: Tensor, group: Any, device: str | torch.device = "cpu"
    ) -> PartitionedTensor:
        """The tensor that `meta` describes, of which this rank has `local_part`; `full` puts it onto `device`."""
        made = cls(local_part, group, partition_meta=meta)
        made.orig_device = torch.device(device)
        return made

    def full(self, device: str | torch.device | None = None) -> Tensor:
        """The whole tensor, on the device it came from or on `device`; all ranks of the group call this."""
        lengths = [stop - start for start, stop in zip(self.partition, self.partition[1:], strict=False)]
        longest = max(lengths)
        mine = self.local_data.new_zeros(longest)
        mine[: self.local_data.numel()] = self.local_data
        parts = mine.new_empty(self.num_parts, longest)
        comm.all_gather_into_tensor(parts.view(-1), mine, group=self.group)
        flat = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
        return flat.view(self.orig_size).to(self.orig_device if device is None else device)

    def to_meta(self) -> Tensor:
        """[dims, size of each, parts, this part, bounds of the parts]: int64, on the part's device."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.int64, device=self.local_data.device)

    def data(self) -> Tensor:
        """This rank's part, flat."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """The shape of this rank's part."""
        return self.local_data.shape

    def full_size(self) -> list[int]:
        """The shape of the whole tensor."""
        return self.orig_size

    def _take(self, meta: Tensor) -> None:
        dims, *rest = meta.tolist()
        self.orig_size, (parts, rank, *self.partition) = rest[:dims], rest[dims:]
        if parts != self.num_parts:
            raise UsageError(
                f"PartitionedTensor: the tensor was cut into {parts} parts, but the group has {self.num_parts} ranks"
            )
        length = self.partition[self.rank + 1] - self.partition[self.rank]
        if self.local_data.numel() != length:
            raise UsageError(
                f"PartitionedTensor: rank {self.rank} of the group has {self.local_data.numel()} elements of a tensor "
                f"of shape {tuple(self.orig_size)} ({math.prod(self.orig_size)} in all); its part has {length}. The "
                f"part that was sent is number {rank}."
            )
