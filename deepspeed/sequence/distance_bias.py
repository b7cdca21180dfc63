"""What is added to the score of a pair of tokens by their distance: T5's relative positions, which it learns.

Instead of a number for each pair, [queries, keys], a model's layers hand a table from one to the next, with a row for
each distance between tokens of the whole sequence; a rank takes of it what its heads and its tokens need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.sequence.whole import Whole

__all__ = ["DistanceBias", "Find", "Tables", "is_crossing"]

Find = Callable[[Tensor | None], Whole | None]
"""What a mask stands for."""


@dataclass(frozen=True, eq=False)
class DistanceBias:
    """Added to scores."""

    table: Tensor
    """[2 × length - 1, heads]: the middle row is for a token's score of itself, the last for that of the first token
    to the last."""

    def of_heads(self, counts: tuple[int, ...], rank: int) -> DistanceBias:
        """That of a rank's heads; `counts` are those of each rank."""
        first = sum(counts[:rank])
        return DistanceBias(self.table[:, first : first + counts[rank]])

    def rows(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Where pairs lie in the table, [queries, keys]; both are indices into the whole sequence."""
        return keys[None, :] - queries[:, None] + self.table.shape[0] // 2

    def whole(self) -> Tensor:
        """[1, heads, length, length]."""
        at = torch.arange(self.table.shape[0] // 2 + 1, device=self.table.device)
        return self.table[self.rows(at, at)].permute(2, 0, 1)[None]


class Tables:
    """Gives an attention module that learns biases their table, in the place of those that it would make of a part."""

    def __init__(self, find: Find) -> None:
        self._find = find

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        whole = self._find(kwargs.get("mask"))
        made = kwargs.get("position_bias")
        if whole is None or whole.length == 0 or made is not None or not module.has_relative_attention_bias:
            return None
        length = whole.length if whole.target is None or not module.is_decoder else whole.target.length
        distances = torch.arange(1 - length, length, device=args[0].device)
        buckets = module._relative_position_bucket(
            distances,
            bidirectional=not module.is_decoder,
            num_buckets=module.relative_attention_num_buckets,
            max_distance=module.relative_attention_max_distance,
        )
        return args, {**kwargs, "position_bias": module.relative_attention_bias(buckets)}


def is_crossing(module: nn.Module) -> bool:
    """Whether a decoder's attention module looks at what an encoder made."""
    return bool(getattr(module, "is_decoder", False)) and not getattr(module, "is_causal", True)
