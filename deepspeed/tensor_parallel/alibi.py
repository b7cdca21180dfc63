"""Biases by distance (ALiBi) for the heads of a rank, in the place of functions of models that make them for all heads.

The ranks are the tensor-parallel ones of the current layout, or those of the world where it has none. Models that
`tensor_parallel.autotp_size` splits take their heads of such biases by themselves and need none of this.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.parallel import current_layout
from deepspeed.tensor_parallel.shard_sizes import AutoTPMeta, get_shard_size_list

__all__ = ["build_bloom_alibi_tensor", "build_mpt_alibi_tensor", "get_alibi_mask", "install_head_sharded_helper"]


def build_bloom_alibi_tensor(
    attention_mask: Tensor,
    num_heads: int,
    dtype: torch.dtype,
    mp_group: ProcessGroup | None = None,
    head_shard_sizes: Sequence[int] | None = None,
    total_num_heads: int | None = None,
) -> Tensor:
    """[batch, keys], 1 for tokens and 0 for padding → [batch × heads of this rank, 1, keys].

    `num_heads` are all heads, unless `total_num_heads` are; `head_shard_sizes` are those of each rank.
    """
    share = _Share(total_num_heads or num_heads, mp_group, head_shard_sizes)
    slopes = share.own(_slopes(share.heads, 8.0, attention_mask.device))
    places = ((attention_mask.cumsum(-1) - 1) * attention_mask)[:, None, :]
    alibi = slopes[..., None] * places
    return alibi.reshape(-1, 1, attention_mask.shape[1]).to(dtype)


def build_mpt_alibi_tensor(
    self: Any,
    num_heads: int,
    sequence_length: int,
    alibi_bias_max: float = 8,
    device: Any = None,
    mp_group: ProcessGroup | None = None,
    head_shard_sizes: Sequence[int] | None = None,
    total_num_heads: int | None = None,
) -> Tensor:
    """[heads of this rank, 1, keys], as a method of MPT's model; zero at the last key."""
    share = _Share(total_num_heads or num_heads, mp_group, head_shard_sizes)
    count = 2 ** math.ceil(math.log2(share.heads))
    steps = torch.arange(1, count + 1, device=device).float() * (alibi_bias_max / count)
    slopes = 1.0 / torch.pow(2, steps)
    if count != share.heads:
        slopes = torch.cat([slopes[1::2], slopes[::2]])[: share.heads]
    distances = torch.arange(1 - sequence_length, 1, device=device)
    return share.own(slopes)[:, None, None] * distances


def get_alibi_mask(
    self: Any,
    tensor: Tensor,
    seq_length_with_past: int,
    mp_group: ProcessGroup | None = None,
    head_shard_sizes: Sequence[int] | None = None,
    total_num_heads: int | None = None,
) -> Tensor:
    """[heads of this rank, queries, keys], with -inf for the future, as a method of Baichuan's model.

    `self.n_head` are all heads, unless `total_num_heads` are; `tensor` tells dtype and device.
    """
    share = _Share(total_num_heads or self.n_head, mp_group, head_shard_sizes)
    slopes = share.own(_slopes(share.heads, 8.0, tensor.device))
    places = torch.arange(seq_length_with_past, device=tensor.device)
    alibi = slopes[:, None, None] * (places[None, :] - places[:, None])
    future = torch.ones_like(alibi[0], dtype=torch.bool).triu(1)
    return alibi.masked_fill(future, -math.inf).to(tensor.dtype)


def install_head_sharded_helper(
    module: nn.Module, name: str, wrapper: Callable[..., Tensor], meta: AutoTPMeta, mp_group: ProcessGroup | None = None
) -> None:
    """Put one of these functions in the place of a module's own method; the method stays as `<name>_orig`.

    `meta` tells the heads; other modules of the class keep their method.
    """
    heads = meta.num_attention_heads or meta.num_kv_heads
    if heads is None:
        raise UsageError("install_head_sharded_helper: meta does not tell the number of heads")
    sizes = get_shard_size_list(heads, _place(mp_group)[1], AutoTPMeta(num_kv_heads=meta.num_kv_heads or heads))
    told = {"mp_group": mp_group, "head_shard_sizes": sizes, "total_num_heads": heads}
    first = next(iter(inspect.signature(wrapper).parameters))
    bound = functools.partial(wrapper, *([module] if first == "self" else []), **told)
    object.__setattr__(module, f"{name}_orig", getattr(module, name))
    object.__setattr__(module, name, bound)


def _slopes(heads: int, most: float, device: Any) -> Tensor:
    """One for each head: powers of 2, and between them where heads are no power of 2."""
    count = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-most / count * (at + 1)) for at in range(count)]
    slopes += [2.0 ** (-most / (2 * count) * (2 * at + 1)) for at in range(heads - count)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


@dataclass(frozen=True)
class _Share:
    """The heads of this rank among those of all."""

    heads: int
    group: ProcessGroup | None
    sizes: Sequence[int] | None

    def own(self, slopes: Tensor) -> Tensor:
        rank, size = _place(self.group)
        sizes = self.sizes or get_shard_size_list(self.heads, size, AutoTPMeta(num_kv_heads=self.heads))
        return torch.split(slopes, list(sizes))[rank]


def _place(group: ProcessGroup | None) -> tuple[int, int]:
    """(rank, size) of those who share heads."""
    if not comm.is_initialized():
        return 0, 1
    axis = current_layout.get()["tp"]
    if group is None and axis.size > 1:
        return axis.rank, axis.size
    return comm.get_rank(group), comm.get_world_size(group)
