"""Rows in the order of their experts and back: indices of published forms, moved by the kernels of `dispatch`.

A permutation is a tensor [places]: the row that lies at each place, −1 where none does. A row has one place at most.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from deepspeed.errors import UsageError
from deepspeed.moe.dispatch import Dispatch
from deepspeed.ops.model.assignments import Places
from deepspeed.ops.model.device import takes_rows

__all__ = [
    "fill_indices_cpu",
    "fill_indices_wrapper",
    "gather_rows",
    "generate_permute_indices",
    "indices_padding_wrapper",
    "inverse_permutation",
    "permute_rows",
    "permute_rows_supported",
    "unpermute_rows",
]

_ALIGNED = 8  # rows: what grouped products of 16-bit numbers like best

Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(w1, w2, w3, rows, rows of each expert) → rows."""


def fill_indices_cpu(
    tokens_per_expert_group: Tensor,
    start_index_values: Tensor,
    write_offsets: Tensor,
    experts_per_rank: int,
    num_ranks: int,
    max_len: int,
) -> Tensor:
    """[max_len], int32: which row lies where, once those of every expert are together; −1 where none does.

    Rows come as [rank][expert]: `tokens_per_expert_group` of them each, from `start_index_values` on. Those of an
    expert, of all ranks in order, are to lie from its `write_offsets` on.
    """
    lengths = tokens_per_expert_group.view(num_ranks, experts_per_rank).t()  # [expert, rank]
    starts = start_index_values.view(num_ranks, experts_per_rank).t().reshape(-1)
    begins = (write_offsets.view(-1, 1) + lengths.cumsum(1) - lengths).reshape(-1)
    lengths = lengths.reshape(-1)
    order = torch.argsort(2 * begins + (lengths > 0), stable=True)  # of those that begin together the last has rows
    places = torch.arange(max_len, device=lengths.device)
    run = order[torch.searchsorted(begins[order].contiguous(), places, right=True).sub_(1).clamp_(min=0)]
    within = places - begins[run]
    filled = (within >= 0) & (within < lengths[run])
    return torch.where(filled, starts[run] + within, -1).to(torch.int32)


def fill_indices_wrapper(
    tokens_per_expert_group: Tensor,
    start_index_values: Tensor,
    write_offsets: Tensor,
    experts_per_rank: int,
    num_ranks: int,
    max_len: int,
    block_size: int = 128,
    max_blocks: int = 1024,
) -> Tensor:
    """`fill_indices_cpu` on any device.

    `block_size` and `max_blocks` are those of a kernel that writes run by run; places are looked up here instead.
    """
    return fill_indices_cpu(
        tokens_per_expert_group, start_index_values, write_offsets, experts_per_rank, num_ranks, max_len
    )


def generate_permute_indices(
    tokens_per_expert_group: Tensor,
    experts_per_rank: int,
    num_ranks: int,
    max_len: int,
    alignment: int,
    use_cpu: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(permutation [max_len], rows of each expert, where each ends), int32, of rows that come as [rank][expert].

    Every expert gets a multiple of `alignment` places, and that many if it has no row. `use_cpu` computes on the host.
    """
    if tokens_per_expert_group.numel() != experts_per_rank * num_ranks:
        raise UsageError(
            f"tokens_per_expert_group has {tokens_per_expert_group.numel()} numbers, but {num_ranks} ranks with "
            f"{experts_per_rank} experts each need {experts_per_rank * num_ranks}"
        )
    home = tokens_per_expert_group.device
    counts = tokens_per_expert_group.reshape(-1).to("cpu" if use_cpu else home, torch.int64)
    totals = counts.view(num_ranks, experts_per_rank).sum(0).clamp(min=alignment)
    sizes = (totals + alignment - 1) // alignment * alignment
    ends = sizes.cumsum(0)
    if ends.device.type == "cpu" and int(ends[-1]) > max_len:
        raise UsageError(f"max_len is {max_len}, but the rows of all experts need {int(ends[-1])} places; give more")
    indices = fill_indices_cpu(counts, counts.cumsum(0) - counts, ends - sizes, experts_per_rank, num_ranks, max_len)
    return indices.to(home), sizes.to(home, torch.int32), ends.to(home, torch.int32)


def gather_rows(src: Tensor, index: Tensor) -> Tensor:
    """[places, …] of [rows, …]: any rows, as often as they are asked for; zeros for −1."""
    if len(src) == 0:
        return src.new_zeros(len(index), *src.shape[1:])
    picked = src.index_select(0, index.clamp(min=0))
    return picked.masked_fill((index < 0).view(-1, *[1] * (src.dim() - 1)), 0)


def inverse_permutation(permuted_indices: Tensor, num_rows: int) -> Tensor:
    """[num_rows]: the place of each row; −1 for one that has none."""
    return _places_of(permuted_indices, num_rows, absent=-1)


def permute_rows(rows: Tensor, permuted_indices: Tensor) -> Tensor:
    """[places, M] of [rows, M]; places without a row are 0."""
    count = len(permuted_indices)
    places = _places_of(permuted_indices.long(), len(rows), absent=count)
    return Dispatch(Places(places.unsqueeze(0), count, full=False)).to_rows(rows)


def unpermute_rows(rows: Tensor, permuted_indices: Tensor, num_rows: int) -> Tensor:
    """[num_rows, M] of [places, M]: what `permute_rows` moved, where it came from; rows without a place are 0."""
    places = torch.where(permuted_indices < 0, num_rows, permuted_indices).long()
    return Dispatch(Places(places.unsqueeze(0), num_rows, full=False)).to_rows(rows)


def permute_rows_supported(rows: Tensor) -> bool:
    """Whether kernels move such rows [rows, M]; else torch does."""
    return rows.dim() == 2 and takes_rows(rows)


def indices_padding_wrapper(func: Experts) -> Experts:
    """A function of experts that is given whole multiples of rows, for rows that come as [rank][expert] in any number.

    Numbers of rows [ranks × experts] become those of this rank's experts, and every row comes back to its place.
    """

    @functools.wraps(func)
    def padded(w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        experts = len(w1)
        ranks = num_tokens_per_expert.numel() // experts
        room = -(-len(x) // _ALIGNED) * _ALIGNED + experts * _ALIGNED
        indices, sizes, _ = generate_permute_indices(num_tokens_per_expert, experts, ranks, room, _ALIGNED)
        return unpermute_rows(func(w1, w2, w3, permute_rows(x, indices), sizes), indices, len(x))

    return padded


def _places_of(permuted_indices: Tensor, num_rows: int, *, absent: int) -> Tensor:
    """[num_rows]: the place of each row, `absent` for one that has none."""
    places = torch.full((num_rows + 1,), absent, dtype=permuted_indices.dtype, device=permuted_indices.device)
    target = torch.where(permuted_indices < 0, num_rows, permuted_indices).long()
    places[target] = torch.arange(len(target), dtype=places.dtype, device=places.device)
    return places[:num_rows]
