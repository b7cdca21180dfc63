"""Sampled parameters of a running engine: their gradients as they are computed, and their states around an update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.ops.onebit.base import OneBitOptimizer
from deepspeed.verify.copies import Finding, bits, first_of
from deepspeed.verify.formulas import FORMULAS, formula_of
from deepspeed.verify.sample import SampledUpdate
from deepspeed.zero.interface import ParameterState, ReduceToOwners, ShardGroup, join
from deepspeed.zero.public.access import safe_get_full_optimizer_state

if TYPE_CHECKING:
    from deepspeed.runtime.parts import Parts

_MOST = 1 << 24
"""Elements of a parameter above which it is never sampled, and of a bucket whose sums are compared."""
_FREE, _SHARE = 1 << 16, 32
"""Up to so many are sampled in any model, else the share of the model: a check must cost little beside n steps."""


@dataclass(frozen=True)
class Trained:
    """A parameter that the optimizer updates."""

    group: ShardGroup
    place: int

    @property
    def param(self) -> nn.Parameter:
        """Itself."""
        return self.group.params[self.place]

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return self.group.layout.numels[self.place]


def trained(parts: Parts) -> list[Trained]:
    """All of them that are small enough, in the same order on all ranks of an axis."""
    groups = [] if parts.states is None else parts.states.groups
    every = [Trained(group, place) for group in groups for place in range(len(group.params))]
    limit = min(max(_FREE, sum(each.numel for each in every) // _SHARE), _MOST)
    return [each for each in every if each.param.requires_grad and each.numel <= limit]


class SampledUpdates:
    """The sample of one step; `close` removes its hooks."""

    def __init__(self, parts: Parts, count: int, turn: int) -> None:
        """Sample so many parameters, and the gradients of one bucket, others at each `turn`."""
        self._parts = parts
        everything = trained(parts)
        start = turn * count
        chosen = {(start + at) % len(everything) for at in range(min(count, len(everything)))} if everything else set()
        self._chosen = [everything[at] for at in sorted(chosen)]
        self.sums: dict[int, Tensor] = {}
        """[2, elements] by the id of a parameter: gradients of this rank, and their sizes, in float64."""
        self._exact = _sums_plainly(parts)
        self._travels = parts.precision.reduce_dtypes(parts.module)
        self._others = self._of_bucket(everything, turn) if self._exact and count else []
        watched = [*self._chosen, *self._others] if self._exact else []
        self._hooks = [each.param.register_hook(partial(self._saw, id(each.param))) for each in watched]
        self._samples: list[tuple[Trained, SampledUpdate, ParameterState]] = []
        self.local: dict[str, Tensor] = {}

    def _of_bucket(self, everything: Sequence[Trained], turn: int) -> list[Trained]:
        buckets = self._parts.reducer.buckets
        if not buckets:
            return []
        chosen = {id(each.param) for each in self._chosen}
        members = {id(entry.param) for entry in buckets[turn % len(buckets)]} - chosen
        found, room = [], _MOST
        for each in everything:
            if id(each.param) in members and each.numel <= room:
                room -= each.numel
                found.append(each)
        return found

    @torch.no_grad()
    def _saw(self, key: int, grad: Tensor) -> None:
        dense = grad if grad.layout == torch.strided else grad.to_dense()
        flat = dense.reshape(-1).double() * self._parts.backward.unit
        part = torch.stack([flat, flat.abs()])
        known = self.sums.get(key)
        self.sums[key] = part if known is None else known.add_(part)

    @torch.no_grad()
    def before(self, *, keep: bool) -> list[SampledUpdate]:
        """Read gradients and states once gradients are reduced; `keep` the gradients of this rank for a record."""
        self._unhook()
        for each in (*self._chosen, *self._others):
            state = self._state(each)
            sample = self._read_gradient(each, state, keep=keep)
            self._samples.append((each, sample, state))
        for each, sample, state in self._samples[: len(self._chosen)]:
            self._read_before(each, sample, state)
        self.sums.clear()
        return self.judged

    @property
    def judged(self) -> list[SampledUpdate]:
        """Samples that this rank judges: all ranks read them, one of those that share a parameter looks."""
        return [sample for _, sample, state in self._samples if state.axis is None or state.axis.rank == 0]

    def _state(self, each: Trained) -> ParameterState:
        assert self._parts.states is not None, "parameters are trained"
        state = self._parts.states.held(each.param)
        assert state is not None, "the optimizer trains it"
        return state

    def _read_gradient(self, each: Trained, state: ParameterState, *, keep: bool) -> SampledUpdate:
        parts, axis, placement = self._parts, self._parts.lies_on(each.param), each.group.placement
        sample = SampledUpdate(state.name, tuple(_owners(each, state)), axis.ranks)
        gradient = join(state, state.gradient(), torch.float64, state.has_gradient())
        sample.gradient = None if gradient is None else gradient * parts.backward.unit
        if not self._exact:
            return sample
        known = self.sums.get(id(each.param))
        total = known if known is not None else torch.zeros(2, each.numel, dtype=torch.float64, device=state.device)
        if keep:
            self.local[state.name] = total.cpu()
        if axis.size > 1:
            total = total.clone()
            with comm.labelled(f"verify: plain sum of the gradient of {state.name}"):
                comm.all_reduce(total, group=axis.group)
        reduced = self._travels.get(each.param, each.group.dtypes.reduce)
        dtypes = (each.param.dtype, reduced, each.group.dtypes.accumulate)
        additions = axis.size * parts.accumulation.steps + 4
        mean = parts.config.schema.gradient_allreduce_op == "mean"
        sample.total, sample.weight = total, 1 / placement.size if mean else 1.0
        sample.rounding = additions * max(torch.finfo(dtype).eps for dtype in dtypes)
        sample.smallest = max(torch.finfo(dtype).tiny for dtype in dtypes) * additions * parts.backward.unit
        return sample

    def _read_before(self, each: Trained, sample: SampledUpdate, state: ParameterState) -> None:
        optimizer = self._parts.basic_optimizer
        assert optimizer is not None, "parameters are trained"
        found = formula_of(optimizer, each.group.options)
        if found is None:
            return
        sample.formula, sample.options = found
        sample.before = self._states(each, state, sample.formula)
        if FORMULAS[sample.formula].counts:
            step = safe_get_full_optimizer_state(each.param, "step")
            sample.step = 1 if step is None else int(step) + 1

    def _states(self, each: Trained, state: ParameterState, formula: str) -> dict[str, Tensor]:
        master = join(state, state.master, state.dtype, True)
        assert master is not None, "a trained parameter has a master"
        found = {"parameter": master}
        for key in FORMULAS[formula].moments:
            if formula == "sgd" and not each.group.options.get("momentum"):
                continue
            value: Any = safe_get_full_optimizer_state(each.param, key)
            if isinstance(value, Tensor):
                found[key] = value
        return found

    @torch.no_grad()
    def after(self) -> list[Finding]:
        """Read states after the update; findings of published values that are not what was updated."""
        found = []
        for each, sample, _ in self._samples[: len(self._chosen)]:
            if sample.formula is None:
                continue
            state = self._state(each)
            sample.after = self._states(each, state, sample.formula)
            finding = self._published(each)
            if finding is not None:
                found.append(finding)
        return found

    def _published(self, each: Trained) -> Finding | None:
        """Whether this rank's part of the model is what its master rounds to, to the bit."""
        piece = next((piece for piece in each.group.pieces if piece.param is each.param), None)
        zero = self._parts.config.schema.zero_optimization
        if piece is None or not piece.separate or zero.zero_quantized_weights:
            return None
        expected = piece.master.detach().to(piece.source.device, piece.source.dtype).reshape(-1)
        found = piece.source.detach().reshape(-1)
        wrong = bits(expected) != bits(found)
        return first_of(
            wrong,
            found,
            expected,
            rank=comm.get_rank(),
            tensor=f"from element {piece.interval[0]} on, {piece.name}",
            source="its rounded master",
            shape=tuple(found.shape),
        )

    def _unhook(self) -> None:
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()

    def close(self) -> None:
        """Remove what is left of its hooks."""
        self._unhook()
        self.sums.clear()


def _owners(each: Trained, state: ParameterState) -> Iterator[tuple[int, int, int]]:
    if state.axis is None:
        yield 0, each.numel, comm.get_rank()
        return
    for place, rank in enumerate(state.axis.ranks):
        begin, end = each.group.layout.interval(each.place, place)
        yield begin, end, rank


def _sums_plainly(parts: Parts) -> bool:
    """True if gradients arrive as sums that only rounding changes."""
    return all(
        isinstance(entry.reduction, ReduceToOwners) for bucket in parts.reducer.buckets for entry in bucket
    ) and not isinstance(parts.basic_optimizer, OneBitOptimizer)
