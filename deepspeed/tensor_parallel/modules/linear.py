"""Linear layers that a script makes of whole ones: split by outputs, or by inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed.fragments import Split
from deepspeed.tensor_parallel import layers
from deepspeed.tensor_parallel.modules.base import TensorParallel_Layer

__all__ = [
    "Conv_LinearALlreduce",
    "LinearAllreduce",
    "LinearAllreduceWithReplicatedInput",
    "LinearLayer",
    "LmHeadLinearAllreduce",
    "VocabParallelLinear",
    "conv_LinearLayer",
]

Cuts = list[list[tuple[int, int]]]


class LinearLayer(layers.ColumnParallel, TensorParallel_Layer):
    """Computes this rank's outputs from the whole input; with `gather_output` all of them.

    With `skip_partition` the module is this rank's part already.
    """

    transposed = False

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
        dim = 1 if self.transposed else 0
        weight: Any = module.weight
        total = weight.shape[dim] * (self.tp_world_size if skip_partition else 1)
        cuts = self._output_cuts(module, total)
        splits = {"weight": Split.of(dim, cuts), "bias": Split.of(0, cuts)}
        if getattr(module, "bias", None) is None:
            del splits["bias"]
        sizes = [splits["weight"].size(rank) for rank in range(self.tp_world_size)]
        self._hold(module, splits, sizes, transposed=self.transposed, gather_output=gather_output)

    def _output_cuts(self, module: nn.Module, total: int) -> Cuts:
        return [self._cuts(total)]

    def forward(self, input: Tensor) -> Tensor:
        """[…, inputs] → […, outputs of this rank], or all outputs."""
        if self.tp_world_size == 1:
            return self.product(input, with_bias=True)
        output = super().forward(input)
        self.share.forget()  # no other layer shares what this one remembers
        return output

    @torch.no_grad()
    def uneven_partition(self, params_list: list[Tensor | None]) -> None:
        """Cut whole parameters; what is even and what is not is cut alike."""
        self._tp_partition(params_list)

    @classmethod
    def from_weights(
        cls,
        weight_shape: tuple[int, int] | None = None,
        dtype: torch.dtype = torch.half,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        gather_output: bool = False,
    ) -> LinearLayer:
        """Of a weight that is this rank's already, or of an empty one of that shape; nobody shares it."""
        given = torch.empty(weight_shape or (), dtype=dtype) if weight is None else weight
        module = nn.Module()
        module.register_parameter("weight", nn.Parameter(given, requires_grad=given.is_floating_point()))
        module.register_parameter("bias", None if bias is None else nn.Parameter(bias))
        return cls(module, None, gather_output=gather_output)


class conv_LinearLayer(LinearLayer):
    """The same of a layer whose weight is [inputs, outputs], as GPT-2's are."""

    transposed = True


class VocabParallelLinear(LinearLayer):
    """An output layer of which each rank computes the logits of some tokens, as the loss takes them."""

    is_vocab_parallel_lm_head = True

    def __init__(self, module: nn.Module, mp_group: ProcessGroup | None = None, **kwargs: Any) -> None:
        super().__init__(module, mp_group, **{"name": "lm_head", **kwargs})
        split = self.share.splits["weight"]
        self.vocab_size = split.total
        ((self.vocab_start_index, self.vocab_end_index),) = split.parts[self.tp_index] or ((0, 0),)


class LinearAllreduce(layers.RowParallel, TensorParallel_Layer):
    """Computes all outputs as a sum over ranks of products with their inputs; the bias is added once."""

    transposed = False
    replicated_input = False
    """The input is whole, and each rank takes its share of it."""

    def __init__(self, module: nn.Module, mp_group: ProcessGroup | None, **kwargs: Any) -> None:
        TensorParallel_Layer.__init__(self, mp_group, **kwargs)
        dim = 0 if self.transposed else 1
        weight: Any = module.weight
        split = Split.of(dim, self._input_cuts(module, weight.shape[dim]))
        sizes = [split.size(rank) for rank in range(self.tp_world_size)]
        self._hold(module, {"weight": split}, sizes, transposed=self.transposed, split_input=self.replicated_input)

    def _input_cuts(self, module: nn.Module, total: int) -> Cuts:
        return [self._cuts(total)]

    def forward(self, input: Tensor) -> Tensor:
        """[…, inputs of this rank], or of all where each takes its share → […, outputs]."""
        return self.product(input, with_bias=True) if self.tp_world_size == 1 else super().forward(input)

    @torch.no_grad()
    def uneven_partition(self, params_list: list[Tensor | None]) -> None:
        """Cut whole parameters; what is even and what is not is cut alike."""
        self._tp_partition(params_list)


class Conv_LinearALlreduce(LinearAllreduce):
    """The same of a layer whose weight is [inputs, outputs], as GPT-2's are."""

    transposed = True


class LinearAllreduceWithReplicatedInput(LinearAllreduce):
    """The same for an input that all ranks have whole."""

    replicated_input = True


class LmHeadLinearAllreduce(LinearAllreduceWithReplicatedInput):
    """An output layer behind whole hidden states, split by inputs: all ranks get all logits."""

    def __init__(self, module: nn.Module, mp_group: ProcessGroup | None, **kwargs: Any) -> None:
        super().__init__(module, mp_group, **{"name": "lm_head", **kwargs})
