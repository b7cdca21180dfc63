"""Linear layers whose outputs or inputs are several parts side by side: a rank gets its share of each part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from deepspeed.errors import UsageError
from deepspeed.fragments import side_by_side
from deepspeed.tensor_parallel.attention import find_attention
from deepspeed.tensor_parallel.fused_weights import shared_value_cuts
from deepspeed.tensor_parallel.modules.linear import Cuts, LinearAllreduce, LinearLayer

__all__ = [
    "FusedModuleWrapper",
    "GateUpPack_LinearLayer",
    "SubParamColumnParallel",
    "SubParamLinearAllreduce",
    "SubParamLinearLayer",
    "Yuan_LinearAllreduce",
    "Yuan_LinearLayer",
    "fused_LinearLayer",
]

Shape = Sequence[int | Sequence[int]]


def _parts(owner: str, shape: Shape, dim: int, total: int) -> list[int]:
    """The sizes of the fused parts of a dim: of a count, or of the sizes themselves."""
    at = shape[dim]
    if isinstance(at, int):
        count = max(at, 1)
        sizes = [total // count] * count
    else:
        sizes = list(at)
    if sum(sizes) != total:
        raise UsageError(
            f"{owner}: dim {dim} of the weight has {total} elements, but shape {tuple(shape)} makes {sum(sizes)}; give "
            "the number of equal parts, or sizes that add up"
        )
    return sizes


class SubParamColumnParallel(LinearLayer):
    """A layer split by outputs that are several parts side by side."""


class SubParamLinearLayer(SubParamColumnParallel):
    """Parts by a shape: `(3, -1)` for three equal ones, `((64, 16, 16), -1)` for unequal ones."""

    def __init__(
        self, module: nn.Module, mp_group: ProcessGroup | None, shape: Shape, partition_dim: int = 0, **kwargs: Any
    ) -> None:
        self._shape = shape, partition_dim
        super().__init__(module, mp_group, **kwargs)

    def _output_cuts(self, module: nn.Module, total: int) -> Cuts:
        shape, dim = self._shape
        return side_by_side(_parts(type(self).__name__, shape, dim, total), self.tp_world_size)


class SubParamLinearAllreduce(LinearAllreduce):
    """A layer split by inputs that are several parts side by side, given by a shape such as `(-1, 2)`."""

    def __init__(
        self, module: nn.Module, mp_group: ProcessGroup | None, shape: Shape, partition_dim: int = 1, **kwargs: Any
    ) -> None:
        self._shape = shape, partition_dim
        super().__init__(module, mp_group, **kwargs)

    def _input_cuts(self, module: nn.Module, total: int) -> Cuts:
        shape, dim = self._shape
        return side_by_side(_parts(type(self).__name__, shape, dim, total), self.tp_world_size)


class GateUpPack_LinearLayer(SubParamColumnParallel):
    """Gate and up projection in one weight."""

    def __init__(self, module: nn.Module, mp_group: ProcessGroup | None = None, **kwargs: Any) -> None:
        super().__init__(module, mp_group, **kwargs)

    def _output_cuts(self, module: nn.Module, total: int) -> Cuts:
        return side_by_side(_parts(type(self).__name__, (2,), 0, total), self.tp_world_size)


class Yuan_LinearLayer(SubParamColumnParallel):
    """Values of Yuan's attention, whose heads look at pairs of others: a rank has its heads of both halves of them.

    `tp_meta` tells the number of heads.
    """

    def _output_cuts(self, module: nn.Module, total: int) -> Cuts:
        return shared_value_cuts(total, self.tp_meta.num_kv_heads, self.tp_world_size)


class Yuan_LinearAllreduce(LinearAllreduce):
    """The projection behind that attention: its inputs are cut as the outputs of `Yuan_LinearLayer`."""

    def _input_cuts(self, module: nn.Module, total: int) -> Cuts:
        return shared_value_cuts(total, self.tp_meta.num_kv_heads, self.tp_world_size)


class FusedModuleWrapper:
    """A module that a layer only looks at, and that is not to become its child."""

    def __init__(self, fused_module: nn.Module) -> None:
        self.fused_module = fused_module


class fused_LinearLayer(SubParamColumnParallel):
    """Queries, keys and values in one weight, cut by heads.

    `fused_module` is the attention module that has it, or one around that, such as the model: it tells the heads.
    """

    def __init__(
        self, module: nn.Module, mp_group: ProcessGroup | None, skip_partition: bool = False, **kwargs: Any
    ) -> None:
        around = kwargs.pop("fused_module", None)
        self._around: nn.Module | None = around.fused_module if isinstance(around, FusedModuleWrapper) else around
        super().__init__(module, mp_group, skip_partition, **kwargs)
        self._around = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_around":  # of torch's rules for modules it would become a child
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def _output_cuts(self, module: nn.Module, total: int) -> Cuts:
        found = {} if self._around is None else find_attention(self._around, self.tp_world_size)
        for attention in found.values():
            leaf = next((name for name, child in attention.module.named_children() if child is module), None)
            if leaf is None or not attention.splits(leaf):
                continue
            cuts, shared = attention.cuts(leaf, self.tp_world_size, total)
            if shared:
                raise UsageError(
                    f"fused_LinearLayer: {leaf} has {attention.heads.key_value} key-value heads (dim 0 of its weight), "
                    f"fewer than the {self.tp_world_size} ranks; let tensor_parallel.autotp_size split the model"
                )
            return cuts
        raise UsageError(
            "fused_LinearLayer: no attention module around the layer tells its heads; pass fused_module=, the module "
            "that has it, or use SubParamLinearLayer with the shape of its parts"
        )
