"""Means of tensors to the ranks that own their shards, as int4 codes in two hops: calls for scripts and old paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakIdKeyDictionary

from deepspeed import comm
from deepspeed.comm.codec import block_codec
from deepspeed.errors import UsageError
from deepspeed.zero.gradients.coded import ErrorMemory

_CODEC = block_codec("int4")
_memories = WeakIdKeyDictionary()  # what codes of a parameter's gradients lost, as long as it lives


def all_to_all_quant_reduce(tensors: Sequence[Tensor], groups: Mapping[str, ProcessGroup]) -> list[Tensor]:
    """This rank's shard of the mean of each tensor, 1-D, as `reduce_scatter_coalesced` cuts it.

    `groups` has this rank's node as `local_<i>` and the ranks of its place in all nodes as `global_<i>`. Nodes have
    equal numbers of neighbouring ranks.
    """
    return _reduce(tensors, groups, [None] * len(tensors))


def all_to_all_loco_quant_reduce(
    params: Sequence[Tensor], groups: Mapping[str, ProcessGroup], loco_param: Mapping[str, Any]
) -> list[Tensor]:
    """As `all_to_all_quant_reduce` of the parameters' gradients; what codes lose is added to the next ones (LoCo).

    `loco_param` has `err_beta` and `reset_T`, the calls after which errors are forgotten.
    """
    beta, period = loco_param.get("err_beta"), loco_param.get("reset_T")
    if beta is None or period is None or not 0 <= beta < 1 or period < 1:
        raise UsageError(
            f"all_to_all_loco_quant_reduce: loco_param is {dict(loco_param)}; expected err_beta from 0 to below 1 and "
            "reset_T of 1 or more"
        )
    missing = [number for number, param in enumerate(params) if param.grad is None]
    if missing:
        raise UsageError(f"all_to_all_loco_quant_reduce: params {missing} have no gradient; call it after a backward")
    memories = [_memories.setdefault(param, ErrorMemory(beta, period)) for param in params]
    shards = _reduce([param.grad for param in params if param.grad is not None], groups, memories)
    for memory in memories:
        memory.beta, memory.period = beta, period
        memory.stepped()
    return shards


@torch.no_grad()
def _reduce(
    tensors: Sequence[Tensor], groups: Mapping[str, ProcessGroup], memories: Sequence[ErrorMemory | None]
) -> list[Tensor]:
    if not tensors:
        return []
    within, across = (_group(groups, kind) for kind in ("local", "global"))
    local, nodes = comm.get_world_size(within), comm.get_world_size(across)
    world, place = local * nodes, comm.get_rank(across) * local + comm.get_rank(within)
    chunks = [-(-tensor.numel() // world) for tensor in tensors]
    rows = []
    for tensor, chunk in zip(tensors, chunks, strict=True):
        padded = torch.nn.functional.pad(tensor.reshape(-1).float(), (0, chunk * world - tensor.numel()))
        rows.append(padded.view(nodes, local, chunk).transpose(0, 1))  # [to whom, of which node, elements]
    for hop, group in enumerate((within, across)):
        sums = _exchange(rows, memories, hop, group)
        rows = [each.unsqueeze(1) for each in sums]  # of the second hop: [to whom, 1, elements]
    shards = []
    for tensor, chunk, total in zip(tensors, chunks, rows, strict=True):
        length = min(max(tensor.numel() - place * chunk, 0), chunk)
        shards.append((total.reshape(-1)[:length] / world).to(tensor.dtype))
    return shards


def _exchange(rows: Sequence[Tensor], memories: Sequence[ErrorMemory | None], hop: int, group: Any) -> list[Tensor]:
    """Of each tensor `[ranks, n, elements]` the sum `[n, elements]` of what all ranks of a group have for this one."""
    ranks = comm.get_world_size(group)
    sizes = [value.shape[1] * _CODEC.nbytes(value.shape[2]) for value in rows]
    sent = torch.empty(ranks, sum(sizes), dtype=torch.uint8, device=rows[0].device)
    for value, memory, part in zip(rows, memories, sent.split(sizes, dim=1), strict=True):
        value = value.contiguous()
        message = _CODEC.encode(value) if memory is None else memory.encode(_CODEC, str(hop), value)
        part.copy_(message.view(ranks, -1))
    came = torch.empty_like(sent)
    with comm.labelled(f"{_CODEC.name} codes of tensors", codec=_CODEC.name):
        comm.all_to_all_single(came.view(-1), sent.view(-1), group=group)
    sums = []
    for value, part in zip(rows, came.split(sizes, dim=1), strict=True):
        out = torch.empty(value.shape[1:], dtype=torch.float32, device=value.device)
        sums.append(_CODEC.decode_sum(part.contiguous().view(ranks, value.shape[1], -1), out))
    return sums


def _group(groups: Mapping[str, ProcessGroup], kind: str) -> ProcessGroup:
    """The group of this kind that this rank is in."""
    rank = comm.get_rank()
    for name, group in groups.items():
        mine = isinstance(group, ProcessGroup) and rank in comm.get_process_group_ranks(group)
        if mine and name.startswith(f"{kind}_"):
            return group
    raise UsageError(
        f"all_to_all_quant_reduce: groups has {sorted(groups)}, and none of the names that begin with '{kind}_' is a "
        f"group with rank {rank}; give local_<i>, the ranks of its node, and global_<i>, those of its place in each"
    )
