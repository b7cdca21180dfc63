"""Linear layers of which each rank has a part, made of whole ones by scripts; how dims are cut for them."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import UsageError
from deepspeed.fragments import DimSplit, even_runs
from deepspeed.parallel.regions import GroupMembers, RankGroup, cut_of
from deepspeed.tensor_parallel import layers
from deepspeed.tensor_parallel.apply import whole_of
from deepspeed.tensor_parallel.layers import ShardInfo
from deepspeed.tensor_parallel.overlap import SharedInput

_WITHOUT_HEADS = ("mlp", "lm_head", "embed_out")
"""Parts of the name of a layer that is not cut by heads."""


@dataclass
class AutoTPMeta:
    """What a model tells of its heads."""

    num_kv_heads: int | None = None
    num_attention_heads: int | None = None
    n_embd: int | None = None
    tp_grain_size: int = 1


def get_shard_size_list(
    total_size: int, mp_size: int, meta: AutoTPMeta | None = None, name: str | None = None
) -> list[int]:
    """The elements of each rank; the first ranks get more where they do not go evenly.

    A dim that holds whole heads is cut between key-value heads, unless `name` is that of a layer without heads.
    """
    meta = meta or AutoTPMeta()
    heads = meta.num_kv_heads
    by_heads = (
        heads is not None and total_size % heads == 0 and not any(part in (name or "") for part in _WITHOUT_HEADS)
    )
    unit = total_size // heads if heads is not None and by_heads else meta.tp_grain_size
    if total_size % unit:
        unit = 1
    return [(stop - start) * unit for start, stop in even_runs(total_size // unit, mp_size)]


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

    share: ShardInfo
    bias: Tensor | None

    def __init__(self, mp_group: ProcessGroup | None, **kwargs: Any) -> None:
        super().__init__()
        strange = sorted(kwargs.keys() - {"name", "tp_meta"})
        if strange:
            raise UsageError(f"{type(self).__name__}: unknown arguments {', '.join(strange)}; expected name, tp_meta")
        self.mp_group = mp_group
        self.peers: RankGroup = _Alone() if mp_group is None else GroupMembers(mp_group)
        self.tp_world_size, self.tp_index = self.peers.size, self.peers.rank
        self.name: str | None = kwargs.get("name")
        self.tp_meta: AutoTPMeta = kwargs.get("tp_meta") or AutoTPMeta()

    @abstractmethod
    def forward(self, input: Tensor) -> Tensor:
        """What the whole layer computes, or this rank's part of it."""

    @torch.no_grad()
    def _hold(self, module: nn.Module, splits: dict[str, DimSplit], sizes: Sequence[int], **options: Any) -> None:
        """Take over weight and bias on the device, cut as `splits` says unless they are; what is not in it is whole."""
        self.share = ShardInfo(self.peers, splits, tuple(sizes), SharedInput(self.peers), **options)
        for name in ("weight", "bias"):
            param: Any = getattr(module, name, None)
            self.register_parameter(name, param)
            if param is None:
                continue
            split = splits.get(name)
            if split is not None and param.shape[split.dim] == split.total and self.tp_world_size > 1:
                part = split.cut(param.data, self.tp_index)
                param.data = part.clone() if part.data_ptr() == param.data_ptr() else part
            param.data = param.data.to(get_accelerator().current_device_name())
            if split is not None:  # as Megatron marks a parameter of which ranks hold different parts
                param.tensor_model_parallel = param.ds_is_replaced_module = True

    def _cuts(self, total: int) -> list[tuple[int, int]]:
        sizes = get_shard_size_list(total, self.tp_world_size, self.tp_meta, self.name)
        return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


class LinearLayer(layers.ColumnParallel, TensorParallel_Layer):
    """Computes this rank's outputs from the whole input; with `gather_output` all of them.

    With `skip_partition` the module is this rank's part already.
    """

    def __init__(
        self,
        module: nn.Module,
        mp_group: ProcessGroup | None = None,
        skip_partition: bool = False,
        gather_output: bool = False,
        **kwargs: Any,
    ) -> None:
        TensorParallel_Layer.__init__(self, mp_group, **kwargs)
        self.gather_output = gather_output
        weight: Any = module.weight
        total = weight.shape[0] * (self.tp_world_size if skip_partition else 1)
        cuts = [self._cuts(total)]
        splits = {"weight": DimSplit.of(0, cuts), "bias": DimSplit.of(0, cuts)}
        if getattr(module, "bias", None) is None:
            del splits["bias"]
        sizes = [splits["weight"].size(rank) for rank in range(self.tp_world_size)]
        self._hold(module, splits, sizes, gather_output=gather_output)

    def forward(self, input: Tensor) -> Tensor:
        """[…, inputs] → […, outputs of this rank], or all outputs."""
        if self.tp_world_size == 1:
            return self.product(input, with_bias=True)
        output = super().forward(input)
        self.share.forget()  # no other layer shares what this one remembers
        return output


class LinearAllreduce(layers.RowParallel, TensorParallel_Layer):
    """Computes all outputs as a sum over ranks of products with their inputs; the bias is added once."""

    def __init__(self, module: nn.Module, mp_group: ProcessGroup | None, **kwargs: Any) -> None:
        TensorParallel_Layer.__init__(self, mp_group, **kwargs)
        weight: Any = module.weight
        split = DimSplit.of(1, [self._cuts(weight.shape[1])])
        sizes = [split.size(rank) for rank in range(self.tp_world_size)]
        self._hold(module, {"weight": split}, sizes)

    def forward(self, input: Tensor) -> Tensor:
        """[…, inputs of this rank] → […, outputs]."""
        return self.product(input, with_bias=True) if self.tp_world_size == 1 else super().forward(input)


class GatherReplacedLayerParams:
    """A context in which split parameters are whole; all ranks that share them enter and leave it.

    What is written to them inside counts on every rank that wrote it: they are cut again at the end.
    """

    def __init__(self, params: Iterable[Tensor] | Tensor, module: nn.Module, enabled: bool = True) -> None:
        wanted = {id(each) for each in ([params] if isinstance(params, Tensor) else params)}
        self._found: dict[int, tuple[Tensor, Any, Any]] = {}
        for layer in module.modules() if enabled else ():
            share = cut_of(layer)
            for name, split in {} if share is None else share.splits.items():
                param = layer._parameters.get(name)
                if param is not None and id(param) in wanted:
                    self._found[id(param)] = param, split, share.axis  # type: ignore[union-attr]

    @torch.no_grad()
    def __enter__(self) -> None:
        for param, split, axis in self._found.values():
            if axis.size > 1:
                param.data = whole_of(param.data, split, axis)

    @torch.no_grad()
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for param, split, axis in self._found.values():
            if axis.size > 1:
                param.data = split.cut(param.data, axis.rank).clone()
