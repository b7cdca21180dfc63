"""`LayerSplit`: what becomes of one layer; what rules do not say of what lies between layers, and what cannot be."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from deepspeed.errors import UsageError
from deepspeed.fragments import DimSplit, even
from deepspeed.tensor_parallel.attention import Attention
from deepspeed.tensor_parallel.rules import Rule, SplitKind
from deepspeed.transformers.replacement import whole_shape

_BY_HEADS = Rule(re.compile(""), SplitKind.HEADS, source="the heads of its attention", known=True)
_MULTIPLIED = (("gate_proj", "up_proj"), ("wi_0", "wi_1"), ("w1", "w3"))
"""Names of layers of a gated feed-forward network."""
_LATENT_PROJECTION = "kv_a_proj_with_mqa"
_INSIDE = Rule(re.compile(""), SplitKind.WHOLE_INSIDE, source="the heads of its attention", known=True)


@dataclass(frozen=True)
class LayerSplit:
    """What becomes of one layer."""

    path: str
    module: nn.Module
    kind: SplitKind
    rule: Rule
    splits: dict[str, DimSplit] = field(default_factory=dict)
    """By the name of the parameter in the layer; parameters that are not here stay whole."""
    sizes: tuple[int, ...] = ()
    """Of the split dim of the activation, by rank."""
    transposed: bool = False
    rows: tuple[tuple[tuple[int, int], ...], ...] | None = None
    """By rank: the outputs it needs of a weight that stays whole."""


def inside(attention: Attention, ranks: int, changes: Sequence[LayerSplit]) -> Iterator[LayerSplit]:
    """What becomes of parameters that an attention applies to its heads, where no rule is about them.

    Norms of a head's size are whole on all ranks, each of which sees its own heads: their gradients are summed. What
    has a row for each head is cut. Where a model keeps a module for each head, nothing can be said.
    """
    _check_projections(attention, changes)
    rotated = _rotated_keys(attention)
    if rotated is not None:
        yield rotated
    known = {id(module) for change in changes for module in change.module.modules()}
    for name, module in attention.module.named_modules():
        if id(module) in known or (name and _before_heads(name)):
            continue
        path = f"{attention.path}.{name}" if name else attention.path
        splits = {}
        for own, param in module.named_parameters(recurse=False):
            cuts = _of_heads(attention, f"{name}.{own}", param, ranks)
            if cuts is not None:
                splits[own] = DimSplit.of(0, [cuts])
            elif name == "relative_attention_bias" and whole_shape(param)[-1] == attention.heads.query:
                splits[own] = DimSplit.of(1, [attention.heads.queries_of(ranks)])  # [buckets, heads]
            elif "norm" in type(module).__name__.lower() and whole_shape(param) == (attention.heads.dim,):
                _check_lone(path, attention)
                yield LayerSplit(path, module, SplitKind.WHOLE_INSIDE, _INSIDE)
                break
        if splits:
            yield LayerSplit(path, module, SplitKind.HEADS, _BY_HEADS, splits)


def _check_projections(attention: Attention, changes: Sequence[LayerSplit]) -> None:
    """Raise where rules split some of the projections that make heads, and not all."""
    split = {id(change.module) for change in changes if _is_open(change)}
    for name, child in attention.module.named_children():
        layers = [layer for layer in child.modules() if isinstance(layer._parameters.get("weight"), nn.Parameter)]
        if attention.splits(name) and layers and not any(id(layer) in split for layer in layers):
            raise UsageError(
                f"tensor_parallel: rules split other projections of the attention {attention.path} by its "
                f"{attention.heads.query} heads, but not the outputs (dim 0) of {attention.path}.{name}. Give all of "
                "them a rule with partition_type column and without gather_output, or all of them skip"
            )


def _rotated_keys(attention: Attention) -> LayerSplit | None:
    """Of latent attention: the projection whose last outputs are keys that all heads share, past `kv_b_proj`."""
    layer = getattr(attention.module, _LATENT_PROJECTION, None)
    width = getattr(attention.module, "qk_rope_head_dim", None)
    if not isinstance(layer, nn.Module):
        return None
    path = f"{attention.path}.{_LATENT_PROJECTION}"
    if not isinstance(width, int):
        raise UsageError(
            f"tensor_parallel: how many of the last outputs (dim 0) of {path} are rotated keys is not known, because "
            f"{type(attention.module).__name__} has no qk_rope_head_dim. Give the layers of this attention rules with "
            "partition_type skip"
        )
    return LayerSplit(path, layer, SplitKind.WHOLE_AND_INTO_HEADS, _INSIDE, sizes=(width,))


@dataclass(frozen=True)
class SplitRegion:
    """A module that holds split activations, and layers in it that the user's rules may have forgotten."""

    module: nn.Module
    split: LayerSplit
    """A layer whose outputs are split."""
    unsplit: tuple[str, ...]
    """Layers without a rule that are as wide as these outputs together."""

    def explains(self, error: RuntimeError) -> bool:
        """Whether an error of the module's forward is about shapes, of which one is split and one is not."""
        numbers = set(map(int, re.findall(r"\d+", str(error))))
        return type(error) is RuntimeError and sum(self.split.sizes) in numbers and bool(numbers & {*self.split.sizes})

    def explained(self, error: RuntimeError) -> UsageError:
        """The same error, with the layers and the rule."""
        rule = self.split.rule
        return UsageError(
            f"tensor_parallel: the forward of {type(self.module).__name__} failed: {error}. The rule "
            f"{rule.pattern.pattern!r} of {rule.source} splits the {sum(self.split.sizes)} outputs of "
            f"{self.split.path}, but no rule splits {', '.join(self.unsplit)}, which is as wide. If it works on the "
            "same activations, give it a rule with partition_type column or row in "
            "tensor_parallel.partition_config.layer_specs"
        )


def incomplete_regions(
    model: nn.Module, regions: Mapping[str, LayerSplit], changes: Sequence[LayerSplit]
) -> Iterator[SplitRegion]:
    """Those of the modules that hold a pair split by the user's rules, and a layer as wide that is not split."""
    split = {id(module) for change in changes for module in change.module.modules()}
    for path, column in regions.items():
        module, width = model.get_submodule(path), sum(column.sizes)
        unsplit = tuple(
            name
            for name, layer in module.named_modules(prefix=path)
            if id(layer) not in split and any(width in whole_shape(p) for p in layer.parameters(recurse=False))
        )
        if unsplit and not column.rule.known:
            yield SplitRegion(module, column, unsplit)


def check_pairs(model: nn.Module, changes: Sequence[LayerSplit]) -> dict[str, LayerSplit]:
    """Raise where layers make half of a pair: outputs that stay split, or inputs that nothing splits.

    Layers of a pair are in one module, or the nearest around them that has both. That is a block for those that are
    known by their names alone, of which as many are split by outputs as by inputs, or more. Returns a layer that is
    split by outputs for the path of each of these modules.
    """
    _check_gates(model, changes)
    found: dict[str, LayerSplit] = {}
    waiting: dict[str, list[LayerSplit]] = {}
    for change in changes:
        if (_is_open(change) and ".lora_" not in change.path) or _is_row(change):
            waiting.setdefault(change.path.rpartition(".")[0], []).append(change)
    while waiting:
        path = max(waiting, key=lambda each: (each.count("."), each))
        here = waiting.pop(path)
        rows = [change for change in here if change.kind is SplitKind.ROW]
        columns = [change for change in here if change.kind is SplitKind.COLUMN]
        named = any(change.rule.source.startswith("the names") for change in here)
        if rows and columns and (len(rows) <= len(columns) or not named):
            found[path] = columns[0]
            continue
        if (rows and columns) or path == (_block(f"{path}.") if named else ""):
            raise UsageError(_half(max(rows or columns, key=lambda each: each.path.count("."))))
        waiting.setdefault(path.rpartition(".")[0], []).extend(here)
    return found


def _check_gates(model: nn.Module, changes: Sequence[LayerSplit]) -> None:
    """Raise where one of two layers is split whose outputs are multiplied."""
    split = {change.path.removesuffix(".base_layer") for change in changes if _is_open(change)}
    for path in split:
        parent, _, leaf = path.rpartition(".")
        others = [other for pair in _MULTIPLIED if leaf in pair for other in pair if other != leaf]
        for other in others:
            if hasattr(model.get_submodule(parent), other) and f"{parent}.{other}".lstrip(".") not in split:
                raise UsageError(
                    f"tensor_parallel: rules split {path} by its outputs (dim 0 of its weight), but not {other} beside "
                    "it, by whose outputs they are multiplied. Give both the same rule in "
                    "tensor_parallel.partition_config.layer_specs"
                )


def _is_open(change: LayerSplit) -> bool:
    """Whether the outputs of a layer stay split."""
    experts = "gate_up_proj" in change.splits
    return change.kind is SplitKind.COLUMN and not change.rule.gather_output and not experts


def _is_row(change: LayerSplit) -> bool:
    """Whether a layer takes inputs that are split."""
    return change.kind is SplitKind.ROW and not change.rule.split_input and ".lora_" not in change.path


def _half(change: LayerSplit) -> str:
    by_inputs = change.kind is SplitKind.ROW
    what = "inputs (dim 1 of its weight)" if by_inputs else "outputs (dim 0 of its weight)"
    if change.rule.source.startswith("the names"):
        return (
            f"tensor_parallel: by its name {change.path} would be split by its {what}, but the names of the layers "
            "around it do not tell which go with it. Give rules in tensor_parallel.partition_config.layer_specs"
        )
    missing = "no layer before it is split by outputs" if by_inputs else "no layer behind it is split by inputs"
    add = "the layer before it the partition_type column" if by_inputs else "the layer behind it the partition_type row"
    return (
        f"tensor_parallel: {change.rule.source} splits {change.path} by its {what}, but {missing}. Give {add} in "
        f"tensor_parallel.partition_config.layer_specs{'' if by_inputs else ', or set gather_output'}"
    )


def _block(path: str) -> str:
    """The path up to the last number in it: a block of a list."""
    found = re.match(r"(.*\.\d+)\.", path)
    return found.group(1) if found else ""


def projects_heads(attention: Attention, changes: Sequence[LayerSplit]) -> bool:
    """Whether a rank's projections give it its own heads alone."""
    inner = {id(module) for module in attention.module.modules()}
    return any(_is_open(change) for change in changes if id(change.module) in inner)


def _before_heads(name: str) -> bool:
    """Of latent attention: norms between its two projections of queries or keys."""
    return name.rsplit(".", 1)[-1].endswith(("_a_layernorm", "_a_norm"))


def _of_heads(attention: Attention, name: str, param: Any, ranks: int) -> list[tuple[int, int]] | None:
    """The heads of each rank, where a parameter has a row for each of them."""
    heads, shape = attention.heads, whole_shape(param)
    lone = len(shape) == 1 and name == ".sinks"
    if not (lone or (len(shape) == 2 and shape[1] == heads.dim and "norm" in name)):
        return None
    of_keys = name.startswith(("k_", "key_"))
    if shape[0] != (heads.key_value if of_keys else heads.query):
        return None
    return heads.keys_of(ranks) if of_keys else heads.queries_of(ranks)


def _check_lone(path: str, attention: Attention) -> None:
    above = path.rpartition(".")[0]
    inner = above.removeprefix(f"{attention.path}.")
    holder = (
        attention.module.get_submodule(inner) if above != attention.path and above.startswith(attention.path) else None
    )
    if isinstance(holder, nn.ModuleList) and len(holder) > 1:
        raise UsageError(
            f"tensor_parallel: {above} has a module for each of {len(holder)} heads, which cannot be split (dim 1 of "
            "[batch, heads, sequence, head]). Give rules with partition_type skip for the layers of this attention"
        )


_ALIGNED = 16
"""Bytes: strides of what torch's grouped product takes are multiples of it."""


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds experts so, which expert parallelism has not dealt to ranks already."""
    names = module._parameters
    if any(getattr(param, "allreduce", True) is False for param in names.values()):
        return False
    held = [names.get(name) for name in ("gate_up_proj", "down_proj")]
    return all(isinstance(param, nn.Parameter) and len(whole_shape(param)) == 3 for param in held)


def cut_experts(path: str, module: nn.Module, rule: Rule, ranks: int, grain: int) -> LayerSplit:
    """The inner width in parts that a grouped product takes in 16 bits or else in 32 bits, where there are such."""
    up, down = whole_shape(module.gate_up_proj), whole_shape(module.down_proj)
    inner = down[-1]
    if up[1] != 2 * inner or up[2] != down[1] or getattr(module, "is_transposed", False):
        raise UsageError(
            f"tensor_parallel: {path} holds experts of shapes {up} and {down}; expected [experts, 2 × inner, hidden] "
            "and [experts, hidden, inner]. Skip it in tensor_parallel.partition_config"
        )
    if inner // grain < ranks:
        raise UsageError(
            f"tensor_parallel: {path} holds experts of the inner width {inner} (dim 2 of down_proj), which {ranks} "
            f"ranks cannot share in multiples of {grain}. Use a smaller tensor_parallel.autotp_size, or skip it in "
            "tensor_parallel.partition_config"
        )
    units = (math.lcm(_ALIGNED // size, grain) for size in (2, 4))
    cut = even(inner, ranks, next((unit for unit in units if inner % unit == 0 and inner // unit >= ranks), grain))
    fused = DimSplit.of(1, [cut, [(start + inner, stop + inner) for start, stop in cut]])
    return LayerSplit(
        path, module, SplitKind.COLUMN, rule, {"gate_up_proj": fused, "down_proj": DimSplit.of(2, [cut])}, ()
    )


def check_products(changes: Sequence[LayerSplit], element_size: int | None) -> None:
    """Raise where experts are computed by torch's grouped product, and it does not take their parts.

    `element_size` is that of the dtype that the model will have; None where it keeps its own.
    """
    for change in changes:
        config: Any = getattr(change.module, "config", None)
        split = change.splits.get("down_proj")
        if split is None or getattr(config, "_experts_implementation", None) != "grouped_mm":
            continue
        weight: Any = change.module.down_proj
        unit = _ALIGNED // (element_size or weight.element_size())
        widths = [split.size(rank) for rank in range(split.ranks)]
        if any(width % unit for width in widths):
            raise UsageError(
                f"tensor_parallel: {change.path} holds experts of the inner width {split.total} (dim 2 of down_proj), "
                f"of which the ranks get {', '.join(map(str, widths))}. Torch's grouped product takes multiples of "
                f"{unit} ({_ALIGNED} bytes). Use a tensor_parallel.autotp_size of at most {max(split.total // unit, 1)}"
                ", or call model.set_experts_implementation('eager')"
            )
