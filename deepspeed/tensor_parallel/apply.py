"""Makes a plan true on this rank: cuts parameters in place, gives layers their share and attention its heads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.fragments import DimSplit, even
from deepspeed.parallel.regions import OwnProduct, RankGroup, Uncopied, cut_of, enter, summed, whole_of
from deepspeed.tensor_parallel.attention import set_local_heads
from deepspeed.tensor_parallel.layer_splits import LayerSplit, SplitRegion
from deepspeed.tensor_parallel.layers import (
    ColumnParallel,
    ExpertsParallel,
    OverlappedInput,
    RowParallel,
    ShardInfo,
    SharedInput,
    VocabularyParallel,
)
from deepspeed.tensor_parallel.plan import SplitPlan
from deepspeed.tensor_parallel.rules import SplitKind
from deepspeed.transformers.replacement import class_before, put_whole, replacement

Opened = Callable[[Iterable[nn.Parameter]], AbstractContextManager[None]]
"""A context in which parameters are whole that were constructed in shards."""


@torch.no_grad()
def apply(plan: SplitPlan, axis: RankGroup, opened: Opened, *, overlap: bool = False) -> None:
    """Cut the model's layers for this rank; parameters keep their identity, so that optimizers know them."""
    cut: set[int] = set()
    entrance, gate = SharedInput(axis), OverlappedInput(axis) if overlap else None
    for change in plan.changes:
        if change.kind is SplitKind.WHOLE:
            continue
        if change.kind is SplitKind.WHOLE_INSIDE:
            for param in change.module.parameters():
                sum_gradient(param, axis)
            continue
        if change.kind is SplitKind.WHOLE_AND_INTO_HEADS:
            change.module.register_forward_hook(_IntoHeads(axis, change.sizes[0]))
            continue
        with opened(change.module.parameters(recurse=False)):
            splits = _cut(change, axis, cut)
        _convert(change, splits, axis, entrance, gate)
    for attention in plan.attention:
        set_local_heads(attention, plan.ranks, axis.rank)
    for region in plan.incomplete:
        forward = replacement(region.module) or type(region.module).forward
        put_whole(region.module, partial(_explained, region, forward))


def _explained(region: SplitRegion, forward: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    try:
        return forward(module, *args, **kwargs)
    except RuntimeError as error:
        if region.explains(error):
            raise region.explained(error) from error
        raise


def splits_of(model: nn.Module) -> dict[str, DimSplit]:
    """How the parameters that ranks share are cut, by their names in the model; a tied one under each of its names."""
    found = {}
    for path, module in model.named_modules():
        share = cut_of(module)
        if share is not None:
            found.update({f"{path}.{name}".lstrip("."): split for name, split in share.splits.items()})
    return found


def cuts_of(model: nn.Module, rank: int) -> dict[str, tuple[DimSplit, int]]:
    """The same, each with the part that a rank has."""
    return {name: (split, rank) for name, split in splits_of(model).items()}


def sum_gradient(param: nn.Parameter, axis: RankGroup, needed: Callable[[], bool] | None = None) -> None:
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
class _Sum(Uncopied):
    axis: RankGroup
    needed: Callable[[], bool] | None

    def __call__(self, grad: Tensor) -> Tensor:
        return summed(grad, self.axis) if self.needed is None or self.needed() else grad


@dataclass
class _IntoHeads(Uncopied):
    """Lets the last outputs of a layer, of which all ranks have the whole, into the region of a rank's heads."""

    axis: RankGroup
    last: int

    def __call__(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        others, last = output.split([output.shape[-1] - self.last, self.last], -1)
        return torch.cat([others, enter(last, self.axis)], -1)


@dataclass
class _SumOfCopies(Uncopied):
    """Sums what backward brings for elements of which several ranks hold copies, each for its own queries."""

    axis: RankGroup
    split: DimSplit

    def __call__(self, grad: Tensor) -> Tensor:
        whole = grad.new_zeros(self.split.whole_shape(grad.shape))
        self.split.place(grad, self.axis.rank, whole)
        comm.all_reduce(whole, group=self.axis.group)
        return self.split.cut(whole, self.axis.rank)


def _cut(change: LayerSplit, axis: RankGroup, done: set[int]) -> dict[str, DimSplit]:
    """Returns how the layer's parameters are cut: one that holds something else than the weight, in another way."""
    module, splits = change.module, dict(change.splits)
    if isinstance(module, OwnProduct) and "weight" in splits:
        held = module.weight_cut(splits.pop("weight"), axis)
        splits |= {} if held is None else {"weight": held}
    for name, split in splits.items():
        param = module._parameters[name]
        assert param is not None, "the plan names parameters that are there"
        if id(param) not in done:
            done.add(id(param))
            part = split.cut(param.detach(), axis.rank)
            param.data = part.clone() if part.data_ptr() == param.data_ptr() else part
            param.tensor_model_parallel = True  # type: ignore[attr-defined]  # as Megatron marks them
            if split.shared and param.is_floating_point():
                _hook(param, _SumOfCopies(axis, split))
    if change.rows is not None:
        for param in module.parameters(recurse=False):
            if id(param) not in done and param.is_floating_point():
                done.add(id(param))
                sum_gradient(param, axis)
    return splits


def _convert(
    change: LayerSplit,
    splits: dict[str, DimSplit],
    axis: RankGroup,
    entrance: SharedInput,
    gate: OverlappedInput | None,
) -> None:
    module, rank = change.module, axis.rank
    share = ShardInfo(
        axis,
        splits,
        change.sizes,
        entrance,
        transposed=change.transposed,
        gather_output=change.rule.gather_output and change.kind is SplitKind.COLUMN,
        split_input=change.rule.split_input and change.kind is SplitKind.ROW,
        gate=gate,
        rows=None if change.rows is None else change.rows[rank],
    )
    kinds = {SplitKind.COLUMN: ColumnParallel, SplitKind.ROW: RowParallel, SplitKind.VOCABULARY: VocabularyParallel}
    kind: type[nn.Module] | None = kinds.get(change.kind)  # what is cut by heads computes as before
    if "gate_up_proj" in change.splits:
        kind = ExpertsParallel
    if kind is not None:
        module.__class__ = class_before(kind, type(module))
    module.share = share  # type: ignore[assignment]
    _set_sizes(module, change, rank)


def _set_sizes(module: nn.Module, change: LayerSplit, rank: int) -> None:
    """A layer's own attributes say what lies here."""
    if change.kind is SplitKind.VOCABULARY:
        start, stop = change.splits["weight"].parts[rank][0]
        made: Any = module
        made.first, made.num_embeddings = start, stop - start
    elif change.sizes:
        outputs, inputs = ("out_features", "in_features") if hasattr(module, "out_features") else ("nf", "nx")
        setattr(module, outputs if change.kind is SplitKind.COLUMN else inputs, change.sizes[rank])


def whole_parameters(module: nn.Module) -> dict[int, Tensor]:
    """The whole values of a layer's own split parameters, by id; all ranks call this, empty for any other layer."""
    share = cut_of(module)
    if share is None:
        return {}
    found = {}
    for name, split in share.splits.items():
        param = module._parameters[name]
        if param is not None:
            found[id(param)] = whole_of(param, split, share.axis)
    return found


def cut_state(model: nn.Module, state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """A state dict of whole values as this rank holds them; values that have the size of a part already stay."""
    splits = splits_of(model)
    found = dict(state)
    for name in splits.keys() & state.keys():
        value, split = state[name], splits[name]
        if isinstance(value, Tensor) and value.dim() > split.dim and value.shape[split.dim] == split.total:
            found[name] = split.cut(value, rank)
    return found


def marked_splits(model: nn.Module, ranks: int, known: Collection[str]) -> dict[str, DimSplit] | None:
    """How marked parameters are cut over `ranks`, but for `known` names; None if a mark does not tell.

    A part lies at its rank's place along `partition_dim`; with a stride, or without a dim, nothing can be said.
    """
    found = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if name in known or not getattr(param, "tensor_model_parallel", False):
            continue
        dim, stride = getattr(param, "partition_dim", None), getattr(param, "partition_stride", 1)
        shape = getattr(param, "ds_shape", param.shape)
        if not isinstance(dim, int) or not 0 <= dim < len(shape) or stride != 1:
            return None
        found[name] = DimSplit.of(dim, [even(shape[dim] * ranks, ranks)])
    return found


class GatherReplacedLayerParams:
    """A context in which split parameters are whole; all ranks that share them enter and leave it.

    What is written to them inside counts on every rank that wrote it: they are cut again at the end.
    """

    def __init__(self, params: Iterable[Tensor] | Tensor, module: nn.Module, enabled: bool = True) -> None:
        wanted = {id(each) for each in ([params] if isinstance(params, Tensor) else params)}
        self._found: dict[int, tuple[Tensor, Any, Any]] = {}
        for layer in module.modules() if enabled else ():
            share = cut_of(layer)
            for name, split in {} if share is None else share.splits.items():
                param = layer._parameters.get(name)
                if param is not None and id(param) in wanted:
                    self._found[id(param)] = param, split, share.axis  # type: ignore[union-attr]

    @torch.no_grad()
    def __enter__(self) -> None:
        for param, split, axis in self._found.values():
            if axis.size > 1:
                param.data = whole_of(param.data, split, axis)

    @torch.no_grad()
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for param, split, axis in self._found.values():
            if axis.size > 1:
                param.data = split.cut(param.data, axis.rank).clone()
