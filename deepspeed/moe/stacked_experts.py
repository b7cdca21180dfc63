"""Experts that a model keeps in stacked parameters [experts, …], as those of Transformers do, spread over ranks.

[Note: experts alone] A block of a model has a router, experts, and perhaps experts that see every token. Only the
module of the experts changes: it keeps its object, its hooks and its parameters, of which this rank has a slice, and
gets a class before its own. The block goes on to choose experts and weights by its own code, whatever that is.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.errors import CommError, DeepSpeedConfigError, UsageError
from deepspeed.fragments import DimSplit, even, even_runs, side_by_side
from deepspeed.moe.exchange import exchange, exchange_counts, through_experts
from deepspeed.moe.routing import count_of
from deepspeed.ops.grouped import Groups, grouped_linear
from deepspeed.ops.model.gated import ACTIVATIONS, halves, halves_reference
from deepspeed.ops.model.linear import takes
from deepspeed.parallel import AxisGroup, ExpertGroups
from deepspeed.parallel.regions import ParameterCut, Uncopied, Way, between, enter, joined, leave, own
from deepspeed.transformers.replacement import class_before


class Listener:
    """Called with the assignments of each expert and, where some are dropped, which of them were kept."""

    def __init__(self, listen: Callable[[str, Tensor, Tensor | None], None], path: str) -> None:
        self._listen, self._path = listen, path

    def __call__(self, counts: Tensor, kept: Tensor | None = None) -> None:
        if torch._C._current_graph_task_id() == -1:  # else a backward runs the layer again
            self._listen(self._path, counts, kept)

    def __deepcopy__(self, _: Any) -> None:
        return None


def require_same_routing(chosen: Tensor, axis: AxisGroup, path: str) -> None:
    """An error on every rank of the axis unless all of them chose alike; hosts wait for each other."""
    plain = chosen.detach().long().cpu().contiguous()
    told: list[Any] = [None] * axis.size
    with comm.labelled("whether routers agree"):
        comm.all_gather_object(told, (tuple(plain.shape), zlib.crc32(plain.numpy().data)), group=axis.group)
    for place, other in enumerate(told):
        if other != told[0]:
            raise CommError(
                f"{path}: rank {axis.ranks[place]} chose experts {other[0]} otherwise than rank {axis.ranks[0]} "
                f"{told[0][0]}, with which it shares layers and tokens (expert_parallel.validate_folding_routing). "
                "Give both the same batches, and let routers draw the same numbers"
            )


KEY = "expert_parallel.expert_tensor_parallel_size"
_WIDTHS = ("intermediate_dim", "intermediate_size", "moe_intermediate_size", "expert_dim", "ffn_hidden_size")

Cuts = list[list[tuple[int, int]]]


def inner_splits(path: str, module: nn.Module, ranks: int, *, grouped: bool) -> dict[str, DimSplit]:
    """How a module's own parameters are cut over ranks, by name; those that stay whole are not in it.

    `grouped`: computed by grouped products here, else by the module's own code. What cannot be cut is an error.
    """
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in module.named_parameters(recurse=False)}
    up = "gate_up_proj" if "gate_up_proj" in shapes else "up_proj"
    known = {up, "down_proj", f"{up}_bias", "down_proj_bias"}
    if not {up, "down_proj"} <= set(shapes) <= known:
        _refuse(path, f"it has the parameters {', '.join(shapes)}; expected gate_up_proj (or up_proj) and down_proj")
    if getattr(module, "has_post_expert_norm", False):
        _refuse(path, "its experts normalise their outputs, of which a rank would have a summand only")
    if "down_proj_bias" in shapes and not grouped:
        _refuse(path, "its own code would add down_proj_bias on every rank; leave expert_parallel.use_grouped_mm on")
    turned = _is_turned(path, module, shapes[up], shapes["down_proj"], parts=2 if up == "gate_up_proj" else 1)
    width = shapes["down_proj"][1 if turned else 2]
    if width < ranks:
        _refuse(path, f"its inner width is {width}, which {ranks} ranks cannot share")
    cuts = _cuts(path, module, width, ranks, gated=up == "gate_up_proj")
    found = {
        up: DimSplit.of(2 if turned else 1, cuts),
        "down_proj": DimSplit.of(1 if turned else 2, [even(width, ranks)]),
    }
    if f"{up}_bias" in shapes:
        found[f"{up}_bias"] = DimSplit.of(1, cuts)
    return found


def set_local_width(module: nn.Module, whole: int, part: int) -> None:
    """Let the module's own attributes say how wide the experts are here."""
    for name in _WIDTHS:
        if vars(module).get(name) == whole:
            setattr(module, name, part)


def _is_turned(path: str, module: nn.Module, up: tuple[int, ...], down: tuple[int, ...], *, parts: int) -> bool:
    """Whether matrices are [in, out], as the module says or as their shapes tell; up has `parts` × the inner width."""
    straight = up[1] == parts * down[2] and up[2] == down[1]
    turned = up[2] == parts * down[1] and up[1] == down[2]
    told: bool | None = getattr(module, "is_transposed", None)
    if told is None and straight != turned:
        return turned
    if told is None or not (turned if told else straight):
        _refuse(path, f"its parameters have the shapes {up} and {down}, which do not tell its inner width")
    return told


def _cuts(path: str, module: nn.Module, width: int, ranks: int, *, gated: bool) -> Cuts:
    """Where the inner columns of each rank lie in what goes into the activation: found by trying, where that can be."""
    cut = even(width, ranks)
    if not gated:
        act: Callable[[Tensor], Tensor] | None = getattr(module, "act_fn", None)
        ways = [[cut]]
    else:
        act = getattr(module, "_apply_gate", None)
        in_turns = [[(2 * start, 2 * stop) for start, stop in cut]]
        ways = [side_by_side([width, width], ranks), in_turns]
    if act is None:
        return ways[0 if getattr(module, "is_concatenated", True) else -1]
    way = next((way for way in ways if _holds(act, way, cut)), None)
    if way is None:
        _refuse(path, f"what {type(module).__name__} computes between its products is not the same for parts of them")
    return way


@torch.no_grad()
def _holds(act: Callable[[Tensor], Tensor], way: Cuts, cut: list[tuple[int, int]]) -> bool:
    """Whether an activation of a rank's columns is that rank's part of the activation of all."""
    split = DimSplit.of(1, way)
    given = torch.linspace(-3.0, 3.0, 2 * split.total, device="cpu", dtype=torch.float32).view(2, -1)
    whole = act(given.clone())
    for rank, (start, stop) in enumerate(cut):
        part = act(split.cut(given, rank).clone())
        if part.shape != (2, stop - start) or not _near(part, whole[:, start:stop]):
            return False
    return True


_near = partial(torch.allclose, rtol=1e-5, atol=1e-6)


def _refuse(path: str, why: str) -> NoReturn:
    raise DeepSpeedConfigError(f"{KEY}: {path} cannot be split over tensor-parallel ranks: {why}", path=KEY)


CHOSEN, EVERY = 3, 1
"""Arguments of a module of experts: tokens with their experts and weights, or a row for every expert and token."""


@dataclass
class StackedExperts(Uncopied):
    """What a module of experts knows of the others."""

    path: str
    experts: int  # of the whole model
    groups: ExpertGroups
    grouped: bool  # computed by grouped products here; else by the module's own code
    arguments: tuple[str, ...]  # what the module's own code calls them
    tensor: AxisGroup
    """Tensor-parallel ranks, which have equal tokens: each sends a part of them, unless they share every expert."""
    gate: str | None = None  # what its gate is, if it is one that there is a kernel for
    peers: AxisGroup | None = None  # ranks that are asked whether they chose alike; None: nobody is

    @property
    def local(self) -> int:
        """Experts on each rank."""
        return self.experts // self.groups.ep.size

    @property
    def group_name(self) -> str:
        return f"ep_size_{self.groups.ep.size}"

    def taken(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of what tensor-parallel ranks have alike; its gradient is whole again."""
        return self._between(tensor, dim, tensor.shape[dim], (own, joined))

    def given(self, part: Tensor, dim: int, total: int) -> Tensor:
        """The whole, of which tensor-parallel ranks have parts."""
        return self._between(part, dim, total, (joined, own))

    def _between(self, tensor: Tensor, dim: int, total: int, ways: tuple[Way, Way]) -> Tensor:
        if self.tensor.size == 1:
            return tensor
        sizes = [stop - start for start, stop in even_runs(total, self.tensor.size)]
        if tensor.is_floating_point():
            return between(tensor, self.tensor, sizes, dim, ways)
        return ways[0](tensor, self.tensor, sizes, dim)


def count_of_stack(module: nn.Module) -> int | None:
    """How many experts a module holds in stacked parameters; None if it is no such module."""
    count = getattr(module, "num_experts", None)
    shapes = [getattr(param, "ds_shape", param.shape) for param in module.parameters(recurse=False)]
    if not isinstance(count, int) or count < 2 or not any(len(shape) == 3 for shape in shapes):
        return None
    return count if all(len(shape) > 1 and shape[0] == count for shape in shapes) else None


def kind_of(module: nn.Module) -> tuple[str, ...] | None:
    """The arguments of a module of experts: (tokens, chosen, weights), or (rows,); None for any other number."""
    fixed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    code = inspect.unwrap(type(module).forward)
    names = [each.name for each in inspect.signature(code).parameters.values() if each.kind in fixed][1:]
    return tuple(names) if len(names) in (CHOSEN, EVERY) else None


def computes_by_flags(module: nn.Module) -> bool:
    """True if a module says what it computes, by the flags that Transformers' own grouped products go by."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "_apply_gate", "down_proj"))


@torch.no_grad()
def spread_stack(module: nn.Module, stack: StackedExperts, done: set[int], share: AxisGroup | None = None) -> None:
    """Let a module keep this rank's slice of its experts; parameters keep their identity, by which optimizers go.

    The ranks of `share` have parts of every expert.
    """
    first = stack.groups.ep.rank * stack.local
    splits = {} if share is None else inner_splits(stack.path, module, share.size, grouped=stack.grouped)
    for name, param in module.named_parameters(recurse=False):
        if id(param) not in done:
            done.add(id(param))
            part = param.detach()[first : first + stack.local]
            if share is not None and name in splits:
                part = splits[name].cut(part, share.rank)
                param.tensor_model_parallel = True  # type: ignore[attr-defined]  # as Megatron marks them
            param.data = part.clone()
            param.allreduce = False  # type: ignore[attr-defined]  # as parameters of experts are marked
            param.group_name = stack.group_name  # type: ignore[attr-defined]
    if share is not None:
        module.share = ParameterCut(share, splits)  # type: ignore[assignment]
        set_local_width(module, splits["down_proj"].total, splits["down_proj"].size(share.rank))
    stack.gate = _kind_of_gate(module) if stack.grouped and module.has_gate else None
    module.__class__ = class_before(SpreadStack, type(module), "Spread")
    module.num_experts = stack.local  # type: ignore[assignment]  # what its own code computes with
    module.stack = stack  # type: ignore[assignment]


@torch.no_grad()
def _kind_of_gate(module: nn.Module) -> str | None:
    """The activation whose product with the other half a module's own gate computes, found by trying."""
    given = torch.linspace(-9.0, 9.0, 48, device="cpu", dtype=torch.float32).view(2, 24)
    found = module._apply_gate(given.clone())  # type: ignore[operator]
    expected = {kind: halves_reference(given, kind) for kind in ACTIVATIONS}
    alike = (kind for kind, value in expected.items() if value.shape == found.shape and _near(found, value))
    return next(alike, None)


class SpreadStack(nn.Module):
    """Put before the class of a module of experts: tokens go to the ranks of their experts."""

    stack: StackedExperts
    listener: Listener | None = None
    beside: Callable[[], None] | None = None  # what is done while tokens travel
    share: ParameterCut | None = None  # how ranks that have equal tokens share every expert; None: they do not

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        stack = self.stack
        given = dict(zip(stack.arguments, args, strict=False)) | kwargs
        values = [given.get(name) for name in stack.arguments]
        if len(given) != len(values) or not all(isinstance(each, Tensor) for each in values):
            raise UsageError(
                f"{stack.path}: its experts are spread over {stack.groups.ep.size} ranks and take the tensors "
                f"{', '.join(stack.arguments)}, but were called with {', '.join(map(str, given))}"
            )
        if len(values) == EVERY:
            return self._every(*values)  # type: ignore[arg-type]
        return self._chosen(*values)  # type: ignore[arg-type]

    def _chosen(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Each token [..., M] to the experts [S, k] that its router chose."""
        stack = self.stack
        flat = tokens.reshape(-1, tokens.shape[-1])
        if chosen.shape != weights.shape or len(chosen) != len(flat):
            raise UsageError(
                f"{stack.path}: {len(flat)} tokens came with chosen experts of shape {tuple(chosen.shape)} and weights "
                f"of shape {tuple(weights.shape)}; expected [{len(flat)}, k] for both"
            )
        if self.listener is not None and self.training:
            self.listener(count_of(chosen.reshape(-1), stack.experts))
        if stack.peers is not None:
            require_same_routing(chosen, stack.peers, stack.path)
        compute = self._grouped if stack.grouped else self._own
        if self.share is not None:  # of tokens and weights every rank has a summand of the gradient
            flat, weights = (enter(each, self.share.axis) for each in (flat, weights))
        total, flat, chosen, weights = len(flat), *(stack.taken(each, 0) for each in (flat, chosen, weights))
        out = through_experts(
            flat,
            chosen.t(),
            weights.t(),
            count=stack.experts,
            axis=stack.groups.ep,
            compute=compute,
            beside=self.beside,
        )
        out = stack.given(out, 0, total)
        out = out if self.share is None else leave(out, self.share.axis)
        return out.view(*tokens.shape[:-1], out.shape[-1])

    def _grouped(self, rows: Tensor, groups: Groups) -> Tensor:
        """What the module's flags say, over all experts at once."""
        up, down = ("gate_up_proj" if self.has_gate else "up_proj"), "down_proj"
        inner = self._product(rows, groups, up)
        if not self.has_gate:
            inner = self.act_fn(inner)  # type: ignore[operator]
        elif self.stack.gate is not None and takes(inner):
            inner = halves(inner, self.stack.gate)
        else:
            inner = self._apply_gate(inner)  # type: ignore[operator]
        out = self._product(inner, groups, down)
        return self.post_expert_norm(out) if getattr(self, "has_post_expert_norm", False) else out  # type: ignore[operator]

    def _product(self, rows: Tensor, groups: Groups, name: str) -> Tensor:
        weight: Tensor = getattr(self, name)
        bias = getattr(self, f"{name}_bias") if self.has_bias else None
        if bias is not None and self.share is not None and f"{name}_bias" not in self.share.splits:
            bias = enter(bias, self.share.axis) / self.share.axis.size  # outputs of ranks are summed
        return grouped_linear(rows, weight.transpose(1, 2) if self.is_transposed else weight, groups, bias)

    def _own(self, rows: Tensor, groups: Groups) -> Tensor:
        """The module's own code, for which each row is a token of one expert with the weight 1."""
        if len(rows) == 0:  # code that finds no expert to call has no way back to anything
            return rows + sum(param.flatten()[:1].sum() * 0 for param in self.parameters())
        numbers = groups.numbers(len(rows)).long().unsqueeze(1)
        out: Tensor = super().forward(rows, numbers, rows.new_ones(len(rows), 1))
        return out

    def _every(self, rows: Tensor) -> Tensor:
        """[experts × S, M]: every expert computes a row for every token, which ranks may have different numbers of."""
        stack = self.stack
        if stack.peers is not None or (self.listener is not None and self.training):
            taken = rows.detach().view(stack.experts, -1, rows.shape[-1]).any(-1)  # others have rows of 0
            if self.listener is not None and self.training:
                self.listener(taken.sum(1))
            if stack.peers is not None:
                require_same_routing(taken, stack.peers, stack.path)
        if self.share is None:
            return self._travelled(rows)
        return leave(self._travelled(enter(rows, self.share.axis)), self.share.axis)

    def _travelled(self, rows: Tensor) -> Tensor:
        axis, local = self.stack.groups.ep, self.stack.local
        if axis.size == 1 and self.stack.tensor.size == 1:
            alone: Tensor = super().forward(rows)
            return alone
        total, width = len(rows) // self.stack.experts, rows.shape[-1]
        taken = self.stack.taken(rows.view(self.stack.experts, total, width), 1)
        tokens = taken.shape[1]
        told = exchange_counts(torch.full((axis.size, 1), tokens, device=rows.device), axis).view(-1).tolist()
        comes, goes = [local * each for each in told], [local * tokens] * axis.size
        parts = exchange(taken.reshape(-1, width), axis, comes, goes, self.beside).split(comes)
        side_by_side = torch.cat([part.view(local, each, width) for part, each in zip(parts, told, strict=True)], dim=1)
        out: Tensor = super().forward(side_by_side.reshape(-1, width))
        width = out.shape[-1]
        back = out.view(local, sum(told), width).split(told, dim=1)
        came = exchange(torch.cat([each.reshape(-1, width) for each in back]), axis, goes, comes)
        whole = self.stack.given(came.view(self.stack.experts, tokens, width), 1, total)
        return whole.reshape(-1, width)
