"""What all layers that a script makes of whole ones have in common."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import UsageError
from deepspeed.fragments import Split
from deepspeed.parallel.regions import Members, Peers
from deepspeed.tensor_parallel.gathering import whole_of
from deepspeed.tensor_parallel.layers import Share
from deepspeed.tensor_parallel.regions import Entrance
from deepspeed.tensor_parallel.shard_sizes import AutoTPMeta, get_shard_size_list

__all__ = ["TensorParallel_Layer"]


class _Alone:
    """A layer without a group: nobody shares it."""

    rank, size = 0, 1

    @property
    def group(self) -> ProcessGroup:
        raise UsageError("this layer was made with mp_group=None, so that there is nobody to exchange tensors with")


class TensorParallel_Layer(nn.Module, ABC):
    """A layer of which each rank of `mp_group` holds a part; it takes over the parameters of a whole one.

    `name` is the layer's path, `tp_meta` what the model tells of its heads, by which an uneven dim is cut.
    """

    share: Share
    bias: Tensor | None

    def __init__(self, mp_group: ProcessGroup | None, **kwargs: Any) -> None:
        super().__init__()
        strange = sorted(kwargs.keys() - {"name", "tp_meta"})
        if strange:
            raise UsageError(f"{type(self).__name__}: unknown arguments {', '.join(strange)}; expected name, tp_meta")
        self.mp_group = mp_group
        self.peers: Peers = _Alone() if mp_group is None else Members(mp_group)
        self.tp_world_size, self.tp_index = self.peers.size, self.peers.rank
        self.name: str | None = kwargs.get("name")
        self.tp_meta: AutoTPMeta = kwargs.get("tp_meta") or AutoTPMeta()

    @abstractmethod
    def forward(self, input: Tensor) -> Tensor:
        """What the whole layer computes, or this rank's part of it."""

    @torch.no_grad()
    def gather_params(self, params_list: Iterable[Tensor | None]) -> None:
        """Make this layer's own split parameters whole; all ranks of the group call it."""
        for param, split in self._own(params_list):
            if self.tp_world_size > 1 and param.shape[split.dim] == split.size(self.tp_index):
                param.data = whole_of(param.data, split, self.peers)

    @torch.no_grad()
    def _tp_partition(self, params_list: Iterable[Tensor | None]) -> None:
        """Cut whole parameters of this layer, and put them on the device."""
        for param, split in self._own(params_list):
            if param.shape[split.dim] == split.total and self.tp_world_size > 1:
                part = split.cut(param.data, self.tp_index)
                param.data = part.clone() if part.data_ptr() == param.data_ptr() else part
            param.data = self.move(param.data)
            self.config_tp_params(param)

    def config_tp_params(self, weight: Tensor) -> None:
        """Mark a parameter of which ranks hold different parts, as Megatron does, and let it know this layer."""
        marked = cast(Any, weight)
        marked.tensor_model_parallel = marked.ds_is_replaced_module = True
        marked.gather_params, marked._tp_partition = self.gather_params, self._tp_partition

    def move(self, tensor: Tensor) -> Tensor:
        """On the device."""
        return tensor.to(get_accelerator().current_device_name())

    def _hold(self, module: nn.Module, splits: dict[str, Split], sizes: Sequence[int], **options: Any) -> None:
        """Take over weight and bias, cut as `splits` says; what is not in it stays whole."""
        self.share = Share(self.peers, splits, tuple(sizes), Entrance(self.peers), **options)
        for name in ("weight", "bias"):
            param = getattr(module, name, None)
            self.register_parameter(name, param)
            if param is not None and name not in splits:
                param.data = self.move(param.data)
        self._tp_partition(self._parameters.values())

    def _own(self, params: Iterable[Tensor | None]) -> list[tuple[Tensor, Split]]:
        splits = self.share.splits
        known = {id(param): splits[name] for name, param in self._parameters.items() if name in splits}
        return [(param, known[id(param)]) for param in params if param is not None and id(param) in known]

    def _cuts(self, total: int) -> list[tuple[int, int]]:
        sizes = get_shard_size_list(total, self.tp_world_size, self.tp_meta, self.name)
        return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))
