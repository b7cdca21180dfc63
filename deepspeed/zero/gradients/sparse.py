"""Sparse gradients between ranks: only the rows that some rank touched travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.comm import Pending
from deepspeed.zero.gradients.reduction import EvenShares, ReduceToOwners, Share, WholeShares, dense_lengths


@dataclass(eq=False)
class RowsToOwners(ReduceToOwners):
    """Of each owner's slice only the rows travel that are not zero, in an exchange among all ranks.

    A row is `width` elements of the slice, counted from its start. It may hold parts of two rows of a parameter.
    """

    width: int = 1

    @property
    def few(self) -> int:
        return self.size

    def _scatter(self, send: Tensor, share: Share) -> Pending[Tensor]:
        if isinstance(share, WholeShares):
            return super()._scatter(send, share)
        lengths = [share.length] * self.size if isinstance(share, EvenShares) else dense_lengths(share, self.size)
        rows = [_rows(part, self.width) for part in send.split(lengths)]
        touched = [part.any(dim=1).nonzero().squeeze(1) for part in rows]
        sent = torch.tensor([len(indices) for indices in touched], device=send.device)
        came = sent.clone()
        comm.all_to_all_single(came, sent, group=self.group)
        outs, ins = came.tolist(), sent.tolist()
        values = torch.cat([part[indices] for part, indices in zip(rows, touched, strict=True)])
        found, places = values.new_empty(sum(outs), self.width), touched[0].new_empty(sum(outs))
        comm.all_to_all_single(places, torch.cat(touched), outs, ins, group=self.group)
        work = comm.all_to_all_single(found, values, outs, ins, group=self.group, async_op=True)
        mine, length = rows[self.rank], lengths[self.rank]

        def add(_: Tensor) -> Tensor:
            mine.zero_()
            for indices, part in zip(places.split(outs), found.split(outs), strict=True):  # in the order of the ranks
                if len(indices):
                    mine.index_add_(0, indices, part)
            return mine.view(-1)[:length]

        return Pending(mine, work, add)


def _rows(flat: Tensor, width: int) -> Tensor:
    """A slice as rows, the last one filled up with zeros."""
    rest = -len(flat) % width
    return (torch.cat([flat, flat.new_zeros(rest)]) if rest else flat).view(-1, width)


def row_widths(module: nn.Module, *, all_rows: bool) -> dict[int, int]:
    """How long the rows of embeddings are whose gradients are sparse, or asked for as touched rows, by id."""
    chosen = frozenset[int]().union(*embedding_parameters(module, all_rows=all_rows))
    embeddings = (part for part in module.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag)))
    return {id(part.weight): part.embedding_dim for part in embeddings if id(part.weight) in chosen}


def embedding_parameters(module: nn.Module, *, all_rows: bool) -> tuple[frozenset[int], frozenset[int]]:
    """(ids of parameters with sparse gradients, ids of dense ones whose touched rows are to travel).

    The first are those of embeddings built with `sparse=True`; the second, asked for with `all_rows`, of the others.
    """
    sparse, rows = set(), set()
    for part in module.modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            if part.sparse:
                sparse.add(id(part.weight))
            elif all_rows:
                rows.add(id(part.weight))
    return frozenset(sparse), frozenset(rows - sparse)


@torch.no_grad()
def reduce_sparse(param: nn.Parameter, group: Any, size: int, factor: float) -> Tensor | None:
    """The sum over ranks of a sparse gradient times `factor`; None if no rank has one."""
    grad = param.grad
    if grad is not None and not grad.is_sparse:
        grad = _touched(grad)
    found = _gather(grad, param, group, size, factor)
    if found is None:
        return None
    indices, values = found
    return torch.sparse_coo_tensor(indices.unsqueeze(0), values, param.shape, check_invariants=False).coalesce()


@torch.no_grad()
def reduce_rows(param: nn.Parameter, group: Any, size: int, factor: float) -> Tensor | None:
    """The sum over ranks of a dense gradient times `factor`, of which only the touched rows travel."""
    grad = param.grad
    found = _gather(None if grad is None else _touched(grad), param, group, size, factor)
    if found is None:
        return None
    indices, values = found
    return torch.zeros_like(param).index_add_(0, indices, values)


@torch.no_grad()
def sparse_allreduce(sparse: Tensor, dp_group: Any, dp_world_size: int | None = None) -> Tensor:
    """The mean over a group of sparse gradients; divided by `dp_world_size`, if that is given."""
    size = comm.get_world_size(dp_group)
    found = _gather(sparse, sparse, dp_group, size, 1.0 / (dp_world_size or size))
    assert found is not None, "this rank has a gradient"
    indices, values = found
    return torch.sparse_coo_tensor(indices.unsqueeze(0), values, sparse.shape, check_invariants=False).coalesce()


def sparse_allreduce_bucket(bucket: list[Tensor], dp_group: Any, dp_world_size: int | None = None) -> list[Tensor]:
    """`sparse_allreduce` of each."""
    return [sparse_allreduce(each, dp_group, dp_world_size) for each in bucket]


@torch.no_grad()
def sparse_allreduce_no_retain(bucket: list[Tensor], dp_group: Any, dp_world_size: int | None = None) -> None:
    """`sparse_allreduce` of each, in its place."""
    for each, mean in zip(bucket, sparse_allreduce_bucket(bucket, dp_group, dp_world_size), strict=True):
        each.copy_(mean)


@torch.no_grad()
def sparse_all_gather(value: Tensor, dp_group: Any) -> list[Tensor]:
    """What each rank of a group has, of any length."""
    size, length = comm.get_world_size(dp_group), torch.tensor([len(value)], device=value.device)
    lengths = length.new_empty(size)
    comm.all_gather_into_tensor(lengths, length, group=dp_group)
    counts = lengths.tolist()
    rows = _padded_gather(value, max(counts), size, dp_group).view(size, max(counts), *value.shape[1:])
    return [row[:count] for row, count in zip(rows, counts, strict=True)]


def _touched(grad: Tensor) -> Tensor:
    """A dense gradient as a sparse one of its rows that are not zero."""
    rows = grad.reshape(grad.shape[0], -1).any(dim=1).nonzero().squeeze(1)
    return torch.sparse_coo_tensor(rows.unsqueeze(0), grad[rows], grad.shape, check_invariants=False, is_coalesced=True)


def _gather(grad: Tensor | None, param: Tensor, group: Any, size: int, factor: float) -> tuple[Tensor, Tensor] | None:
    """Every rank's (rows, values), one after the other in rank order; None if no rank has a gradient."""
    if grad is None:
        indices = torch.zeros(0, dtype=torch.long, device=param.device)
        values = torch.zeros(0, *param.shape[1:], dtype=param.dtype, device=param.device)
    else:
        grad = grad.coalesce()
        indices, values = grad.indices()[0], grad.values() * factor
    mine = torch.tensor([indices.numel(), grad is not None], dtype=torch.long, device=param.device)
    counts = torch.empty(size * 2, dtype=torch.long, device=param.device)
    comm.all_gather_into_tensor(counts, mine, group=group)
    table = counts.view(size, 2).tolist()
    if not any(present for _, present in table):
        return None
    longest = max(count for count, _ in table)
    if longest == 0:
        return indices, values
    all_indices = _padded_gather(indices, longest, size, group)
    all_values = _padded_gather(values, longest, size, group)
    kept = [slice(rank * longest, rank * longest + count) for rank, (count, _) in enumerate(table)]
    return torch.cat([all_indices[part] for part in kept]), torch.cat([all_values[part] for part in kept])


def _padded_gather(tensor: Tensor, length: int, size: int, group: Any) -> Tensor:
    padded = tensor.new_zeros(length, *tensor.shape[1:])
    padded[: tensor.shape[0]] = tensor
    out = tensor.new_empty(size * length, *tensor.shape[1:])
    comm.all_gather_into_tensor(out, padded, group=group)
    return out
