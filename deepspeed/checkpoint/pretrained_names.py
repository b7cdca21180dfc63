"""What a model's parameters are called in files: as in the model, or as Transformers converts them on load.

Files of Transformers hold the matrices of an expert apart, which its models keep in one tensor for all experts. Its own
table says which become which; here it is only asked, and given the matrices of a rank's own experts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.errors import UsageError

__all__ = ["Stored", "stored_as"]


@dataclass(frozen=True)
class Stored:
    """A tensor as it lies in files: itself, or what it is made of."""

    sources: Mapping[str, Sequence[tuple[str, Tensor]]]
    """Kind of part → names and views of files, in the order of experts."""
    converter: Any = None
    """Transformers' own; None for a tensor that is stored as it is."""
    target: str = ""
    model: Any = None

    @property
    def names(self) -> list[str]:
        """In the files."""
        return [name for parts in self.sources.values() for name, _ in parts]

    @property
    def made(self) -> bool:
        """It is made of what is stored."""
        return self.converter is not None

    @property
    def apart(self) -> bool:
        """The first dim of the whole goes over tensors of the same kind, one for each expert."""
        if not self.made:
            return False
        first = self.converter.operations[0]
        return type(first).__name__ == "MergeModulelist" and first.dim == 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole; nothing is read."""
        return tuple(self._convert(meta=True).shape)

    def only(self, numbers: Sequence[int]) -> Stored:
        """Of these experts only."""
        chosen = {kind: [parts[number] for number in numbers] for kind, parts in self.sources.items()}
        return Stored(chosen, self.converter, self.target, self.model)

    def whole(self) -> Tensor:
        """The tensor itself: a view of its file, or made of others, which are read."""
        return self._convert(meta=False)

    def _convert(self, *, meta: bool) -> Tensor:
        sources = {
            kind: [torch.empty_like(value, device="meta") if meta else value for _, value in parts]
            for kind, parts in self.sources.items()
        }
        if not self.made:
            return next(iter(sources.values()))[0]
        made = _copy_of(self.converter)
        for kind, values in sources.items():
            for (name, _), value in zip(self.sources[kind], values, strict=True):
                made.add_tensor(self.target, name, kind, value)
        try:
            found = made.convert(self.target, model=self.model, config=self.model.config)[self.target]
        except Exception as error:  # whatever its operations make of tensors that do not fit
            raise UsageError(
                f"{self.target} cannot be made of {', '.join(self.names[:3])}, … by Transformers: {error!r:.300}"
            ) from error
        result: Tensor = found[0] if isinstance(found, list) else found
        return result


def stored_as(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Stored]:
    """The tensors of files by the names that they have in the model."""
    known = sys.modules.get("transformers.core_model_loading")
    mapping = _mapping(model) if known is not None else []
    if known is None or not mapping:
        return {name: Stored({"": [(name, tensor)]}) for name, tensor in tensors.items()}
    renamings = [each for each in mapping if isinstance(each, known.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, known.WeightConverter)]
    by_kind = {kind: converter for converter in converters for kind in converter.source_patterns}
    expected = dict(model.state_dict())
    prefix = getattr(model, "base_model_prefix", None)
    found: dict[str, Stored] = {}
    for name in sorted(tensors, key=known.dot_natural_key):
        target, kind = known.rename_source_key(name, renamings, converters, prefix, expected)
        if kind is None:
            found[target] = Stored({"": [(name, tensors[name])]})
        else:
            stored = found.setdefault(target, Stored({}, by_kind[kind], target, model))
            parts: Any = stored.sources
            parts.setdefault(kind, []).append((name, tensors[name]))
    return found


def _mapping(model: nn.Module) -> list[Any]:
    from transformers import PreTrainedModel  # an optional dependency, which is loaded
    from transformers.conversion_mapping import get_model_conversion_mapping

    if not isinstance(model, PreTrainedModel):
        return []
    return list(get_model_conversion_mapping(model, add_legacy=False))


def _copy_of(converter: Any) -> Any:
    """One that has collected nothing yet."""
    return converter.copy(converter.source_patterns, converter.target_patterns, operations=converter.operations)
