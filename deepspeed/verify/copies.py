"""What must be equal: copies on several ranks, and states between two steps."""

from __future__ import annotations

import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.ops.onebit.base import OneBitOptimizer
from deepspeed.parallel import AxisGroup
from deepspeed.verify.findings import Finding, bits, first_of
from deepspeed.verify.fingerprints import Fingerprint, sum_of_bits
from deepspeed.verify.random_states import flaw, random_states
from deepspeed.zero.interface import ShardGroup, StatePiece, plain_data, shard_of, writes

if TYPE_CHECKING:
    from deepspeed.runtime.parts import Parts

_MOST_NAMED = 4
"""Tensors of an axis that are compared element by element, once their sums differ."""


@dataclass(frozen=True)
class EqualCopies:
    """A tensor of which the ranks of an axis hold equal copies."""

    axis: AxisGroup
    name: str
    tensor: Tensor


def states_of(parts: Parts, group: ShardGroup, piece: StatePiece) -> Iterator[tuple[str, Tensor]]:
    """What the optimizer keeps of a piece, by name; not what lies in files."""
    if piece.arena is not None and piece.arena.swap is not None:
        return
    if not (group.whole and piece.master is piece.param):
        yield f"master of {piece.name}", piece.master.detach()
    known = {} if parts.basic_optimizer is None else parts.basic_optimizer.state.get(piece.master, {})
    for key in sorted(known):
        value = known[key]
        if isinstance(value, (int, float)):
            yield f"{key} of {piece.name}", torch.tensor(value, dtype=torch.float64)
        elif isinstance(value, Tensor):
            yield f"{key} of {piece.name}", value.detach()


def replicas(parts: Parts) -> Iterator[EqualCopies]:
    """Everything that is equal on several ranks: whole parameters, replicated states, numbers of the optimizer."""
    optimizer, states = parts.basic_optimizer, parts.states
    apart = isinstance(optimizer, OneBitOptimizer)  # its errors, and for a while its parameters, are those of a rank
    for name, param in () if apart else parts.module.named_parameters():
        shard, axis = shard_of(param), parts.lies_on(param)
        if axis.size > 1 and (shard is None or (shard.persistent and shard.whole)):
            yield EqualCopies(axis, name, plain_data(param).detach())
    for group in states.groups if states is not None and not apart else ():
        copies = group.placement.replicate
        if copies is not None and copies.size > 1:
            for piece in group.pieces:
                yield from (EqualCopies(copies, name, tensor) for name, tensor in states_of(parts, group, piece))
    if parts.layout.samples.size > 1:
        for name, number in _numbers(parts):
            yield EqualCopies(parts.layout.samples, name, torch.tensor(number, dtype=torch.float64))


def _numbers(parts: Parts) -> Iterator[tuple[str, float]]:
    yield "the loss scale", parts.scale.value
    groups = [] if parts.basic_optimizer is None else parts.basic_optimizer.param_groups
    for place, group in enumerate(groups):
        for key in sorted(group):
            for value in group[key] if isinstance(group[key], tuple) else (group[key],):
                if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
                    yield f"{key} of parameter group {place}", float(value)


def compare_replicas(parts: Parts) -> list[Finding]:
    """Findings of copies that differ; on all ranks together, one exchange for each axis where nothing differs."""
    axes: dict[tuple[int, ...], list[EqualCopies]] = {}
    for each in replicas(parts):
        axes.setdefault(each.axis.ranks, []).append(each)
    found: list[Finding] = []
    for held in axes.values():
        axis = held[0].axis
        differ = unequal(torch.stack([sum_of_bits(each.tensor).to(parts.device) for each in held]), axis.group)
        for place in differ[:_MOST_NAMED]:
            finding = compare_with_most(held[place].tensor, held[place].name, axis, parts.device)
            if finding is not None:
                found.append(finding)
    return found


def unequal(numbers: Tensor, group: Any) -> list[int]:
    """Places at which a vector of int64 is not the same on all ranks of a group."""
    both = torch.cat([numbers, ~numbers])
    with comm.labelled("verify: sums of copies"):
        comm.all_reduce(both, op=comm.ReduceOp.MAX, group=group)
    highest, lowest = both.chunk(2)
    places: list[int] = (highest != ~lowest).nonzero().view(-1).tolist()
    return places


def compare_with_most(tensor: Tensor, name: str, axis: AxisGroup, device: torch.device) -> Finding | None:
    """The first element that is not what most ranks have, the first rank where there is no majority."""
    sums: list[Any] = [None] * axis.size
    right = tensor.to(device, copy=True).contiguous()
    with comm.labelled(f"verify: copies of {name}"):
        comm.all_gather_object(sums, int(sum_of_bits(tensor)), group=axis.group)
        most = Counter(sums).most_common(1)[0][0]
        reference = axis.ranks[sums.index(most)]
        comm.broadcast(right, src=reference, group=axis.group)
    mine = tensor.to(device)
    wrong = (bits(mine) != bits(right)).view(-1, max(bits(mine).numel() // max(mine.numel(), 1), 1)).any(1)
    rank, shape = comm.get_rank(), tuple(tensor.shape)
    source = f"the copy of rank {reference}"
    return first_of(wrong, mine, right, rank=rank, tensor=name, source=source, shape=shape)


class Configs:
    """The configs of all ranks, which are compared once."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self._rows: dict[str, str] | None = dict(_flat(raw))

    def compare(self, device: torch.device) -> list[Finding]:
        """The first key that differs from that of rank 0."""
        rows, self._rows = self._rows, None
        if rows is None or comm.get_world_size() == 1:
            return []
        digest = zlib.crc32(json.dumps(rows, sort_keys=True).encode())
        if not unequal(torch.tensor([digest], device=device), None):
            return []
        everyone: list[Any] = [None] * comm.get_world_size()
        comm.all_gather_object(everyone, rows)
        key = next((key for key in sorted({*rows, *everyone[0]}) if rows.get(key) != everyone[0].get(key)), None)
        if key is None:
            return []
        values = rows.get(key, "absent"), everyone[0].get(key, "absent")
        return [Finding(comm.get_rank(), f"the config's {key}", *values, "the config of rank 0")]


def _flat(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Rows of a config; paths of files are left out, because each host may have its own."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(part, f"{path}.{key}" if path else str(key))
    elif not (isinstance(value, str) and os.sep in value):
        yield path, repr(value)


class RandomStates:
    """What random generators were at the last check."""

    def __init__(self) -> None:
        self._before = random_states()

    def compare(self, parts: Parts) -> list[Finding]:
        """Findings of generators that are where drawing numbers did not bring them; on all ranks together.

        Where no rank's is, the script has set them.
        """
        axis, found = parts.layout.samples, []
        before, self._before = self._before, random_states()
        for device, now in self._before.items() if axis.size > 1 else ():
            if not unequal(sum_of_bits(now).view(1).to(parts.device), axis.group) or device not in before:
                continue
            wrong = flaw(before[device], now)
            verdicts: list[Any] = [None] * axis.size
            comm.all_gather_object(verdicts, wrong is None, group=axis.group)
            if wrong is not None and any(verdicts):
                place, value, expected, count = wrong
                name = f"the state of the random generator of {device}"
                source = "drawing on from the last check"
                found.append(Finding(comm.get_rank(), name, value, expected, source, (place,), count))
        return found


@dataclass(frozen=True)
class _AtRest:
    tensor: Tensor
    written: tuple[int, ...]
    fingerprint: Fingerprint


class StatesAtRest:
    """Optimizer states and published shards of this rank, of which nothing is written between two steps."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._kept = {
            name: _AtRest(tensor, written, Fingerprint.of(tensor)) for name, tensor, written, _ in self._held()
        }

    def compare(self) -> list[Finding]:
        """Findings of those that changed, though nothing wrote them; no communication."""
        found = []
        for name, tensor, written, piece in self._held():
            kept = self._kept.get(name)
            if kept is None or kept.tensor.data_ptr() != tensor.data_ptr() or kept.written != written:
                continue
            if not kept.fingerprint.same(Fingerprint.of(tensor)):
                start, stop = piece.interval
                part = tensor.numel() == stop - start
                shape, offset = (tuple(piece.shape), start) if part else (tuple(tensor.shape), 0)
                found.append(kept.fingerprint.find(tensor, name, comm.get_rank(), shape, offset))
        return found

    def _held(self) -> Iterator[tuple[str, Tensor, tuple[int, ...], StatePiece]]:
        states = self._parts.states
        if states is None or states.deferral is not None:
            return
        states.settle()
        for group in states.groups:
            for piece in group.pieces:
                tensors = list(states_of(self._parts, group, piece))
                if piece.separate and not group.whole and piece.source.numel():
                    tensors.append((f"the published part of {piece.name}", piece.source.detach()))
                shard = shard_of(piece.param)
                edits = 0 if shard is None else shard.edits
                for name, tensor in tensors:
                    yield name, tensor, (tensor._version, writes(piece.param), edits), piece


def exchanged(findings: Sequence[Finding], device: torch.device) -> list[Finding]:
    """The findings of all ranks; one small reduction where there are none."""
    if comm.get_world_size() == 1:
        return list(findings)
    count = torch.tensor(len(findings), device=device)
    with comm.labelled("verify: is there a difference"):
        comm.all_reduce(count, op=comm.ReduceOp.MAX)
    if not int(count):
        return []
    everyone: list[Any] = [None] * comm.get_world_size()
    comm.all_gather_object(everyone, list(findings))
    return [finding for each in everyone for finding in each]
