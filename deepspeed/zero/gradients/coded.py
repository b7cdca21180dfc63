"""`CodedReduction`: gradients to their owners as codes (qgZ), in one hop or by nodes, with or without memory (LoCo).

[Note: two hops] Within a node each rank receives, as codes, what all ranks of the node have for the ranks of its place
in every node, and adds it up in float32. These sums travel between nodes as codes and are added up by their owners. So
a link between nodes carries a gradient once for each node and not once for each rank.

Each parameter is encoded by itself: sums do not depend on what shares a bucket. A gradient that is not finite decodes
to numbers that are not, which the norm finds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from logging import WARNING
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.comm import Pending
from deepspeed.comm.codec import BlockCodec, Parts, block_codec
from deepspeed.log import log_dist, warn_once
from deepspeed.zero.gradients.reduction import EvenShares, OwnedShares, ReduceToOwners, Share, SharePart
from deepspeed.zero.placement import NodeGroups


@dataclass(frozen=True)
class Slices:
    """Slices that lie one after the other, and what lies in them."""

    parts: tuple[tuple[SharePart, ...], ...]
    lengths: tuple[int, ...]
    owners: Sequence[int]
    alike: bool

    @classmethod
    def of(cls, share: Share, size: int) -> Slices:
        """A slice for each rank, of some no elements."""
        if isinstance(share, EvenShares):
            alike = len(share.parts) == 1
            return cls(share.parts * size if alike else share.parts, (share.length,) * size, range(size), alike)
        assert isinstance(share, OwnedShares), "codes go to owners"
        parts: list[tuple[SharePart, ...]] = [()] * size
        lengths = [0] * size
        for (owner, length), lying in zip(share.lengths, share.parts, strict=True):
            parts[owner], lengths[owner] = lying, length
        return cls(tuple(parts), tuple(lengths), range(size), alike=False)

    def only(self, owners: Sequence[int]) -> Slices:
        """Those of these ranks."""
        if self.alike:
            return Slices(self.parts[: len(owners)], self.lengths[: len(owners)], owners, alike=True)
        pick = [self.owners.index(owner) for owner in owners]
        return Slices(tuple(self.parts[at] for at in pick), tuple(self.lengths[at] for at in pick), owners, alike=False)

    @property
    def rows(self) -> int:
        """Slices that are alike are the rows of a table; others are one row."""
        return len(self.parts) if self.alike else 1

    @cached_property
    def places(self) -> Parts:
        """Where parts lie in a row."""
        if self.alike:
            return tuple((part.start, part.length) for part in self.parts[0])
        begins = accumulate(self.lengths, initial=0)
        return tuple(
            (begin + part.start, part.length)
            for begin, parts in zip(begins, self.parts, strict=False)
            for part in parts
        )

    @property
    def names(self) -> list[str]:
        """What memories call the parts of a row."""
        if self.alike:
            return [part.name for part in self.parts[0]]
        pairs = zip(self.owners, self.parts, strict=True)
        return [f"{owner}.{part.name}" for owner, parts in pairs for part in parts]

    def nbytes(self, codec: BlockCodec) -> list[int]:
        """Bytes of the codes of each slice."""
        if self.alike:
            return [codec.parts_bytes(self.places)] * len(self.parts)
        return [sum(codec.nbytes(part.length) for part in parts) for parts in self.parts]


@dataclass(eq=False)
class ErrorMemory:
    """What codes lost, in 8 bits, to be added to what is encoded next: LoCo.

    Of the old error a share `beta` is carried on, the rest is what the last codes lost. Every `period` optimizer steps
    it is forgotten.
    """

    beta: float
    period: int
    codec: BlockCodec = field(default_factory=lambda: block_codec("int8"))
    errors: dict[str, Tensor] = field(default_factory=dict)
    """Messages by hop and parameter."""
    steps: int = 0

    def encode(self, codec: BlockCodec, key: str, values: Tensor, message: Tensor | None = None) -> Tensor:
        """As `codec.encode`, of the values and what was lost before."""
        wide, old = values.float(), self._old(key, values)
        if old is not None:
            wide = wide + old
        message = codec.encode(wide, message)
        lost = (wide - codec.decode(message, torch.empty_like(wide))).nan_to_num_(0.0, 0.0, 0.0)
        if old is not None and self.beta:
            lost = lost.mul_(1.0 - self.beta).add_(old, alpha=self.beta)
        self.errors[key] = self.codec.encode(lost, self.errors.get(key))
        return message

    def _old(self, key: str, values: Tensor) -> Tensor | None:
        found, shape = self.errors.get(key), (*values.shape[:-1], self.codec.nbytes(values.shape[-1]))
        if found is None:
            return None
        if found.shape != shape:
            warn_once(
                f"zero_optimization.zeropp_loco_param: errors of {key} have the shape {tuple(found.shape)}, where "
                f"{shape} is expected; they were made with other ranks or another codec and start from zero"
            )
            del self.errors[key]
            return None
        if found.device != values.device:
            found = self.errors[key] = found.to(values.device)
        return self.codec.decode(found, torch.empty(values.shape, dtype=torch.float32, device=values.device))

    def stepped(self) -> None:
        """An optimizer step."""
        self.steps += 1
        if self.steps % self.period == 0:
            self.errors.clear()


@dataclass(eq=False)
class CodedReduction(ReduceToOwners):
    """`Reduction` by codes over the ranks of an axis, to sums in float32, which equal copies add up."""

    codec: BlockCodec = field(kw_only=True)
    nodes: NodeGroups | None = None
    """See [Note: two hops]; None: one hop."""
    memory: ErrorMemory | None = None

    @property
    def few(self) -> int:
        return self.size

    @torch.no_grad()
    def _scatter(self, send: Tensor, share: Share) -> Pending[Tensor]:
        slices = Slices.of(share, self.size)
        message, own = self._encode(1, send, slices), slices.only([self.rank])
        sizes, nodes = slices.nbytes(self.codec), self.nodes
        if nodes is None:
            return self._send(message, sizes, self.group, own)
        local = nodes.intra.size
        columns = [range(place, self.size, local) for place in range(local)]  # ranks of one place, by node
        if slices.alike:
            message = message.view(-1, local, sizes[0]).transpose(0, 1).reshape(-1)
        else:
            parts = message.split(sizes)
            message = torch.cat([parts[owner] for column in columns for owner in column])
        mine, splits = slices.only(columns[nodes.intra.rank]), [sum(sizes[place::local]) for place in range(local)]
        first = self._send(message, splits, nodes.within, mine)

        def second(_: Tensor) -> Tensor:
            with torch.no_grad():
                sums = self._encode(2, first.wait(), mine)
            return self._send(sums, mine.nbytes(self.codec), nodes.across, own).wait()

        return Pending(message, first, second)

    def _send(self, message: Tensor, sizes: list[int], group: Any, mine: Slices) -> Pending[Tensor]:
        """Send each rank of a group its codes; the sum of those that come for `mine`."""
        comes, ranks = sum(mine.nbytes(self.codec)), len(sizes)
        received = message.new_empty(ranks * comes)
        with comm.labelled(f"{self.codec.name} codes of gradients", codec=self.codec.name):
            work = comm.all_to_all_single(received, message, [comes] * ranks, sizes, group=group, async_op=True)
        return Pending(received, work, lambda codes: self._sum(codes.view(ranks, -1), mine))

    def _encode(self, hop: int, values: Tensor, slices: Slices) -> Tensor:
        """The codes of all parts, slice after slice."""
        message = values.new_empty(sum(slices.nbytes(self.codec)), dtype=torch.uint8)
        rows, to = values.view(slices.rows, -1), message.view(slices.rows, -1)
        if self.memory is None:
            self.codec.encode_parts(slices.places, rows, to)
            return message
        at = 0
        for (start, length), name in zip(slices.places, slices.names, strict=True):
            size = self.codec.nbytes(length)
            self.memory.encode(self.codec, f"{hop}.{name}", rows.narrow(1, start, length), to.narrow(1, at, size))
            at += size
        return message

    @torch.no_grad()
    def _sum(self, rows: Tensor, slices: Slices) -> Tensor:
        """The float32 sums of what rows of codes say, slice after slice; zero between the parts."""
        sums = torch.zeros(sum(slices.lengths), dtype=torch.float32, device=rows.device)
        codes, out = rows.view(len(rows), slices.rows, -1), sums.view(slices.rows, -1)
        self.codec.sum_parts(slices.places, codes, out)
        return sums

    def stepped(self) -> None:
        if self.memory is not None:
            self.memory.stepped()

    def state_dict(self) -> dict[str, Tensor]:
        if self.memory is None:
            return {}
        return {"steps": torch.tensor(self.memory.steps), **self.memory.errors}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """See `Reduction`; errors of other shapes are noticed where they are used."""
        if self.memory is None:
            return
        self.memory.errors = {key: value.clone() for key, value in state.items() if value.dtype == torch.uint8}
        self.memory.steps = int(state.get("steps", torch.tensor(0)))
        if "steps" not in state:
            log_dist(
                "zero_optimization.zeropp_loco_param: the checkpoint has no errors of codes for this number of ranks; "
                "they begin anew, from zero",
                level=WARNING,
            )

    def close(self) -> None:
        if self.memory is not None:
            self.memory.errors.clear()
