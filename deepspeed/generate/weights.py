"""Weights of a served model: read by each rank's part, put on the device, rounded, and replaced in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.pretrained import Empty, fill, stored_as, take_place, values_from
from deepspeed.config.inference import RaggedInferenceEngineConfig, RaggedQuantizationConfig
from deepspeed.config.parallel import TPTrainingConfig
from deepspeed.errors import CheckpointError, UsageError
from deepspeed.fusion.build import FusionFinding, find, lines, put
from deepspeed.fusion.experts import find_experts
from deepspeed.fusion.packed_linear import PackedProduct, PackedStack, WeightPacking, pack_layers, packed_parameters
from deepspeed.fusion.streamed import find_streams
from deepspeed.log import log_dist
from deepspeed.memory.host import ParkedStorages
from deepspeed.memory.streaming import StreamSettings, StreamUnit, WeightStream, stream_weights
from deepspeed.parallel.regions import RankGroup
from deepspeed.tensor_parallel import cuts_of
from deepspeed.tensor_parallel.build import split
from deepspeed.transformers.replacement import put_forward, replacement

WeightItems = Mapping[str, Tensor] | Iterable["tuple[str, Tensor] | Mapping[str, Tensor]"]
"""Whole tensors by Transformers' names: a mapping, pairs, or mappings one after the other."""

_KINDS = ("norm", "mlp", "rotary")
_ROWS = 64


def device_here() -> torch.device:
    """The device of this rank."""
    return torch.device(get_accelerator().current_device_name())


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, and the folder it came from."""

    model: nn.Module
    folder: Path | None
    stream: WeightStream | None = None
    """What brings weights that are not on the device."""


def load(
    source: Any,
    config: RaggedInferenceEngineConfig,
    dtype: torch.dtype | str,
    device: torch.device,
    axis: RankGroup | None,
    undo: ExitStack,
) -> LoadedModel:
    """A model from a path or a module: this rank's part of it, in its dtype, rounded if the config says so."""
    kind, tiers = dtype_of(dtype), config.memory.device is not None
    empty: Empty = {}
    if isinstance(source, nn.Module):
        model, folder = source, None
        if kind is not None:
            model.to(kind)
        if axis is not None:
            split(model, axis, TPTrainingConfig(autotp_size=axis.size))
    else:
        folder = _folder(source)
        model, empty = _read(folder, kind, axis, later=tiers)
    model.eval()
    if folder is not None or tiers:
        model.requires_grad_(False)
    packing = ModelPacking(model, packing_of(config.quantization))

    def ready(unit: StreamUnit) -> None:
        own = {each: empty[each] for each in unit.tensors() if isinstance(each, nn.Parameter) and each in empty}
        fill(model, own, {} if axis is None else cuts_of(model, axis.rank))
        packing.add(unit.modules)

    stream = None
    if tiers:
        stream = stream_weights(model, StreamSettings(config.memory), device, ready, undo)
    else:
        packing.add([""])
        model.to(device)
    packing.told(required=True)
    return LoadedModel(model, folder, stream)


def dtype_of(dtype: torch.dtype | str) -> torch.dtype | None:
    """A dtype by its name; None for "auto"."""
    names = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
    if dtype == "auto":
        return None
    found = getattr(torch, names.get(dtype, dtype), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(
            f"dtype is {dtype!r}; it must be auto, bfloat16, float16, float32 or such a torch.dtype. For weights in "
            "fewer bits, set quantization.quantization_mode"
        )
    return found


def _folder(source: Any) -> Path:
    if not isinstance(source, (str, Path)):
        raise UsageError(f"the model is {source!r:.100}; it must be a torch.nn.Module, a folder, or a name on the hub")
    folder = Path(source)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download  # comes with Transformers

    try:
        return Path(snapshot_download(str(source)))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the model {str(source)!r} is no folder, and no model that can be downloaded: {error}"
        ) from error


def _read(folder: Path, dtype: torch.dtype | None, axis: RankGroup | None, *, later: bool) -> tuple[nn.Module, Empty]:
    """The model, and its parameters that wait for their values; `later`: all of them."""
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM

    damaged = (OSError, ValueError, LookupError, UnpicklingError, SafetensorError)
    try:
        config = AutoConfig.from_pretrained(folder)
    except damaged as error:
        raise CheckpointError(f"{folder} has no config of a model of Transformers: {error}") from error
    kind = dtype or getattr(config.get_text_config(), "dtype", None) or torch.float32
    quantised = getattr(config, "quantization_config", None) is not None
    if quantised and (axis is not None or later):
        key = "memory.device" if later else "tensor_parallel.tp_size"
        raise UsageError(
            f"{folder} holds weights that Transformers has quantised; they cannot be split, nor be streamed. Leave "
            f"{key} out."
        )
    if axis is None and not later:
        try:
            model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=kind)
        except damaged as error:
            raise CheckpointError(f"the weights in {folder} cannot be read: {error}") from error
        return model, {}
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=kind)
    values_from(model, folder)
    empty = take_place(model)
    if axis is not None:
        split(model, axis, TPTrainingConfig(autotp_size=axis.size))
    if not later:
        fill(model, empty, cuts_of(model, axis.rank) if axis is not None else {})
    return model, empty


class ModelPacking:
    """Rounds weights, part of a model by part, before they go to the device: it never holds them in their dtype."""

    def __init__(
        self, model: nn.Module, packing: WeightPacking | None, own: Mapping[str, WeightPacking] | None = None
    ) -> None:
        """`packing`: None for not at all; `own`: parts of names → another way."""
        self._model, self._packing, self._own = model, packing, own
        self.done: list[str] = []
        self._left: dict[str, str] = {}

    def add(self, inside: Collection[str]) -> None:
        """Round the layers inside of these modules."""
        if self._packing is not None:
            done, left = pack_layers(self._model, self._packing, self._own, inside)
            self.done += done
            self._left |= left

    def told(self, *, required: bool) -> None:
        """Log what was rounded; nothing at all is an error where it is `required`."""
        if self._packing is None:
            return
        if required and not self.done:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in list(self._left.items())[:3])
            raise UsageError(
                f"quantization: no layer of {type(self._model).__name__} could be packed "
                f"({reasons or 'there are none'})"
            )
        reasons = "; ".join(sorted({reason for reason in self._left.values() if reason != "excluded"}))
        log_dist(
            f"quantization: {len(self.done)} layers hold {self._packing.mode}, {len(self._left)} keep their "
            f"dtype{reasons and f' ({reasons})'}"
        )


def packing_of(
    section: RaggedQuantizationConfig, rounded: Callable[[Tensor], Tensor] | None = None
) -> WeightPacking | None:
    """How a section asks weights to be held; None for as they are."""
    if section.quantization_mode is None:
        return None
    return WeightPacking(
        section.quantization_mode, section.group_size, section.symmetric, tuple(section.exclude), rounded
    )


def inject(
    model: nn.Module, undo: ExitStack, *, streamed: bool, joins: bool = False, logged: bool = True
) -> list[FusionFinding]:
    """Let modules compute by fused kernels, where the device has them; a table lists them, if `logged`.

    `joins`: weights may move in memory.
    """
    found = list(find(model, _KINDS, serves="infer"))
    put(found, undo)
    if streamed:
        both = chain(find_experts(model), find_streams(model, joins=joins))
        few = [FusionFinding("stream", name, type(each).__name__, swap) for name, each, swap in both]
        put(few, undo)
        found += few
    if found and logged:
        log_dist("Fused kernels\n" + "\n".join(lines(found)))
    return found


class RepeatedInjection:
    """Fused kernels that a model has now and then; they are looked for again where its modules have changed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: list[Any] = []
        self._found: list[FusionFinding] = []

    def put(self, undo: ExitStack) -> None:
        """Let modules compute so until `undo` closes."""
        seen = [
            (id(each), type(each), vars(each).get("forward"), *each._forward_hooks, None, *each._forward_pre_hooks)
            for each in self._model.modules()
        ]
        if seen == self._seen:
            put(self._found, undo)
        else:
            self._found = inject(self._model, undo, streamed=True, logged=not self._seen)
            self._seen = seen


def fix_rows(model: nn.Module, device: torch.device, undo: ExitStack) -> None:
    """Let layers multiply the same number of rows always, so that a row's bits do not depend on the others.

    Libraries choose how to add up by the number of rows. A row alone is the only number that holds on a processor.
    """
    rows = 1 if device.type == "cpu" else _ROWS
    for name, module in model.named_modules():
        own = [key for key, param in module.named_parameters(recurse=False) if param.dim() > 1]
        own += ["its weight"] if isinstance(module, PackedProduct) else []
        if not own or isinstance(module, nn.Embedding):
            continue
        linear = isinstance(module, (nn.Linear, PackedProduct)) or type(module).__name__ == "Conv1D"
        if not linear or isinstance(module, PackedStack):
            raise UsageError(
                f"deterministic: {name} ({type(module).__name__}) multiplies {own[0]} by as many rows as come "
                "together, so that its bits depend on the batch. Leave deterministic out for this model."
            )
        undo.callback(put_forward(module, partial(_in_slices, replacement(module) or type(module).forward, rows)))


def _in_slices(forward: Callable[..., Tensor], rows: int, module: nn.Module, x: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    padded = functional.pad(flat, (0, 0, 0, -len(flat) % rows))
    found = torch.cat([forward(module, part) for part in padded.split(rows)])
    return found[: len(flat)].view(*x.shape[:-1], found.shape[-1])


@torch.no_grad()
def update(model: nn.Module, items: WeightItems, axis: RankGroup | None) -> int:
    """Replace values by whole tensors of Transformers' names, this rank's part of each; returns how many parameters."""
    count = 0
    pairs: dict[str, Tensor] = {}
    for item in [items] if isinstance(items, Mapping) else items:
        if isinstance(item, Mapping):
            count += _replace(model, item, axis)
        else:
            pairs[item[0]] = item[1]
    return count + (_replace(model, pairs, axis) if pairs else 0)


def _replace(model: nn.Module, tensors: Mapping[str, Tensor], axis: RankGroup | None) -> int:
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    packed = packed_parameters(model)
    cuts = cuts_of(model, axis.rank) if axis is not None else {}
    other = next((name for name, tensor in tensors.items() if not isinstance(tensor, Tensor)), None)
    if other is not None:
        raise UsageError(f"update_weights: {other} is {type(tensors[other]).__name__}; it must be a tensor")
    found = stored_as(model, tensors)
    unknown = sorted(name for name in found if name not in held and name not in packed)
    if unknown:
        more = f" (nor {len(unknown) - 1} others)" if unknown[1:] else ""
        raise UsageError(f"update_weights: the model has no parameter {unknown[0]!r}{more}")
    parts: dict[str, Tensor] = {}
    for name, stored in found.items():
        part = stored.whole()
        if name in cuts:
            splits, place = cuts[name]
            part = splits.cut(part, place)
        expected = packed[name].whole_shape if name in packed else tuple(held[name].shape)
        if tuple(part.shape) != expected:
            raise UsageError(f"update_weights: {name} has the shape {tuple(part.shape)}, the model {expected}")
        parts[name] = part
    for name, part in parts.items():  # all fit: nothing is left half replaced
        if name in packed:
            packed[name].set_weight(part.to(packed[name].packed.data.device, packed[name].packed_dtype))
        else:
            held[name].copy_(part)
    return len(parts)


def parked(*models: nn.Module) -> ParkedStorages:
    """The weights of models in host memory, while the device is needed for something else."""
    held = ParkedStorages()
    tensors = [each for model in models for each in (*model.parameters(), *model.buffers())]
    there = [each for each in tensors if each.device.type != "cpu"]
    held.park(there, there, pinned=True)
    return held
