"""Values of a model that was built without them, from a folder of safetensors: a rank reads its own part."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from deepspeed.checkpoint.formats.safetensors import open_file
from deepspeed.errors import UsageError
from deepspeed.fragments import Split
from deepspeed.log import log_dist
from deepspeed.tensor_parallel.apply import splits_of
from deepspeed.tensor_parallel.model_init import asked_checkpoint

__all__ = ["Empty", "fill", "load_parts", "take_place"]

Empty = dict[nn.Parameter, list[str]]
"""Parameters that wait for values, with their names in the model."""

_WAITS = "_waits_for_values"
_INDEX, _ALONE = "model.safetensors.index.json", "model.safetensors"


def take_place(model: nn.Module) -> Empty:
    """Where `tp_model_init` was given a folder: let parameters on the meta device be ones that can be cut.

    They stay the same objects, are nan everywhere, and take no memory until they are cut.
    """
    if asked_checkpoint(model) is None:
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


def fill(model: nn.Module, empty: Empty, rank: int) -> None:
    """Give parameters that wait for values those of the folder, as far as this rank holds them."""
    folder = asked_checkpoint(model)
    if folder is not None and empty:
        read = load_parts(model, empty, folder, rank)
        log_dist(f"{folder}: {read} bytes were read for rank {rank} of those that share layers")


@torch.no_grad()
def load_parts(model: nn.Module, empty: Empty, folder: Path, rank: int) -> int:
    """Read this rank's part of parameters; returns the bytes that were read.

    Names are those of the model's state dict; a tied parameter is found by any of its names.
    """
    found, splits, total = _tensors(folder), splits_of(model), 0
    for param, known in empty.items():
        name = next((each for each in known if each in found), None)
        if name is None:
            raise UsageError(f"{folder} has no tensor {' or '.join(known)}, which the model needs")
        part = _part(name, found[name], splits.get(name), param, rank)
        total += part.nbytes
        param.data = torch.empty(part.shape, dtype=param.dtype).copy_(part)
        param.__dict__.pop(_WAITS, None)
    return total


def _part(name: str, whole: Tensor, split: Split | None, param: nn.Parameter, rank: int) -> Tensor:
    """This rank's part of a tensor in a file; only that is touched."""
    expected = tuple(param.shape) if split is None else split.whole_shape(param.shape)
    if tuple(whole.shape) != expected:
        raise UsageError(f"{name} has the shape {tuple(whole.shape)} in its file, but the model has {expected}")
    return whole if split is None else split.cut(whole, rank)


def _stand_in(param: nn.Parameter) -> None:
    nothing = torch.full((), torch.nan if param.is_floating_point() else 0, dtype=param.dtype)
    other = nn.Parameter(nothing.expand(param.shape), requires_grad=param.requires_grad)
    other.__dict__.update({**param.__dict__, _WAITS: True})
    torch.utils.swap_tensors(param, other)


def _tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder by name, as views of files that are not read yet."""
    if not folder.is_dir():
        raise UsageError(f"tp_model_init: checkpoint is {folder}, which is no folder")
    index = folder / _INDEX
    if index.is_file():
        told: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {})
        files = sorted({folder / Path(file).name for file in told.values()})
    elif (folder / _ALONE).is_file():
        files = [folder / _ALONE]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"tp_model_init: checkpoint is {folder}, which has no files of safetensors")
    return {name: tensor for file in files for name, tensor in open_file(file).tensors.items()}


def _refuse_empty_buffers(model: nn.Module) -> None:
    name = next((name for name, buffer in model.named_buffers() if buffer.is_meta), None)
    if name is not None:
        raise UsageError(
            f"the buffer {name} is on the meta device, and no file tells its values. Build the model so that only its "
            "parameters are there, as accelerate.init_empty_weights() does"
        )
