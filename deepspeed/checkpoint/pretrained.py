"""Values of a model that was built without them, from a folder of safetensors: a rank reads its own part.

`values_from` remembers the folder; `deepspeed.initialize` lets parameters `take_place`, features cut them as they cut
any others, and `fill` reads what is left of them on this rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from deepspeed.checkpoint.formats.safetensors import open_file
from deepspeed.checkpoint.pretrained_names import Stored, stored_as
from deepspeed.errors import UsageError
from deepspeed.fragments import Split
from deepspeed.log import log_dist

__all__ = ["Cuts", "Empty", "Reading", "fill", "read_parts", "take_place", "values_from"]

Empty = dict[nn.Parameter, list[str]]
"""Parameters that wait for values, with their names in the model."""

Cut = tuple[Split, int]
"""How a parameter is cut, and which part this rank has."""

Cuts = Mapping[str, Cut]
"""By the names of parameters."""

_WAITS = "_waits_for_values"
_INDEX, _ALONE = "model.safetensors.index.json", "model.safetensors"
_folders: WeakKeyDictionary[nn.Module, Path] = WeakKeyDictionary()


@dataclass
class Reading:
    """What was read of a folder."""

    bytes: int = 0
    tensors: set[str] = field(default_factory=set)
    """By their names in the files."""

    def note(self, stored: Stored, part: Tensor) -> Tensor:
        """Count a part of what is stored."""
        self.bytes += part.nbytes
        self.tensors.update(stored.names)
        return part


def values_from(model: nn.Module, folder: Path | str) -> nn.Module:
    """Let parameters on the meta device get their values from a folder of safetensors, in `deepspeed.initialize`.

    Each rank reads what it holds: its slices of layers and its experts. Returns the model as it is.
    """
    _folders[model] = Path(folder)
    return model


def take_place(model: nn.Module) -> Empty:
    """Where a folder is known: let parameters on the meta device be ones that can be cut.

    They stay the same objects, are nan everywhere, and take no memory until they are cut.
    """
    if model not in _folders:
        return {}
    _refuse_empty_buffers(model)
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
        read = read_parts(model, empty, _folders[model], *cuts)
        log_dist(f"{_folders[model]}: {read.bytes} bytes of {len(read.tensors)} tensors were read for this rank")


@torch.no_grad()
def read_parts(model: nn.Module, empty: Empty, folder: Path, *cuts: Cuts) -> Reading:
    """Read this rank's part of parameters.

    Names are those of the model's state dict, or those that Transformers makes them of; a tied parameter is found by
    any of its names.
    """
    found, read = stored_as(model, _tensors(folder)), Reading()
    for param, known in empty.items():
        name = next((each for each in known if each in found), None)
        if name is None:
            raise UsageError(f"{folder} has no tensor {' or '.join(known)}, which the model needs")
        part = _part(name, found[name], [each[name] for each in cuts if name in each], param, read)
        param.data = torch.empty(part.shape, dtype=param.dtype).copy_(part)
        param.__dict__.pop(_WAITS, None)
    for name, buffer in model.named_buffers():
        if name in found:  # biases of routers, for instance
            stored = found[name]
            _require_shape(name, stored, tuple(buffer.shape))
            buffer.copy_(read.note(stored, stored.whole()))
    return read


def _part(name: str, stored: Stored, cuts: Sequence[Cut], param: nn.Parameter, read: Reading) -> Tensor:
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


def _tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder by name, as views of files that are not read yet."""
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
    return {name: tensor for file in files for name, tensor in open_file(file).tensors.items()}


def _refuse_empty_buffers(model: nn.Module) -> None:
    name = next((name for name, buffer in model.named_buffers() if buffer.is_meta), None)
    if name is not None:
        raise UsageError(
            f"the buffer {name} is on the meta device, and no file tells its values. Build the model so that only its "
            "parameters are there, as accelerate.init_empty_weights() does"
        )
