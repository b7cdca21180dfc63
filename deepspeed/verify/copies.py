"""What must be equal: copies on several ranks, and states between two steps.

[Note: sums of rows and columns] The bits of a tensor are read as integers and laid out as a matrix. The sums of its
rows and columns are kept. A change of one element changes one row and one column by the same amount: so the place and
the former value of the element are known without a copy of the tensor.

[Note: random states] Scripts may seed ranks alike or not, and draw as often as they like. What they cannot do is to
reach a state that the generator does not pass through. So a state is judged by drawing on from the one that was seen
before, or from its seed.
"""

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


_COLUMNS = 4096


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor in the widest integers that fit its place in memory."""
    flat = bits(tensor)
    size, at = flat.element_size(), int(flat.storage_offset())
    for wide in (8, 4, 2):
        ratio = wide // size
        if ratio > 1 and at % ratio == 0 and flat.numel() % ratio == 0 and flat.data_ptr() % wide == 0:
            return flat.view(WORDS[wide])
    return flat


@dataclass(frozen=True)
class Fingerprint:
    """See [Note: sums of rows and columns]."""

    rows: Tensor
    columns: Tensor
    rest: Tensor
    """What fills no row, as it was."""

    @classmethod
    def of(cls, tensor: Tensor) -> Fingerprint:
        """That of a tensor as it is now."""
        words = _words(tensor)
        whole = words.numel() // _COLUMNS * _COLUMNS
        matrix = words[:whole].view(-1, _COLUMNS)
        rest = words[whole:].clone()
        return cls(matrix.sum(1, dtype=torch.int64), matrix.sum(0, dtype=torch.int64), rest)

    def same(self, other: Fingerprint) -> bool:
        """True if the tensors had equal bits."""
        return torch.equal(self.rows, other.rows) and torch.equal(self.rest, other.rest)

    def find(self, tensor: Tensor, name: str, rank: int, shape: tuple[int, ...], offset: int) -> Finding:
        """What changed in a tensor that had this fingerprint; it begins at `offset` of one of that shape."""
        now, words = Fingerprint.of(tensor), _words(tensor)
        changed = (now.rest != self.rest).nonzero().view(-1)
        rows = (now.rows != self.rows).nonzero().view(-1)
        source = "the last time it was written"
        if len(changed):
            at = int(changed[0])
            before, word = self.rest[at], words.numel() - self.rest.numel() + at
        elif len(rows) == 1 and int((now.columns != self.columns).sum()) == 1:
            column = int((now.columns != self.columns).nonzero()[0])
            word = int(rows[0]) * _COLUMNS + column
            before = words[word] - (now.rows[rows[0]] - self.rows[rows[0]]).to(words.dtype)
        else:
            places = len(rows) * _COLUMNS * words.element_size() // tensor.element_size()
            return Finding(rank, name, "changed in several elements", "as it was", source, None, places)
        old = before.reshape(1).view(tensor.dtype)
        new = words[word : word + 1].clone().view(tensor.dtype)
        inside = int((bits(old) != bits(new)).to(torch.uint8).argmax())
        index = word * len(old) + inside
        return Finding(rank, name, new[inside].item(), old[inside].item(), source, place_of(offset + index, shape))


def sum_of_bits(tensor: Tensor) -> Tensor:
    """The sum of the bits of a tensor, read as integers: any change of one element changes it."""
    return bits(tensor).sum(dtype=torch.int64)


_KEY = slice(24, 24 + 624 * 8)
"""Bytes of torch's state of a Mersenne twister that hold its 624 words; seed and place in them come before."""
_WORDS = 624
_MOST_DRAWS = 1 << 23


def flaw(before: Tensor, now: Tensor) -> tuple[int, int, int, int] | None:
    """None if a generator in the state `before` comes to the state `now`, within some million numbers or by its seed.

    Else what is wrong: a byte of the state, what it is, what it is in the nearest state that is passed, and how many
    bytes differ.
    """
    if torch.equal(before, now):
        return None
    if before.shape != now.shape or before.numel() < _KEY.stop:
        return _flaw_of_count(before, now)
    seeded = torch.Generator().manual_seed(int(now[:8].view(torch.int64)) & (2**63 - 1)).get_state()
    starts = [before, seeded] if torch.equal(before[:8], now[:8]) else [seeded]
    place = int(now[16:24].view(torch.int64))
    nearest = min((_nearest(start, now) for start in starts), key=lambda each: each[0])
    if nearest[0] == 0:
        return None if 0 <= place <= _WORDS else (16, place, _WORDS, 1)
    count, expected = nearest
    at = int((expected != now[_KEY]).to(torch.uint8).argmax())
    return _KEY.start + at, int(now[_KEY][at]), int(expected[at]), count


def _nearest(start: Tensor, now: Tensor) -> tuple[int, Tensor]:
    """How many bytes of the words differ from the nearest words that drawing on from `start` passes, and those."""
    walker = torch.Generator()
    walker.set_state(start.clone())
    block, best = torch.empty(_WORDS, dtype=torch.int32), (1 << 30, start[_KEY])
    for _ in range(_MOST_DRAWS // _WORDS):
        words = walker.get_state()[_KEY]
        count = int((words != now[_KEY]).sum())
        if count < best[0]:
            best = count, words
        if count == 0:
            break
        block.random_(generator=walker)
    return best


def _flaw_of_count(before: Tensor, now: Tensor) -> tuple[int, int, int, int] | None:
    """Of a generator of a device: a seed and how much was drawn."""
    if before.numel() != 16 or now.numel() != 16:
        return None
    (seed, drawn), (seed_now, drawn_now) = before.view(torch.int64).tolist(), now.view(torch.int64).tolist()
    if seed != seed_now:
        return 0, seed_now, seed, 1
    return None if drawn_now >= drawn else (8, drawn_now, drawn, 1)


def random_states() -> dict[str, Tensor]:
    """The states of torch's generators on this rank, by the device."""
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A value that differs from what it must be."""

    rank: int
    tensor: str
    found: object
    expected: object
    source: str
    """What computes the expected value."""
    element: tuple[int, ...] | None = None
    """Where it lies in the tensor; None for what is no tensor, or where the place is not known."""
    count: int = 1
    """Elements that differ."""

    def __str__(self) -> str:
        place = "" if self.element is None else f"[{', '.join(map(str, self.element))}]"
        more = f" ({self.count} elements differ)" if self.count > 1 else ""
        expected = f"expected {self.expected} by {self.source}"
        return f"rank {self.rank}: {self.tensor}{place} is {self.found}, {expected}{more}"


def bits(tensor: Tensor) -> Tensor:
    """The elements of a tensor as integers, flat; those of a tensor with gaps are copied."""
    flat = tensor.detach().reshape(-1)
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(WORDS[flat.element_size()]) if flat.numel() else flat.to(torch.int64)


def place_of(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of an element of a tensor of that shape, from its index in the flat tensor."""
    return tuple(int(each) for each in torch.unravel_index(torch.tensor(index), shape)) if shape else (0,)


def first_of(
    wrong: Tensor, found: Tensor, expected: Tensor, *, rank: int, tensor: str, source: str, shape: tuple[int, ...]
) -> Finding | None:
    """The finding for the first element that is marked in `wrong`; None if none is."""
    count = int(wrong.sum())
    if not count:
        return None
    index = int(wrong.reshape(-1).to(torch.uint8).argmax())
    values = found.reshape(-1)[index].item(), expected.reshape(-1)[index].item()
    return Finding(rank, tensor, values[0], values[1], source, place_of(index, shape), count)
