"""The plan that a Transformers model brings with it (`tp_plan`), as rules."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

from deepspeed.errors import UsageError
from deepspeed.tensor_parallel.rules import Kind, Rule, plain_path

__all__ = ["model_plan", "of_plan"]

_SOURCE = "the model's own tp_plan"
_STYLES: dict[str, dict[str, Any]] = {
    "colwise": {"kind": Kind.COLUMN},
    "rowwise": {"kind": Kind.ROW},
    "colwise_gather_output": {"kind": Kind.COLUMN, "gather_output": True},
    "colwise_rep": {"kind": Kind.COLUMN, "gather_output": True},
    "rowwise_split_input": {"kind": Kind.ROW, "split_input": True},
    "rowwise_rep": {"kind": Kind.ROW, "split_input": True},
    "embedding_rowwise": {"kind": Kind.VOCABULARY},
    "replicate": {"kind": Kind.WHOLE},
    "mla_kv_a_proj": {"kind": Kind.WHOLE},  # what becomes of its outputs follows from its attention
    "replicated_with_grad_allreduce": {"kind": Kind.WHOLE_INSIDE},
    "packed_colwise": {"kind": Kind.COLUMN, "parts": 2},
    "packed_rowwise": {"kind": Kind.ROW, "parts": 2},
    "moe_tp_experts": {"kind": Kind.COLUMN},
}
_BETTER = {"qkv_proj": 3, "gate_up_proj": 2}
"""Fused layers that plans gather, because their parts are side by side; they are cut part by part instead."""


def model_plan(model: nn.Module) -> dict[str, str]:
    """The plans of all modules that have one, by path pattern with `*` for a number; empty if there is none."""
    plan: dict[str, str] = {}
    paths = {path for path, _ in model.named_modules()}
    for prefix, module in model.named_modules():
        base = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        # A wrapper may answer for the model inside of it: only the module's own plans count.
        for own in (getattr(type(module), "_tp_plan", None), vars(module).get("_tp_plan")):
            if isinstance(own, Mapping):
                plan.update({_under(prefix, path): style for path, style in own.items()})
        if isinstance(base, Mapping):
            for where in _bases(module, prefix, base, paths):
                plan.update({_under(where, path): style for path, style in base.items()})
    return plan


def _bases(module: nn.Module, prefix: str, plan: Mapping[str, str], paths: Collection[str]) -> Iterator[str]:
    """The paths of the modules that the plan of a config is about: a base model, or what fits in any other model."""
    if hasattr(module, "base_model"):
        yield from [prefix] if module.base_model is module else []
    elif not prefix:
        firsts = {path.partition(".*")[0] for path in plan}
        yield from (path for path in paths if any((f"{path}.{first}" if path else first) in paths for first in firsts))


def of_plan(plan: Mapping[str, str]) -> list[Rule]:
    """A rule for each row of a plan."""
    found = []
    for path, style in plan.items():
        if style not in _STYLES:
            raise UsageError(
                f"tensor_parallel: the model's own plan splits {path} by {style!r}, which is not known here (known: "
                f"{', '.join(_STYLES)}). Give tensor_parallel.partition_config with rules for this model"
            )
        options = dict(_STYLES[style])
        leaf = path.rsplit(".", 1)[-1]
        if leaf in _BETTER and options["kind"] is Kind.COLUMN:
            options = {"kind": Kind.COLUMN, "parts": _BETTER[leaf]}
        elif options.get("split_input") and _fused_before(path, plan):
            options = {"kind": Kind.ROW}
        pattern = re.escape(path).replace(r"\*", r"\d+")
        found.append(Rule(re.compile(rf"{pattern}\.weight$"), **options, source=_SOURCE, known=True))
    return found


def _fused_before(path: str, plan: Mapping[str, str]) -> bool:
    """Whether a row layer follows a fused layer that is cut part by part, so that its input is split already."""
    parent = path.rsplit(".", 1)[0]
    return any(f"{parent}.{leaf}" in plan for leaf in _BETTER)


def _under(prefix: str, path: str) -> str:
    return plain_path(f"{prefix}.{path}" if prefix else path)
