"""`OwnedSigns`: momenta as signs where each rank owns pieces of parameters, and the states of these alone.

[Note: owned signs] The momentum that all ranks have after an exchange is made of signs and a scale for each piece, so a
rank keeps what it received, a bit per number, in place of the momenta of others. To each it adds its gradient and its
error, and sends signs of that to the owner. The owner takes the mean, adds an error of its own, and sends signs of that
to all. Momenta that are not known as signs, at first and after a load or an edit, are read once from their owners.

Gradients stay whole on every rank until the step, which may still clip or skip them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.comm import Pending
from deepspeed.comm.codec import SIGN
from deepspeed.comm.compressed import SignErrors
from deepspeed.comm.operations import ReduceOp
from deepspeed.errors import UsageError
from deepspeed.fragments import StripedLayout
from deepspeed.ops.onebit.base import Member, OneBitOptimizer
from deepspeed.parallel import AxisGroup
from deepspeed.zero.gradients.coded import Slices
from deepspeed.zero.gradients.reduction import Reduction, Share
from deepspeed.zero.gradients.sign_reduction import SignReduction
from deepspeed.zero.piece import StatePiece
from deepspeed.zero.states.groups import ShardGroup


@dataclass(frozen=True)
class _Unit:
    """Neighbouring pieces of a parameter that are equally long but for padding: a row for each owner."""

    name: str
    param: nn.Parameter
    options: Mapping[str, Any]
    """Of the optimizer's group."""
    owners: range
    lengths: tuple[int, ...]
    """Elements of each row that are not padding."""
    row: int
    piece: StatePiece | None
    """That of this rank."""

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.owners.start

    @property
    def rows(self) -> slice:
        """Those of the owners among the rows of all ranks."""
        return slice(self.owners.start, self.owners.stop)

    def trim(self, values: Tensor) -> Tensor:
        """The same with zeros as padding."""
        for place, length in enumerate(self.lengths):
            if length < self.row:
                values[place, length:] = 0.0
        return values

    def encode(self, values: Tensor, message: Tensor, lengths: Sequence[int]) -> Tensor:
        """Write signs of rows, whose scales do not count padding; returns what they mean."""
        SIGN.encode(values, message)
        if any(length < self.row for length in lengths):
            counts = torch.tensor([self.row / max(length, 1) for length in lengths], device=values.device)
            SIGN.parts(message, self.row)[1].mul_(counts.sqrt().view(-1, 1))
        return SIGN.decode(message, torch.empty_like(values))


class OwnedSigns(SignReduction):
    """See [Note: owned signs]."""

    owned = True

    def __init__(self, plain: Reduction, axis: AxisGroup, optimizer: OneBitOptimizer) -> None:
        super().__init__(plain, axis, optimizer)
        self.groups: Callable[[], Sequence[ShardGroup]] = list
        """Who owns what of the parameters that the optimizer trains."""
        self._settled: list[_Unit] = []
        self._momenta = torch.empty(0)
        """What came last from owners, `[ranks, bytes]`."""
        self._columns: dict[tuple[str, int], tuple[int, float]] = {}
        """Where the pieces begin in it that are known by it, and in what unit."""
        self._seen: dict[int, tuple[int, int]] = {}
        """The momenta of this rank as they were left, by the id of what the optimizer updates."""

    # ---- of gradients

    @property
    def few(self) -> int:
        """Any number: the signs for each owner have a scale of their own."""
        return self.size

    @torch.no_grad()
    def start(self, send: Tensor, share: Share) -> Pending[Tensor]:
        """See `Reduction`; the slice of gradients that stay is only this rank's part of its own."""
        if not self._optimizer.local:
            return self._plain.start(send, share)
        self._tell()
        slices, begin = Slices.of(share, self.size), 0
        if slices.alike:
            rows = send.view(self.size, -1)
            for part in slices.parts[0]:
                self._keep((part.name, 0), rows.narrow(1, part.start, part.length))
        else:
            for owner, parts, length in zip(slices.owners, slices.parts, slices.lengths, strict=True):
                for part in parts:
                    self._keep((part.name, owner), send.narrow(0, begin + part.start, part.length).view(1, -1))
                begin += length
        return Pending(send.narrow(0, sum(slices.lengths[: self.rank]), slices.lengths[self.rank]).clone())

    def _keep(self, key: tuple[str, int], values: Tensor) -> None:
        if key in self.local:
            self.local[key].add_(values)
        else:
            self.local[key] = values.to(torch.float32, copy=True)

    def gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """What stays on this rank, with the parameters; empty where gradients travel."""
        params = {unit.name: unit.param for unit in self._units()} if self.local else {}
        return [(params[name], grad) for (name, _), grad in self.local.items()]

    # ---- of momenta

    @torch.no_grad()
    def prepare(self, settled: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """See `MomentumExchange`; ranks learn what owners know of their pieces."""
        masters, units = {id(param) for param in settled}, self._units()
        said = self._any_of([self._say(unit, masters) for unit in units]) if units else []
        self._settled = []
        for unit, (stays, present, edited) in zip(units, said, strict=True):
            if edited:
                self._columns.pop(unit.key, None)
            if stays:
                self._settled.append(unit)
            elif present:
                self._average(unit)

    def _say(self, unit: _Unit, masters: set[int]) -> list[bool]:
        """(its variance stays, some rank has a gradient, its momentum was written by others), if this rank knows."""
        if unit.piece is None:
            return [False, False, False]
        master = unit.piece.master
        momentum = self._optimizer.state.get(master, {}).get("exp_avg")
        edited = momentum is not None and self._seen.get(id(master)) != (id(momentum), momentum._version)
        return [id(master) in masters, master.grad is not None, edited]

    def _average(self, unit: _Unit) -> None:
        """The mean gradient of a parameter without a variance that stays, for its owners."""
        mean = self._gradient(unit)
        self.exact_mean([mean])
        if unit.piece is not None:
            place = self.rank - unit.owners.start
            master = unit.piece.master
            master.grad = mean[place, : unit.lengths[place]].to(master.dtype).view(master.shape)

    @torch.no_grad()
    def advance(self, members: Sequence[Member]) -> None:
        """See `MomentumExchange`; of all pieces that are settled, whoever owns them."""
        momenta = {id(param): momentum for _, param, momentum in members}
        rates = {unit.key: self._optimizer.unit_of(unit.options) for unit in self._settled}

        def advanced(unit: _Unit) -> Tensor:
            values = self._momentum(unit, momenta)
            return values.lerp_(self._gradient(unit), 1 - unit.options["betas"][0]).mul_(rates[unit.key])

        if not self._settled:
            return
        own, columns = self._mean_of_signs(advanced, "signs of momenta")
        everything = own.new_empty(self.size, own.shape[1])
        with comm.labelled("signs of mean momenta", codec=SIGN.name):
            comm.all_gather_into_tensor(everything.view(-1), own.view(-1), group=self._axis.group)
        self._momenta = everything
        self._columns = {key: (column, rates[key]) for key, column in columns.items()}
        for unit in self._settled:
            if unit.piece is not None:
                momentum = momenta[id(unit.piece.master)]
                momentum.copy_(self._own(unit, own, columns).div_(rates[unit.key]))
                self._seen[id(unit.piece.master)] = id(momentum), momentum._version

    @torch.no_grad()
    def mean_gradients(self, settled: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """See `MomentumExchange`; the owners alone need them."""
        if not self._settled:
            return {}
        own, columns = self._mean_of_signs(lambda unit: self._gradient(unit).clone(), "signs of gradients")
        pieces = [(unit, unit.piece.master) for unit in self._settled if unit.piece is not None]
        return {master: self._own(unit, own, columns) for unit, master in pieces}

    def _mean_of_signs(
        self, values_of: Callable[[_Unit], Tensor], label: str
    ) -> tuple[Tensor, dict[tuple[str, int], int]]:
        """The signs of means of what all ranks have for the pieces of this one, and where each piece begins in them."""
        units = self._settled
        columns, width = _columns(units, self.size)
        sent = torch.zeros(self.size, width, dtype=torch.uint8, device=units[0].param.device)
        for unit in units:
            message = sent[unit.rows].narrow(1, columns[unit.key], SIGN.nbytes(unit.row))
            values = values_of(unit)
            error = self._error(unit).worker.view(values.shape)
            unit.trim(values.add_(error))
            unit.trim(torch.sub(values, unit.encode(values, message, unit.lengths), out=error))
        came, own = torch.empty_like(sent), sent.new_zeros(1, width)
        with comm.labelled(label, codec=SIGN.name):
            comm.all_to_all_single(came.view(-1), sent.view(-1), group=self._axis.group)
        for unit in units:
            if unit.piece is not None:
                column, size = columns[unit.key], SIGN.nbytes(unit.row)
                self._mean(unit, came.narrow(1, column, size), own.narrow(1, column, size))
        return own, columns

    def _gradient(self, unit: _Unit) -> Tensor:
        """That of this rank, of all rows."""
        found = self.local.get(unit.key)
        return torch.zeros(len(unit.owners), unit.row, device=unit.param.device) if found is None else found

    def over_pieces(self, params: Sequence[Tensor], rows: Tensor, *, largest: bool) -> Tensor:
        places = {name: place for place, name in enumerate(dict.fromkeys(unit.name for unit in self._units()))}
        names = {id(unit.piece.master): unit.name for unit in self._units() if unit.piece is not None}
        mine = [places[names[id(param)]] for param in params]
        table = torch.zeros(len(places), rows.shape[1], dtype=torch.float64, device=comm.group_device())
        table[mine] = rows.to(table.device, table.dtype)
        with comm.labelled("numbers of whole parameters"):
            comm.all_reduce(table, op=ReduceOp.MAX if largest else ReduceOp.SUM, group=self._axis.group)
        return table[mine].to(rows.device)

    def _mean(self, unit: _Unit, came: Tensor, message: Tensor) -> None:
        """What ranks mean on average and what was left out before, as signs."""
        place = self.rank - unit.owners.start
        length, server = unit.lengths[place], self._error(unit).server
        mean = torch.empty(unit.row, dtype=torch.float32, device=came.device)
        SIGN.decode_sum(came, mean)
        mean.div_(self.size).add_(server)
        mean[length:] = 0.0
        torch.sub(mean, unit.encode(mean.view(1, -1), message, [length]).view(-1), out=server)
        server[length:] = 0.0

    def _momentum(self, unit: _Unit, momenta: Mapping[int, Tensor]) -> Tensor:
        """The momenta of all rows after the last exchange, float32."""
        values = torch.zeros(len(unit.owners), unit.row, device=unit.param.device)
        if unit.key in self._columns:
            column, rate = self._columns[unit.key]
            return SIGN.decode(self._momenta[unit.rows].narrow(1, column, SIGN.nbytes(unit.row)), values).div_(rate)
        if unit.piece is not None:
            place = self.rank - unit.owners.start
            values[place, : unit.lengths[place]] = momenta[id(unit.piece.master)].view(-1)
        with comm.labelled(f"momentum of {unit.name}"):
            comm.all_reduce(values, group=self._axis.group)
        return values

    def _own(self, unit: _Unit, own: Tensor, columns: Mapping[tuple[str, int], int]) -> Tensor:
        """What signs say of this rank's piece."""
        assert unit.piece is not None, "this rank owns it"
        length, master = unit.lengths[self.rank - unit.owners.start], unit.piece.master
        message = own.narrow(1, columns[unit.key], SIGN.nbytes(unit.row))
        return SIGN.decode(message, torch.empty(1, unit.row, device=own.device))[0, :length].view(master.shape)

    def _error(self, unit: _Unit) -> SignErrors:
        sizes = len(unit.owners) * unit.row, 0 if unit.piece is None else unit.row
        return self._errors_of(unit.key, f"{unit.name}@{unit.owners.start}", unit.param, sizes)

    def _units(self) -> list[_Unit]:
        """All pieces of all owners, in the same order on all ranks."""
        found: list[_Unit] = []
        for group in self.groups():
            pieces = {id(piece.param): piece for piece in group.pieces}
            for place, param in enumerate(group.params):
                spans = {owner: group.layout.interval(place, owner) for owner in group.layout.holders(place)}
                lengths = {owner: stop - start for owner, (start, stop) in spans.items() if stop > start}
                found += _cut(group, place, lengths, pieces.get(id(param)), self.rank)
        if len({unit.key for unit in found}) < len(found):
            twice = next(unit.name for unit in found if [other.key for other in found].count(unit.key) > 1)
            raise UsageError(
                f"the optimizer has two parameters that are called {twice!r}; register them in the module, so that "
                "signs of their momenta are kept apart, or use zero_optimization.stage 0"
            )
        return found

    def forget(self) -> None:
        """See `MomentumExchange`; momenta are read from their owners, too."""
        super().forget()
        self._columns, self._momenta = {}, torch.empty(0)
        self._seen.clear()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """See `Reduction`; a rank that owns nothing learns from the others how many steps were taken."""
        counts = torch.tensor(self._optimizer.counts(), device=comm.group_device())
        with comm.labelled("steps of the optimizer"):
            comm.all_reduce(counts, op=ReduceOp.MAX, group=self._axis.group)
        self._optimizer.resume(counts.tolist())
        super().load_state_dict(state)


def _cut(group: ShardGroup, place: int, lengths: Mapping[int, int], piece: StatePiece | None, rank: int) -> list[_Unit]:
    """The pieces of one parameter: in one where all ranks have rows of it, else one by one."""
    name, param, options = group.names[place], group.params[place], group.options
    if isinstance(group.layout, StripedLayout):
        row = group.layout.chunk(place)
        padded = tuple(lengths.get(owner, 0) for owner in range(group.axis.size))
        return [_Unit(name, param, options, range(group.axis.size), padded, row, piece)]
    return [
        _Unit(name, param, options, range(owner, owner + 1), (length,), length, piece if owner == rank else None)
        for owner, length in lengths.items()
    ]


def _columns(units: Sequence[_Unit], ranks: int) -> tuple[dict[tuple[str, int], int], int]:
    """Where each unit begins in the rows of its owners, and how long the rows are."""
    ends, columns = [0] * ranks, {}
    for unit in units:
        columns[unit.key] = at = max(ends[owner] for owner in unit.owners)
        for owner in unit.owners:
            ends[owner] = at + SIGN.nbytes(unit.row)
    return columns, max(ends)
