"""`Change`: what becomes of one layer; what rules do not say of what lies between layers, and what cannot be."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from deepspeed.errors import UsageError
from deepspeed.fragments import Split
from deepspeed.tensor_parallel.attention import Attention
from deepspeed.tensor_parallel.rules import Kind, Rule

__all__ = ["Change", "check_pairs", "inside"]

_BY_HEADS = Rule(re.compile(""), Kind.HEADS, source="the heads of its attention", known=True)
_LATENT_PROJECTION = "kv_a_proj_with_mqa"
_INSIDE = Rule(re.compile(""), Kind.WHOLE_INSIDE, source="the heads of its attention", known=True)


@dataclass(frozen=True)
class Change:
    """What becomes of one layer."""

    path: str
    module: nn.Module
    kind: Kind
    rule: Rule
    splits: dict[str, Split] = field(default_factory=dict)
    """By the name of the parameter in the layer; parameters that are not here stay whole."""
    sizes: tuple[int, ...] = ()
    """Of the split dim of the activation, by rank."""
    transposed: bool = False
    rows: tuple[tuple[tuple[int, int], ...], ...] | None = None
    """By rank: the outputs it needs of a weight that stays whole."""


def inside(attention: Attention, ranks: int, changes: Sequence[Change]) -> Iterator[Change]:
    """What becomes of parameters that an attention applies to its heads, where no rule is about them.

    Norms of a head's size are whole on all ranks, each of which sees its own heads: their gradients are summed. What
    has a row for each head is cut. Where a model keeps a module for each head, nothing can be said.
    """
    if not _projects_heads(attention, changes):
        return
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
                splits[own] = Split.of(0, [cuts])
            elif name == "relative_attention_bias" and _shape(param)[-1] == attention.heads.query:
                splits[own] = Split.of(1, [attention.heads.queries_of(ranks)])  # [buckets, heads]
            elif "norm" in type(module).__name__.lower() and _shape(param) == (attention.heads.dim,):
                _check_lone(path, attention)
                yield Change(path, module, Kind.WHOLE_INSIDE, _INSIDE)
                break
        if splits:
            yield Change(path, module, Kind.HEADS, _BY_HEADS, splits)


def _rotated_keys(attention: Attention) -> Change | None:
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
    return Change(path, layer, Kind.WHOLE_AND_INTO_HEADS, _INSIDE, sizes=(width,))


def check_pairs(changes: Sequence[Change]) -> None:
    """Raise where the names of layers make half of a pair: outputs that stay split, or inputs that nobody split.

    Layers of a pair are in one module of a block, or the block is the nearest that has both.
    """
    waiting: dict[str, list[Change]] = {}
    for change in changes:
        named = change.rule.source.startswith("the names") and change.kind in (Kind.COLUMN, Kind.ROW)
        if named and "gate_up_proj" not in change.splits and ".lora_" not in change.path:
            waiting.setdefault(change.path.rpartition(".")[0], []).append(change)
    while waiting:
        path = max(waiting, key=lambda each: each.count("."))
        here = waiting.pop(path)
        rows = [change for change in here if change.kind is Kind.ROW]
        columns = [change for change in here if change.kind is Kind.COLUMN]
        if rows and len(rows) <= len(columns):
            continue
        if (rows and columns) or path == _block(f"{path}."):
            half = max(rows or columns, key=lambda each: each.path.count("."))
            what = "inputs (dim 1 of its weight)" if rows else "outputs (dim 0 of its weight)"
            raise UsageError(_half(half, what))
        waiting.setdefault(path.rpartition(".")[0], []).extend(here)


def _half(change: Change, what: str) -> str:
    return (
        f"tensor_parallel: by its name {change.path} would be split by its {what}, but the names of the layers "
        "around it do not tell which go with it. Give rules in tensor_parallel.partition_config.layer_specs"
    )


def _block(path: str) -> str:
    """The path up to the last number in it: a block of a list."""
    found = re.match(r"(.*\.\d+)\.", path)
    return found.group(1) if found else ""


def _projects_heads(attention: Attention, changes: Sequence[Change]) -> bool:
    """Whether a rank's projections give it its own heads alone."""
    inner = {id(module) for module in attention.module.modules()}
    own = [change for change in changes if id(change.module) in inner and change.kind is Kind.COLUMN]
    return any(not change.rule.gather_output for change in own)


def _before_heads(name: str) -> bool:
    """Of latent attention: norms between its two projections of queries or keys."""
    return name.rsplit(".", 1)[-1].endswith(("_a_layernorm", "_a_norm"))


def _of_heads(attention: Attention, name: str, param: Any, ranks: int) -> list[tuple[int, int]] | None:
    """The heads of each rank, where a parameter has a row for each of them."""
    heads, shape = attention.heads, _shape(param)
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


def _shape(param: Any) -> tuple[int, ...]:
    return tuple(getattr(param, "ds_shape", param.shape))
