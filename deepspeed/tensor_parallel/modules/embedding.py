"""Embeddings that a script makes of whole ones: split by tokens, or by width."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed.errors import UsageError
from deepspeed.fragments import Split
from deepspeed.tensor_parallel import regions
from deepspeed.tensor_parallel.modules.base import TensorParallel_Layer
from deepspeed.tensor_parallel.modules.linear import LinearAllreduce, VocabParallelLinear

__all__ = ["HiddenParallelEmbedding", "VocabParallelEmbedding"]


class _Embedding(TensorParallel_Layer):
    weight: Tensor

    @staticmethod
    def validate_embedding(module: nn.Module) -> None:
        """Raise where a part of an embedding could not do what the whole one does."""
        if not isinstance(module, nn.Embedding):
            raise UsageError(f"expected an Embedding to split, found a {type(module).__name__}")
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            raise UsageError(
                "an Embedding with max_norm, sparse or scale_grad_by_freq needs all of its weight and cannot be split"
            )

    def _share(self, module: nn.Module, split: Split, tied: TensorParallel_Layer | None) -> None:
        """Take over the module's weight, or that of the output layer it is tied to, which was cut before."""
        self.validate_embedding(module)
        self.padding_idx: Any = module.padding_idx
        if tied is not None and tied.share.splits["weight"] != split:
            raise UsageError(
                f"{type(self).__name__}: the layer that it is tied to is cut otherwise; both must have the same ranks, "
                "name and tp_meta"
            )
        self._hold(module if tied is None else tied, {"weight": split}, [split.size(r) for r in range(split.ranks)])
        self.bias = None


class VocabParallelEmbedding(_Embedding):
    """Each rank has some tokens; of others it gives zeros, and the sum is whole."""

    def __init__(
        self,
        module: nn.Module,
        mp_group: ProcessGroup | None = None,
        tied_vocab_parallel_linear: VocabParallelLinear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(mp_group, **{"name": "lm_head", **kwargs})
        weight: Any = module.weight
        tied = tied_vocab_parallel_linear
        self.vocab_size = weight.shape[0] if tied is None else tied.vocab_size
        split = Split.of(0, [self._cuts(self.vocab_size)])
        ((self.vocab_start_index, self.vocab_end_index),) = split.parts[self.tp_index] or ((0, 0),)
        self._share(module, split, tied)

    def forward(self, input: Tensor) -> Tensor:
        """Tokens → whole embeddings."""
        start, stop = self.vocab_start_index, self.vocab_end_index
        foreign = (input < start) | (input >= stop)
        here = self.padding_idx is not None and start <= self.padding_idx < stop
        place = (input - start).masked_fill(foreign, 0)
        found = F.embedding(place, self.weight, self.padding_idx - start if here else None)
        found = found.masked_fill(foreign.unsqueeze(-1), 0)
        return found if self.tp_world_size == 1 else regions.leave(found, self.peers)


class HiddenParallelEmbedding(_Embedding):
    """Each rank has a part of the width of all tokens; the parts are put side by side."""

    def __init__(
        self,
        module: nn.Module,
        mp_group: ProcessGroup | None = None,
        tied_row_parallel_linear: LinearAllreduce | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(mp_group, **{"name": "lm_head", **kwargs})
        weight: Any = module.weight
        tied = tied_row_parallel_linear
        width = weight.shape[1] if tied is None else tied.share.splits["weight"].total
        self._share(module, Split.of(1, [self._cuts(width)]), tied)

    def forward(self, input: Tensor) -> Tensor:
        """Tokens → whole embeddings."""
        found = F.embedding(input, self.weight, self.padding_idx)
        return found if self.tp_world_size == 1 else regions.gather(found, self.peers, self.share.sizes)
