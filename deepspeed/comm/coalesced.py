"""Many tensors, one collective per dtype: pack, launch, unpack; without packing where the backend can batch itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as td
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.comm.dispatch import DEFAULT
from deepspeed.comm.groups import get_world_group, played_backend
from deepspeed.comm.operations import OPERATIONS, CommOperation, ReduceOp
from deepspeed.comm.pending import AllOf, CollectiveWork, Pending, WaitableWork
from deepspeed.errors import CommError

BATCHING = ("nccl", "fake")
"""Backends that launch several tensors as one fused operation, which saves both copies; torch's fake one plays NCCL."""

_broadcast_single = OPERATIONS["broadcast"].call
_gather_single = OPERATIONS["all_gather_into_tensor"].call
_scatter_single = OPERATIONS["reduce_scatter_tensor"].call
_run: Callable[..., CollectiveWork | None] = DEFAULT.run


def _settle(works: Sequence[WaitableWork], finish: Callable[[bool], bool], async_op: bool) -> Pending[bool] | None:
    pending = Pending(True, AllOf(works), finish)
    if async_op:
        return pending
    pending.wait()
    return None


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Positions of the tensors that can travel in one buffer, in order of first appearance (equal on all ranks)."""
    found: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        found.setdefault((tensor.dtype, tensor.device), []).append(index)
    return list(found.values())


def _batches_itself(group: ProcessGroup | None) -> bool:
    return played_backend(group) in BATCHING


def _real(group: ProcessGroup | None) -> ProcessGroup:
    return get_world_group() if group is None else group


def _line(tensor: Tensor) -> Tensor:
    """The tensor as one dim; itself if it has one, since every view counts where tensors are many and small."""
    return tensor if tensor.dim() == 1 and tensor.is_contiguous() else tensor.reshape(-1)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return _line(tensors[0]) if len(tensors) == 1 else torch.cat([_line(tensor) for tensor in tensors])


# --- all-reduce ---------------------------------------------------------------------------------------------------


def _all_reduce(tensors: list[Tensor], op: Any, group: ProcessGroup | None, async_op: bool) -> WaitableWork | None:
    works: list[WaitableWork] = []
    packed: list[tuple[list[Tensor], Tensor]] = []
    for positions in _by_dtype(tensors):
        some = [tensors[i] for i in positions]
        if _batches_itself(group):
            options = td.AllreduceCoalescedOptions()
            options.reduceOp = op
            works.append(_real(group).allreduce_coalesced(some, options))
            continue
        flat = _flat(some)
        works.append(td.all_reduce(flat, op, group, True))
        if len(some) > 1 or flat.data_ptr() != some[0].data_ptr():
            packed.append((some, flat))

    def unpack(result: bool) -> bool:
        for some, flat in packed:
            for tensor, part in zip(some, flat.split_with_sizes([t.numel() for t in some]), strict=True):
                tensor.copy_(part.view(tensor.shape))
        return result

    return _settle(works, unpack, async_op)


_ALL_REDUCE = CommOperation("all_reduce_coalesced", _all_reduce)


def all_reduce_coalesced(
    tensors: list[Tensor],
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: str | None = None,
) -> CollectiveWork | None:
    """Reduce every tensor of the list over the group, in place, on every rank."""
    return _run(_ALL_REDUCE, (tensors, op, group, async_op), tensors, group, async_op, (prof, log_name, debug))


# --- broadcast ----------------------------------------------------------------------------------------------------

_PACK_BYTES = 64 << 20


def _packs(tensors: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Tensors that travel together: of one dtype and device, in order, at most `limit` bytes unless it is one.

    Decided by dtypes, devices and shapes alone, so that all ranks have the same packs; how tensors lie in memory may
    differ.
    """
    for positions in _by_dtype(tensors):
        pack: list[Tensor] = []
        size = 0
        for tensor in (tensors[i].detach() for i in positions):
            if not tensor.numel():
                continue
            if pack and size + tensor.nbytes > limit:
                yield pack
                pack, size = [], 0
            pack.append(tensor)
            size += tensor.nbytes
        if pack:
            yield pack


@torch.no_grad()
def _broadcast(tensors: list[Tensor], src: int, group: ProcessGroup | None, limit_bytes: int) -> None:
    if td.get_rank(group) < 0:
        return  # not a member: what it has stays
    sends = td.get_rank() == src
    for pack in _packs(tensors, limit_bytes):
        if len(pack) == 1 and pack[0].is_contiguous():
            _broadcast_single(_bytes(pack[0].view(-1)), src, group)
            continue
        flat = _flat(pack) if sends else pack[0].new_empty(sum(tensor.numel() for tensor in pack))
        _broadcast_single(_bytes(flat), src, group)
        if not sends:
            parts = flat.split_with_sizes([tensor.numel() for tensor in pack])
            shaped = [part.view(tensor.shape) for tensor, part in zip(pack, parts, strict=True)]
            torch._foreach_copy_([_once(t, t) for t in pack], [_once(t, s) for t, s in zip(pack, shaped, strict=True)])


def _bytes(flat: Tensor) -> Tensor:
    """Backends know few dtypes, but all of them know this one."""
    return flat.view(torch.uint8)


def _once(expanded: Tensor, tensor: Tensor) -> Tensor:
    """`tensor`, of the shape of `expanded`, without what lies in the memory of the latter more than once."""
    for dim, stride in enumerate(expanded.stride()):
        tensor = tensor.narrow(dim, 0, 1) if stride == 0 else tensor
    return tensor


_BROADCAST = CommOperation("broadcast_coalesced", _broadcast, peer=1)


def broadcast_coalesced(
    tensors: list[Tensor], src: int, group: ProcessGroup | None = None, limit_bytes: int = _PACK_BYTES
) -> None:
    """Give every rank of the group the values that rank `src` (of the world) has in the tensors of the list.

    The list is the same everywhere: as many tensors, of the same dtypes and shapes. They travel in packs of at most
    `limit_bytes`, one pack at a time; a larger tensor travels by itself, without a copy if it is contiguous.
    """
    _run(_BROADCAST, (tensors, src, group, limit_bytes), tensors, group, False, (False, "broadcast_coalesced", None))


# --- all-gather ---------------------------------------------------------------------------------------------------


def _all_gather(
    outputs: list[Tensor], inputs: list[Tensor], group: ProcessGroup | None, async_op: bool
) -> WaitableWork | None:
    world = td.get_world_size(group)
    _check_outputs(outputs, inputs, world)
    works: list[WaitableWork] = []
    packed: list[tuple[list[int], Tensor]] = []
    for positions in _by_dtype(inputs):
        outs, ins = [_line(outputs[i]) for i in positions], [_line(inputs[i]) for i in positions]
        if _batches_itself(group):
            works.append(_real(group).allgather_into_tensor_coalesced(outs, ins))
        elif len(ins) == 1:
            works.append(_gather_single(outs[0], ins[0], group, True))
        else:
            flat = _flat(ins)
            gathered = flat.new_empty(world, flat.numel())  # [world, all inputs]
            works.append(_gather_single(gathered.view(-1), flat, group, True))
            packed.append((positions, gathered))

    def unpack(result: bool) -> bool:
        for positions, gathered in packed:
            sizes = [inputs[i].numel() for i in positions]
            rows = [outputs[i].view(world, size) for i, size in zip(positions, sizes, strict=True)]
            torch.split_with_sizes_copy(gathered, sizes, dim=1, out=rows)  # each [world, one input]
        return result

    return _settle(works, unpack, async_op)


def _all_gather_lines(outputs: list[Tensor], inputs: list[Tensor], group: ProcessGroup | None) -> WaitableWork:
    return _real(group).allgather_into_tensor_coalesced(outputs, inputs)  # type: ignore[no-any-return]


def _check_outputs(outputs: Sequence[Tensor], inputs: Sequence[Tensor], world: int) -> None:
    if len(outputs) != len(inputs):
        raise CommError(f"all_gather_coalesced got {len(outputs)} outputs for {len(inputs)} inputs. Give one each.")
    for index, (out, part) in enumerate(zip(outputs, inputs, strict=True)):
        if out.numel() != world * part.numel() or out.dtype != part.dtype or not out.is_contiguous():
            raise CommError(
                f"all_gather_coalesced: output {index} is {out.dtype}{list(out.shape)}, input {index} is "
                f"{part.dtype}{list(part.shape)} on each of {world} ranks. The output must be contiguous, of the same "
                f"dtype, with {world * part.numel()} elements."
            )


_ALL_GATHER = CommOperation("all_gather_coalesced", _all_gather)
_ALL_GATHER_LINES = CommOperation("all_gather_coalesced", _all_gather_lines)


def all_gather_coalesced(
    output_tensors: list[Tensor],
    input_tensors: list[Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> CollectiveWork | None:
    """Gather every rank's i-th input into the i-th output, concatenated by rank."""
    args = (output_tensors, input_tensors, group, async_op)
    return _run(_ALL_GATHER, args, input_tensors, group, async_op, (False, "all_gather_coalesced", None))


def all_gather_lines(outputs: list[Tensor], inputs: list[Tensor], group: ProcessGroup | None) -> CollectiveWork | None:
    """Begin the same for tensors of one dtype that are flat, over a backend of `BATCHING`; nothing is checked."""
    log = (False, "all_gather_coalesced", None)
    return _run(_ALL_GATHER_LINES, (outputs, inputs, group), inputs, group, True, log)


# --- reduce-scatter -----------------------------------------------------------------------------------------------


def _pack_rows(tensors: Sequence[Tensor], chunks: Sequence[int], world: int) -> Tensor:
    """[world, sum of chunks]: row r holds chunk r of each tensor; the last chunks are padded with zeros."""
    rows = tensors[0].new_zeros(world, sum(chunks))
    offset = 0
    for tensor, chunk in zip(tensors, chunks, strict=True):
        flat = tensor.detach().reshape(-1)
        whole = flat.numel() // chunk if chunk else 0  # rows that this tensor fills
        rows[:whole, offset : offset + chunk].copy_(flat[: whole * chunk].view(whole, chunk))
        rest = flat[whole * chunk :]
        if rest.numel():
            rows[whole, offset : offset + rest.numel()].copy_(rest)
        offset += chunk
    return rows


def _reduce_scatter(
    tensors: list[Tensor], shards: list[Tensor], op: Any, group: ProcessGroup | None, async_op: bool
) -> WaitableWork | None:
    world, rank = td.get_world_size(group), td.get_rank(group)
    works: list[WaitableWork] = []
    packed: list[tuple[list[int], list[int], Tensor]] = []
    for positions in _by_dtype(tensors):
        some = [tensors[i] for i in positions]
        chunks = [-(-tensor.numel() // world) for tensor in some]
        rows = _pack_rows(some, chunks, world)
        if op == ReduceOp.AVG:
            rows.div_(world)  # before the sum: in half precision the sum itself could overflow
        mine = rows.new_empty(rows.shape[1])
        works.append(_scatter_single(mine, rows.view(-1), ReduceOp.SUM if op == ReduceOp.AVG else op, group, True))
        packed.append((positions, chunks, mine))
    for positions, chunks, mine in packed:
        for index, chunk, part in zip(positions, chunks, mine.split_with_sizes(chunks), strict=True):
            shards[index] = part[: max(0, min(chunk, tensors[index].numel() - rank * chunk))]
    return _settle(works, bool, async_op)


_REDUCE_SCATTER = CommOperation("reduce_scatter_coalesced", _reduce_scatter)


def reduce_scatter_coalesced(
    tensors: list[Tensor], group: ProcessGroup | None = None, op: Any = ReduceOp.AVG, async_op: bool = False
) -> list[Tensor] | Pending[list[Tensor]]:
    """Reduce each tensor (by default to the mean) and give this rank its shard of each.

    A tensor's flat elements are cut into equal chunks, one per rank, the last ones shorter or empty where it does
    not divide; shards are 1-D. The inputs are left as they are.
    """
    shards = [tensor.detach().reshape(-1)[:0] for tensor in tensors]
    args = (tensors, shards, op, group, async_op)
    work = _run(_REDUCE_SCATTER, args, tensors, group, async_op, (False, "reduce_scatter_coalesced", None))
    return Pending(shards, work) if async_op else shards
