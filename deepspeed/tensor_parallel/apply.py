"""A plan becomes true on this rank: parameters are cut in place, layers get their share, attention modules are told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.fragments import Split
from deepspeed.parallel.cut import cut_of
from deepspeed.parallel.regions import Peers
from deepspeed.tensor_parallel.attention import tell_share
from deepspeed.tensor_parallel.changes import Change
from deepspeed.tensor_parallel.layers import (
    ColumnParallel,
    ExpertsParallel,
    RowParallel,
    Share,
    VocabularyParallel,
    class_of,
)
from deepspeed.tensor_parallel.overlap import Gate
from deepspeed.tensor_parallel.plan import Plan
from deepspeed.tensor_parallel.regions import Entrance, enter, summed
from deepspeed.tensor_parallel.rules import Kind

__all__ = ["Opened", "apply", "counted_elsewhere", "cuts_of", "splits_of", "sum_gradient"]

Opened = Callable[[Iterable[nn.Parameter]], AbstractContextManager[None]]
"""A context in which parameters are whole that were constructed in shards."""


@torch.no_grad()
def apply(plan: Plan, axis: Peers, opened: Opened, *, overlap: bool = False) -> None:
    """Cut the model's layers for this rank; parameters keep their identity, so that optimizers know them."""
    cut: set[int] = set()
    entrance, gate = Entrance(axis), Gate(axis) if overlap else None
    for change in plan.changes:
        if change.kind is Kind.WHOLE:
            continue
        if change.kind is Kind.WHOLE_INSIDE:
            for param in change.module.parameters():
                sum_gradient(param, axis)
            continue
        if change.kind is Kind.WHOLE_AND_INTO_HEADS:
            change.module.register_forward_hook(_IntoHeads(axis, change.sizes[0]))
            continue
        with opened(change.module.parameters(recurse=False)):
            _cut(change, axis, cut)
        _convert(change, axis, entrance, gate)
    for attention in plan.attention:
        tell_share(attention, plan.ranks, axis.rank)


def splits_of(model: nn.Module) -> dict[str, Split]:
    """How the parameters that ranks share are cut, by their names in the model; a tied one under each of its names."""
    return dict(_named_splits(model))


def cuts_of(model: nn.Module, rank: int) -> dict[str, tuple[Split, int]]:
    """The same, each with the part that a rank has."""
    return {name: (split, rank) for name, split in _named_splits(model)}


def sum_gradient(param: nn.Parameter, axis: Peers, needed: Callable[[], bool] | None = None) -> None:
    """Sum what backward brings for a parameter over ranks, each of which saw only a part of what it is used for.

    `needed` is asked in backward; always where not given.
    """
    _hook(param, _Sum(axis, needed))


def counted_elsewhere(model: nn.Module, rank: int) -> frozenset[int]:
    """Ids of the parameters of which this rank holds a copy, and another one counts its gradient in the norm."""
    found: set[int] = set()
    for module in model.modules():
        share = cut_of(module)
        if share is not None:
            held = {name: split for name, split in share.splits.items() if split.first_holder(rank) != rank}
            found.update(id(module._parameters[name]) for name in held)
    return frozenset(found)


def _hook(param: nn.Parameter, hook: Callable[[Tensor], Tensor]) -> None:
    trained = param.requires_grad
    param.requires_grad_(True)  # a hook can be left for the day on which it is trained
    param.register_hook(hook)
    param.requires_grad_(trained)


@dataclass
class _Sum:
    axis: Peers
    needed: Callable[[], bool] | None

    def __call__(self, grad: Tensor) -> Tensor:
        return summed(grad, self.axis) if self.needed is None or self.needed() else grad

    def __deepcopy__(self, _: Any) -> _Sum:
        return self


@dataclass
class _IntoHeads:
    """Lets the last outputs of a layer, of which all ranks have the whole, into the region of a rank's heads."""

    axis: Peers
    last: int

    def __call__(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        others, last = output.split([output.shape[-1] - self.last, self.last], -1)
        return torch.cat([others, enter(last, self.axis)], -1)

    def __deepcopy__(self, _: Any) -> _IntoHeads:
        return self


@dataclass
class _SumOfCopies:
    """Sums what backward brings for elements of which several ranks hold copies, each for its own queries."""

    axis: Peers
    split: Split

    def __call__(self, grad: Tensor) -> Tensor:
        whole = grad.new_zeros(self.split.whole_shape(grad.shape))
        self.split.place(grad, self.axis.rank, whole)
        comm.all_reduce(whole, group=self.axis.group)
        return self.split.cut(whole, self.axis.rank)

    def __deepcopy__(self, _: Any) -> _SumOfCopies:
        return self


def _named_splits(model: nn.Module) -> Iterator[tuple[str, Split]]:
    for path, module in model.named_modules():
        share = cut_of(module)
        if share is not None:
            yield from ((f"{path}.{name}" if path else name, split) for name, split in share.splits.items())


def _cut(change: Change, axis: Peers, done: set[int]) -> None:
    for name, split in change.splits.items():
        param = change.module._parameters[name]
        assert param is not None, "the plan names parameters that are there"
        if id(param) not in done:
            done.add(id(param))
            part = split.cut(param.detach(), axis.rank)
            param.data = part.clone() if part.data_ptr() == param.data_ptr() else part
            param.tensor_model_parallel = True  # type: ignore[attr-defined]  # as Megatron marks them
            if split.shared:
                _hook(param, _SumOfCopies(axis, split))
    if change.rows is not None:
        for param in change.module.parameters(recurse=False):
            if id(param) not in done:
                done.add(id(param))
                sum_gradient(param, axis)


def _convert(change: Change, axis: Peers, entrance: Entrance, gate: Gate | None) -> None:
    module, rank = change.module, axis.rank
    share = Share(
        axis,
        dict(change.splits),
        change.sizes,
        entrance,
        transposed=change.transposed,
        gather_output=change.rule.gather_output and change.kind is Kind.COLUMN,
        split_input=change.rule.split_input and change.kind is Kind.ROW,
        gate=gate,
        rows=None if change.rows is None else change.rows[rank],
    )
    kinds = {Kind.COLUMN: ColumnParallel, Kind.ROW: RowParallel, Kind.VOCABULARY: VocabularyParallel}
    kind: type[nn.Module] | None = kinds.get(change.kind)  # what is cut by heads computes as before
    if "gate_up_proj" in change.splits:
        kind = ExpertsParallel
    if kind is not None:
        module.__class__ = class_of(kind, type(module))
    module.share = share  # type: ignore[assignment]
    _tell_sizes(module, change, rank)


def _tell_sizes(module: nn.Module, change: Change, rank: int) -> None:
    """A layer's own attributes say what lies here."""
    if change.kind is Kind.VOCABULARY:
        start, stop = change.splits["weight"].parts[rank][0]
        module.num_embeddings = stop - start  # type: ignore[assignment]
    elif change.sizes and isinstance(module, nn.Linear):
        if change.kind is Kind.COLUMN:
            module.out_features = change.sizes[rank]
        else:
            module.in_features = change.sizes[rank]
    elif change.sizes:
        name = "nf" if change.kind is Kind.COLUMN else "nx"
        setattr(module, name, change.sizes[rank])
