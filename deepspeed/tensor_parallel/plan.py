"""A model and rules → what becomes of each layer, for all ranks at once. Pure: nothing is changed, nothing is sent."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any

from torch import nn

from deepspeed.config.parallel import TPTrainingConfig
from deepspeed.errors import UsageError
from deepspeed.fragments import DimSplit, even, side_by_side
from deepspeed.log import log_dist
from deepspeed.parallel.regions import OwnProduct
from deepspeed.tensor_parallel.attention import Attention, find_attention
from deepspeed.tensor_parallel.layer_splits import (
    LayerSplit,
    SplitRegion,
    check_pairs,
    cut_experts,
    incomplete_regions,
    inside,
    is_experts,
    projects_heads,
)
from deepspeed.tensor_parallel.layers import share_of
from deepspeed.tensor_parallel.rules import Rule, Rules, SplitKind, plain_path
from deepspeed.transformers.replacement import whole_shape


@dataclass(frozen=True)
class ModelStage:
    """Some layers of a model; the others are on other ranks."""

    owner: nn.Module
    """The module whose forward computes logits and loss, with what of it lies here."""
    blocks: tuple[nn.Module, ...] = ()
    """The blocks that lie here, in order."""
    first: nn.Module | None = None
    """The model's first block; None where it lies elsewhere."""
    last: nn.Module | None = None
    """Its last block, likewise."""
    tied: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Id of a weight that lies here → the paths of layers elsewhere that share it."""


_SPLIT_VOCABULARY = Rule(re.compile(""), SplitKind.VOCABULARY, known=True, source="vocab_parallel_lm_head")
_SPLIT_EMBEDDING = Rule(re.compile(""), SplitKind.VOCABULARY, known=True, source="vocab_parallel_embedding")


@dataclass(frozen=True)
class SplitPlan:
    """All changes, and the attention modules that must know their share."""

    ranks: int
    changes: tuple[LayerSplit, ...]
    attention: tuple[Attention, ...]
    heads: tuple[LayerSplit, ...]
    """Those of `changes` that are output layers."""
    rules: Rules
    """What made it."""
    untouched: tuple[str, ...] = ()
    """The paths of attention modules that stay whole."""
    incomplete: tuple[SplitRegion, ...] = ()
    """Where the user's rules may have forgotten a layer."""

    @property
    def divides(self) -> bool:
        """Whether any layer is split."""
        return any(change.kind not in (SplitKind.WHOLE, SplitKind.WHOLE_INSIDE) for change in self.changes)


def _input_embedding(model: nn.Module) -> nn.Module:
    find: Any = getattr(model, "get_input_embeddings", None)
    found = None if find is None else _base(find())
    if not isinstance(found, nn.Embedding):
        raise UsageError(
            f"tensor_parallel.vocab_parallel_embedding is true, but {type(model).__name__} has no "
            "get_input_embeddings() that gives an Embedding, as models of Transformers do. Leave the key out"
        )
    return found


def require_split(made: SplitPlan, what: str) -> None:
    """Refuse a plan by which nothing is split, unless rules say so."""
    if made.divides:
        return
    if made.changes:
        log_dist(
            f"tensor_parallel.autotp_size is {made.ranks}, and by its rules no layer of {what} is split: every rank "
            "holds and computes the whole model",
            level=WARNING,
        )
        return
    own = [rule.pattern.pattern for rule in made.rules.rules if rule.source.endswith("partition_config")]
    found = (
        f"none of the {len(own)} rules of tensor_parallel.partition_config matches a layer of {what}. Patterns are "
        f"matched from the start of <module>.weight; the first one is {own[0]!r}. Correct them"
        if own
        else f"no layer of {what} can be split by its own plan, by a preset or by the names of its layers. Give rules "
        "in tensor_parallel.partition_config.layer_specs"
    )
    raise UsageError(f"tensor_parallel.autotp_size is {made.ranks}, but {found}, or leave autotp_size out")


class Planner:
    """Makes a plan of a model and rules; what cannot be split is an error that names the layer and the dim.

    A part of a model may be without the output layer: it says which of its weights are `tied` to layers elsewhere.
    """

    def __init__(
        self, model: nn.Module, rules: Rules, ranks: int, section: TPTrainingConfig, piece: ModelStage | None
    ) -> None:
        self.model, self.rules, self.ranks = model, rules, ranks
        self.grain, self.split_head = section.tensor_parallel.tp_grain_size, section.vocab_parallel_lm_head
        self.attention = find_attention(model, ranks)
        self.type = getattr(getattr(model, "config", None), "model_type", None)
        self.tied = None if piece is None else piece.tied
        self.embedding = _input_embedding(model) if section.vocab_parallel_embedding else None
        """One that is split by vocabulary, whatever it is tied to."""

    def plan(self) -> SplitPlan:
        changes: list[LayerSplit] = []
        unmatched = []
        for path, name, module in _layers(self.model):
            rule = self._rule(name, _base(module))
            if rule is not None:
                changes += self._change(path, name, module, rule)
            elif self.rules.find(name, self.type) is None:
                unmatched.append(path)
        if self.rules.strict and unmatched:
            raise UsageError(
                f"tensor_parallel.partition_config.strict_mode: no rule matches {len(unmatched)} layers: "
                f"{', '.join(unmatched[:5])}{', …' if len(unmatched) > 5 else ''}. Add rules for them, with "
                "partition_type skip for those that stay whole"
            )
        split = [change for change in changes if change.kind not in (SplitKind.WHOLE, SplitKind.WHOLE_INSIDE)]
        heads = tuple(c for c in split if self._is_head(plain_path(c.path)) and isinstance(c.module, nn.Linear))
        if self.split_head and not heads and self.tied is None:
            raise UsageError(
                "tensor_parallel.vocab_parallel_lm_head is true, but the model has no Linear whose name ends in "
                f"{' or '.join(self.rules.heads)}. Name it in tensor_parallel.partition_config.lm_head_patterns"
            )
        incomplete = tuple(incomplete_regions(self.model, check_pairs(self.model, split), split))
        found = tuple(a for a in self.attention.values() if projects_heads(a, split))
        changes += [change for each in found for change in inside(each, self.ranks, changes)]
        self._check_ties(changes)
        untouched = tuple(path for path, a in self.attention.items() if a not in found)
        return SplitPlan(self.ranks, tuple(changes), found, heads, self.rules, untouched, incomplete)

    # ---- rules

    def _is_head(self, name: str) -> bool:
        return name.rsplit(".", 1)[-1] in self.rules.heads

    def _rule(self, name: str, module: nn.Module) -> Rule | None:
        """The rule of a layer; `vocab_parallel_lm_head` decides about the output layer and what is tied to it."""
        rule = self.rules.find(name, self.type)
        head = self._head_of(name, module)
        if module is self.embedding and head is None:
            return _SPLIT_EMBEDDING
        if head is None:
            if isinstance(module, nn.Embedding) and rule is not None and rule.kind is not SplitKind.VOCABULARY:
                return None
            return None if self.split_head is False and rule is not None and rule.kind is SplitKind.VOCABULARY else rule
        of_head = None if self.split_head is False else self.rules.find(head, self.type)
        if self.split_head or (of_head is not None and of_head.kind not in (SplitKind.WHOLE, SplitKind.WHOLE_INSIDE)):
            return of_head if of_head is not None and head == name else _SPLIT_VOCABULARY
        if module is self.embedding:
            raise UsageError(
                f"tensor_parallel.vocab_parallel_embedding is true, but {name} is tied to {head}, which stays whole. "
                "Set tensor_parallel.vocab_parallel_lm_head to true"
            )
        return None

    def _head_of(self, name: str, module: nn.Module) -> str | None:
        """The output layer that this layer is, or shares its weight with."""
        if self._is_head(name):
            return name
        weight = getattr(module, "weight", None)
        if not isinstance(module, nn.Embedding) or weight is None:
            return None
        tied = [path for path, other in self.model.named_modules() if getattr(other, "weight", None) is weight]
        tied += (self.tied or {}).get(id(weight), ())
        return next((path for path in map(plain_path, tied) if self._is_head(path)), None)

    # ---- layers

    def _change(self, path: str, name: str, module: nn.Module, rule: Rule) -> list[LayerSplit]:
        if rule.kind in (SplitKind.WHOLE, SplitKind.WHOLE_INSIDE):
            return [LayerSplit(path, module, rule.kind, rule)]
        if is_experts(module):
            return [cut_experts(path, module, rule, self.ranks, self.grain)]
        base, lora_in, lora_out = _adapters(path, module)
        if rule.kind is SplitKind.VOCABULARY or self._is_head(name):
            change = self._vocabulary(*base, rule)
            # What an adapter adds to an embedding is whole on all ranks, as its sum over ranks is.
            return [change, *(self._like(change, *layer) for layer in lora_out)]
        change = self._column(*base, name, rule) if rule.kind is SplitKind.COLUMN else self._row(*base, name, rule)
        if rule.kind is SplitKind.COLUMN:
            # What an adapter adds to a split output is split alike.
            return [change, *(self._like(change, *layer) for layer in lora_out)]
        return [change, *(self._like(change, *layer) for layer in lora_in)]

    def _column(self, path: str, module: nn.Module, name: str, rule: Rule) -> LayerSplit:
        outputs, _, transposed = _sizes(path, module)
        parent, leaf = name.rsplit(".", 1) if "." in name else ("", name)
        attention = self._near(parent)
        if attention is not None and attention.splits(leaf):
            cuts, shared = attention.cuts(leaf, self.ranks, outputs)
            covered = sum(stop - start for start, stop in {part for cut in cuts for part in cut})
            if covered != outputs:
                raise UsageError(
                    f"tensor_parallel: {path} has {outputs} outputs (dim 0), but {attention.heads.query} query and "
                    f"{attention.heads.key_value} key-value heads of {attention.heads.dim} make {covered}. Give a rule "
                    "with the shape of this layer, or skip it, in tensor_parallel.partition_config"
                )
            if shared and rule.gather_output:
                raise UsageError(
                    f"tensor_parallel: the output of {path} is to be gathered, but its {attention.heads.key_value} "
                    f"key-value heads (dim 0) are fewer than the {self.ranks} ranks, some of which compute the same. "
                    "Leave gather_output out of its rule"
                )
            if shared and len(cuts) > 1:  # queries of its own beside keys of several ranks, in one tensor
                rows = tuple(tuple(cut[rank] for cut in cuts) for rank in range(self.ranks))
                return LayerSplit(path, module, SplitKind.COLUMN, rule, {}, (), transposed, rows)
        else:
            cuts = self._parts(path, rule, outputs, 0)
        return self._cut_outputs(path, module, rule, cuts, transposed)

    def _cut_outputs(
        self, path: str, module: nn.Module, rule: Rule, cuts: list[list[tuple[int, int]]], transposed: bool
    ) -> LayerSplit:
        split = DimSplit.of(0, cuts)
        splits = {"weight": DimSplit.of(1 if transposed else 0, cuts)}
        if getattr(module, "bias", None) is not None:
            splits["bias"] = split
        sizes = tuple(map(split.size, range(self.ranks)))
        if rule.gather_output and len(cuts) > 1:
            raise UsageError(
                f"tensor_parallel: {path} is to be split in {len(cuts)} fused parts and its output gathered, which "
                "would change the order of outputs. Leave gather_output or the shape out of its rule"
            )
        return LayerSplit(path, module, SplitKind.COLUMN, rule, splits, sizes, transposed)

    def _row(self, path: str, module: nn.Module, name: str, rule: Rule) -> LayerSplit:
        _, inputs, transposed = _sizes(path, module)
        parent = name.rsplit(".", 1)[0] if "." in name else ""
        attention = self._near(parent) if "att" in parent.lower() else None
        if attention is not None and attention.heads.query * attention.heads.dim == inputs:
            cuts = [[attention.heads.elements(part) for part in attention.heads.queries_of(self.ranks)]]
        elif attention is not None and attention.latent and inputs % attention.heads.query == 0:
            cuts = [attention.by_heads(self.ranks, inputs)]
        else:
            cuts = self._parts(path, rule, inputs, 1)
        splits = {"weight": DimSplit.of(0 if transposed else 1, cuts)}
        sizes = tuple(splits["weight"].size(rank) for rank in range(self.ranks))
        return LayerSplit(path, module, SplitKind.ROW, rule, splits, sizes, transposed)

    def _like(self, change: LayerSplit, path: str, module: nn.Module) -> LayerSplit:
        """An adapter's layer, cut as the layer that it belongs to."""
        column = change.kind is SplitKind.COLUMN
        kind, whole = SplitKind.COLUMN if column else SplitKind.ROW, change.splits.get("weight")
        if whole is None:
            return LayerSplit(path, module, kind, change.rule, rows=change.rows)
        split = DimSplit(0 if column else 1, whole.parts)
        bias = {"bias": split} if column and getattr(module, "bias", None) is not None else {}
        return LayerSplit(path, module, kind, change.rule, {"weight": split, **bias}, change.sizes)

    def _vocabulary(self, path: str, module: nn.Module, rule: Rule) -> LayerSplit:
        weight = getattr(module, "weight", None)
        if not isinstance(module, (nn.Linear, nn.Embedding)) or weight is None:
            raise UsageError(
                f"tensor_parallel: {path} is a {type(module).__name__}; only Linear and Embedding are split by "
                "vocabulary. Set tensor_parallel.vocab_parallel_lm_head to false"
            )
        rows = module.out_features if isinstance(module, nn.Linear) else module.num_embeddings
        cuts = [even(rows, self.ranks)]
        if isinstance(module, nn.Embedding):
            _check_plain_embedding(path, module)
            return LayerSplit(path, module, SplitKind.VOCABULARY, rule, {"weight": DimSplit.of(0, cuts)})
        gathered = Rule(rule.pattern, SplitKind.COLUMN, gather_output=True, source=rule.source, known=True)
        return self._cut_outputs(path, module, gathered, cuts, False)

    def _parts(self, path: str, rule: Rule, total: int, dim: int) -> list[list[tuple[int, int]]]:
        """Each fused part of a dim, cut for all ranks."""
        sizes = rule.parts if isinstance(rule.parts, tuple) else (total // rule.parts,) * rule.parts
        what = f"{path} has {total} {'inputs' if dim else 'outputs'} (dim {dim} of its weight)"
        if sum(sizes) != total:
            raise UsageError(
                f"tensor_parallel: {what}, but the shape of its rule, from {rule.source}, makes {sum(sizes)}. Correct "
                "the shape in tensor_parallel.partition_config"
            )
        for size in sizes:
            unit = self.ranks * self.grain
            if (size % unit and not rule.known) or size // self.grain < self.ranks:
                raise UsageError(
                    f"tensor_parallel: {what}, of which {size} are to be split over {self.ranks} ranks in multiples of "
                    f"{self.grain}, which does not come out even. Change tensor_parallel.autotp_size, or give the "
                    "layer and the one behind it a rule with partition_type skip"
                )
        return side_by_side(sizes, self.ranks, self.grain)

    def _near(self, parent: str) -> Attention | None:
        """The attention module at this path, or the one whose neighbour lies there."""
        if parent in self.attention:
            return self.attention[parent]
        above = parent.rsplit(".", 1)[0] if "." in parent else ""
        near = [a for path, a in self.attention.items() if path.rsplit(".", 1)[0] == above]
        return near[0] if len(near) == 1 else None

    def _check_ties(self, changes: list[LayerSplit]) -> None:
        """A parameter that two layers share must be cut alike in both."""
        seen: dict[int, tuple[str, DimSplit | None]] = {}
        cut = {(change.path, name): split for change in changes for name, split in change.splits.items()}
        for path, module in self.model.named_modules():
            for name, param in module.named_parameters(recurse=False, prefix=""):
                split = cut.get((path, name))
                other = seen.setdefault(id(param), (f"{path}.{name}", split))
                if other[1] != split:
                    raise UsageError(
                        f"tensor_parallel: {path}.{name} and {other[0]} are one parameter, of which one layer would be "
                        "split and the other not, or otherwise. Set tensor_parallel.vocab_parallel_lm_head, or give "
                        "both a rule with partition_type skip"
                    )


def _layers(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """(path, path as rules know it, layer) of everything that a rule may be about."""
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if inside and path.startswith(inside):
            continue  # parts of an adapter go with the layer they belong to
        if isinstance(getattr(module, "base_layer", None), nn.Module):
            inside = (*inside, f"{path}.")
            if share_of(_base(module)) is None:
                yield path, plain_path(path), module
        elif isinstance(module, OwnProduct) or is_experts(module) or _has_weight(module):
            if isinstance(module, OwnProduct):
                inside = (*inside, f"{path}.")
            if share_of(module) is None:
                yield path, plain_path(path), module


def _has_weight(module: nn.Module) -> bool:
    return isinstance(module._parameters.get("weight"), nn.Parameter)


def _base(module: Any) -> Any:
    """The layer inside an adapter, or the layer itself."""
    base = getattr(module, "base_layer", None)
    return base if isinstance(base, nn.Module) else module


def _adapters(
    path: str, module: nn.Module
) -> tuple[tuple[str, nn.Module], list[tuple[str, nn.Module]], list[tuple[str, nn.Module]]]:
    """(the layer itself, the adapters' layers that read its input, those that write its output)."""
    base = _base(module)
    if base is module:
        of_ends = module.adapters() if isinstance(module, OwnProduct) else ({}, {})
        reads, writes = ([(f"{path}.{name}", layer) for name, layer in each.items()] for each in of_ends)
        return (path, module), reads, writes
    if len(getattr(module, "lora_magnitude_vector", ())):
        raise UsageError(
            f"tensor_parallel: {path} has an adapter that needs norms over its whole weight (DoRA) and cannot be "
            "split. Use LoRA without use_dora, or skip the layer in tensor_parallel.partition_config"
        )
    reads = [(f"{path}.lora_A.{name}", layer) for name, layer in getattr(module, "lora_A", {}).items()]
    writes = [(f"{path}.lora_B.{name}", layer) for name, layer in getattr(module, "lora_B", {}).items()]
    return (f"{path}.base_layer", base), reads, writes


def _sizes(path: str, module: nn.Module) -> tuple[int, int, bool]:
    """(outputs, inputs, weight is [in, out])."""
    own_forward = type(module).forward is not nn.Linear.forward
    plain = isinstance(module, nn.Linear) and (not own_forward or type(module).__name__ == "FalconLinear")
    if plain or (isinstance(module, OwnProduct) and hasattr(module, "in_features")):
        return int(module.out_features), int(module.in_features), False  # type: ignore[arg-type]
    if type(module).__name__ == "Conv1D" and _has_weight(module) and len(whole_shape(module.weight)) == 2:
        inputs, outputs = whole_shape(module.weight)
        return outputs, inputs, True
    raise UsageError(
        f"tensor_parallel: {path} is a {type(module).__name__}, whose weight has the shape "
        f"{whole_shape(module.weight) if _has_weight(module) else 'unknown'}; only Linear and GPT-2's Conv1D are split "
        "by rows or columns. Give it a rule with partition_type skip in tensor_parallel.partition_config"
    )


def _check_plain_embedding(path: str, module: nn.Embedding) -> None:
    if module.max_norm is not None or module.scale_grad_by_freq:
        raise UsageError(
            f"tensor_parallel: the embedding {path} has max_norm or scale_grad_by_freq, which need all of it (dim 0). "
            "Set tensor_parallel.vocab_parallel_lm_head to false"
        )
