"""`Rule`: how weights whose names match are split. The user's own rules, and what all sources of rules are made of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from deepspeed.config.parallel import LayerSpecConfig

__all__ = ["Kind", "Rule", "Rules", "of_spec", "plain_path"]


class Kind(Enum):
    """What becomes of a layer."""

    COLUMN = "column"
    """Its output is split: rows of a Linear's weight."""
    ROW = "row"
    """Its input is split: columns of a Linear's weight; the outputs of all ranks are summed."""
    WHOLE = "skip"
    """Every rank has all of it and computes the same."""
    WHOLE_INSIDE = "skip, gradients summed"
    """Every rank has all of it and applies it to its own heads, so that gradients are summed."""
    HEADS = "heads"
    """Something of an attention module that has a row for each head; each rank has those of its heads."""
    WHOLE_AND_INTO_HEADS = "skip, some outputs go to heads"
    """Every rank has all of it; its last outputs go to this rank's heads, so that their gradients are summed."""
    VOCABULARY = "vocabulary"
    """An embedding or output layer, split by tokens."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule; `pattern` is matched from the start of `<module>.weight`."""

    pattern: re.Pattern[str]
    kind: Kind
    parts: int | tuple[int, ...] = 1
    """Equal parts, or the sizes of unequal ones, that are fused in the split dim."""
    gather_output: bool = False
    """The output of a column layer is gathered whole."""
    split_input: bool = False
    """The input of a row layer is whole, and each rank takes its share of it."""
    model_types: tuple[str, ...] | None = None
    source: str = "the config"
    """Where the rule comes from, for messages."""
    known: bool = False
    """The layer is one of a family whose parts fit together also where they are unequal."""

    def matches(self, name: str, model_type: str | None) -> bool:
        """Whether it is about the module of this path."""
        if self.model_types is not None and (model_type or "").lower() not in self.model_types:
            return False
        return self.pattern.match(f"{name}.weight") is not None


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules in order of precedence; the first that matches wins."""

    rules: tuple[Rule, ...]
    strict: bool = False
    """A layer that no rule matches is an error."""
    heads: Sequence[str] = ("lm_head", "embed_out")
    """Last parts of the path of the output layer."""

    def find(self, name: str, model_type: str | None) -> Rule | None:
        return next((rule for rule in self.rules if rule.matches(name, model_type)), None)


def plain_path(path: str) -> str:
    """A path without what adapter libraries put around a model and its layers."""
    return path.removesuffix(".base_layer").removeprefix("base_model.model.")


def of_spec(spec: LayerSpecConfig, source: str) -> list[Rule]:
    """A rule of the config's `layer_specs`, one for each of its patterns."""
    kind = Kind(spec.partition_type)
    if kind is Kind.WHOLE and spec.grad_allreduce:
        kind = Kind.WHOLE_INSIDE
    parts: int | tuple[int, ...] = 1
    if spec.shape is not None and kind in (Kind.COLUMN, Kind.ROW):
        dim = spec.partition_dim if spec.partition_dim is not None else (1 if kind is Kind.ROW else 0)
        at = spec.shape[dim]
        parts = tuple(at) if isinstance(at, list) else max(at, 1)
    types = None if spec.model_types is None else tuple(name.lower() for name in spec.model_types)
    return [
        Rule(re.compile(pattern), kind, parts, spec.gather_output, model_types=types, source=source)
        for pattern in spec.patterns
    ]
