"""Values of a model that was built without them, from a folder of safetensors: a rank reads its own part.

`values_from` remembers the folder; `deepspeed.initialize` lets parameters `take_place`, features cut them as they cut
any others, and `fill` reads what is left of them on this rank.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from deepspeed.checkpoint.formats.safetensors import open_file
from deepspeed.errors import CheckpointError, UsageError
from deepspeed.fragments import DimSplit
from deepspeed.log import log_dist

Empty = dict[nn.Parameter, list[str]]
"""Parameters that wait for values, with their names in the model."""

Cut = tuple[DimSplit, int]
"""How a parameter is cut, and which part this rank has."""

Cuts = Mapping[str, Cut]
"""By the names of parameters."""

TensorSource = Path | Mapping[str, Tensor]
"""A folder of safetensors, or tensors by name, such as views of other files."""

_WAITS = "_waits_for_values"
_INDEX, _ALONE = "model.safetensors.index.json", "model.safetensors"
_folders: WeakKeyDictionary[nn.Module, TensorSource] = WeakKeyDictionary()


@dataclass
class PretrainedReading:
    """What was read of a folder."""

    bytes: int = 0
    tensors: set[str] = field(default_factory=set)
    """By their names in the files."""

    def note(self, stored: Stored, part: Tensor) -> Tensor:
        """Count a part of what is stored."""
        self.bytes += part.nbytes
        self.tensors.update(stored.names)
        return part


def values_from(model: nn.Module, source: TensorSource | str) -> nn.Module:
    """Let parameters on the meta device get their values from a folder of safetensors, in `deepspeed.initialize`.

    Each rank reads what it holds: its slices of layers and its experts. Returns the model as it is.
    """
    _folders[model] = Path(source) if isinstance(source, str) else source
    return model


def take_place(model: nn.Module) -> Empty:
    """Where a folder is known: let parameters on the meta device be ones that can be cut.

    They stay the same objects, are nan everywhere, and take no memory until they are cut.
    """
    if model not in _folders:
        return {}
    _compute_buffers(model)
    tie: Callable[[], None] | None = getattr(model, "tie_weights", None)
    if callable(tie) and any(param.is_meta for param in model.parameters()):
        tie()  # a model of Transformers that was built without values has lost its ties
    empty: Empty = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param.is_meta:
            _stand_in(param)
        if hasattr(param, _WAITS):
            empty.setdefault(param, []).append(name)
    return empty


def fill(model: nn.Module, empty: Empty, *cuts: Cuts) -> None:
    """Give parameters that wait for values, and buffers, those of the folder, as far as this rank holds them.

    A parameter may have been cut several times, in the order of `cuts`.
    """
    if empty:
        source = _folders[model]
        read = read_parts(model, empty, source, *cuts)
        log_dist(f"{_named(source)}: {read.bytes} bytes of {len(read.tensors)} tensors were read for this rank")


@torch.no_grad()
def read_parts(model: nn.Module, empty: Empty, source: TensorSource, *cuts: Cuts) -> PretrainedReading:
    """Read this rank's part of parameters.

    Names are those of the model's state dict, or those that Transformers makes them of; a tied parameter is found by
    any of its names.
    """
    found, read = stored_as(model, _tensors(source)), PretrainedReading()
    for param, known in empty.items():
        name = next((each for each in known if each in found), None)
        if name is None:
            raise UsageError(f"{_named(source)} has no tensor {' or '.join(known)}, which the model needs")
        part = _part(name, found[name], [each[name] for each in cuts if name in each], param, read)
        give_value(param, part)
    for name, buffer in model.named_buffers():
        if name in found:  # biases of routers, for instance
            stored = found[name]
            _require_shape(name, stored, tuple(buffer.shape))
            buffer.copy_(read.note(stored, stored.whole()))
    return read


def give_value(param: nn.Parameter, part: Tensor) -> None:
    """Let a parameter that waits have the value of this rank, in memory of its own."""
    param.data = torch.empty(part.shape, dtype=param.dtype).copy_(part)
    param.__dict__.pop(_WAITS, None)


def _named(source: TensorSource) -> str:
    return str(source) if isinstance(source, Path) else "the files of the checkpoint"


def _part(name: str, stored: Stored, cuts: Sequence[Cut], param: nn.Parameter, read: PretrainedReading) -> Tensor:
    """This rank's part of what is stored; only that is touched where it lies apart."""
    shape = tuple(param.shape)
    for split, _ in reversed(cuts):
        shape = split.whole_shape(shape)
    _require_shape(name, stored, shape)
    if cuts and cuts[0][0].dim == 0 and stored.apart:
        split, place = cuts[0]
        stored = stored.only([number for start, stop in split.parts[place] for number in range(start, stop)])
        cuts = cuts[1:]
    part = whole = stored.whole()
    for split, place in cuts:
        part = split.cut(part, place)
    read.note(stored, whole if stored.made else part)  # what is made of several tensors takes all of them
    return part


def _require_shape(name: str, stored: Stored, expected: tuple[int, ...]) -> None:
    if stored.shape != expected:
        raise UsageError(f"{name} has the shape {stored.shape} in its file, but the model has {expected}")


def _stand_in(param: nn.Parameter) -> None:
    nothing = torch.full((), torch.nan if param.is_floating_point() else 0, dtype=param.dtype)
    other = nn.Parameter(nothing.expand(param.shape), requires_grad=param.requires_grad)
    other.__dict__.update({**param.__dict__, _WAITS: True})
    torch.utils.swap_tensors(param, other)


def _tensors(folder: TensorSource) -> Mapping[str, Tensor]:
    """The tensors of a folder by name, as views of files that are not read yet."""
    if not isinstance(folder, Path):
        return folder
    if not folder.is_dir():
        raise UsageError(f"values of the model are to come from {folder}, which is no folder")
    index = folder / _INDEX
    if index.is_file():
        told: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {})
        files = sorted({folder / Path(file).name for file in told.values()})
    elif (folder / _ALONE).is_file():
        files = [folder / _ALONE]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"values of the model are to come from {folder}, which has no files of safetensors")
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise CheckpointError(
            f"{folder} lacks {', '.join(absent[:3])}, {len(absent)} of the {len(files)} files of its index"
        )
    return {name: tensor for file in files for name, tensor in open_file(file).tensors.items()}


def _compute_buffers(model: nn.Module) -> None:
    """Let buffers on the meta device have the values that a model of Transformers computes for them."""
    compute: Callable[[nn.Module], None] | None = getattr(model, "_init_weights", None)
    for path, module in model.named_modules():
        names = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        found: list[list[Tensor]] = []
        for number in (0, 1):  # what is the same whatever was there is computed
            for name in names:
                setattr(module, name, torch.full_like(getattr(module, name), number, device="cpu"))
            if names and compute is not None:
                compute(module)
            found.append([getattr(module, name) for name in names])
        wrong = next((name for name, a, b in zip(names, *found, strict=True) if not torch.equal(a, b)), None)
        if wrong is not None:
            name = f"{path}.{wrong}".strip(".")
            raise UsageError(
                f"the buffer {name} is on the meta device, and neither a file nor the model tells its values. "
                "Build the model so that only its parameters are there, as accelerate.init_empty_weights() does"
            )


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
