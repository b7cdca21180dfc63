"""Linear layers that a script makes of whole ones: split by outputs, or by inputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed.fragments import Split
from deepspeed.tensor_parallel import layers
from deepspeed.tensor_parallel.modules.base import TensorParallel_Layer

__all__ = ["LinearAllreduce", "LinearLayer"]


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
        splits = {"weight": Split.of(0, cuts), "bias": Split.of(0, cuts)}
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
        split = Split.of(1, [self._cuts(weight.shape[1])])
        sizes = [split.size(rank) for rank in range(self.tp_world_size)]
        self._hold(module, {"weight": split}, sizes)

    def forward(self, input: Tensor) -> Tensor:
        """[…, inputs of this rank] → […, outputs]."""
        return self.product(input, with_bias=True) if self.tp_world_size == 1 else super().forward(input)
