"""Which layers have a file of their own in a checkpoint, and how scripts name, write and read these files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from deepspeed.checkpoint.formats.training_state import Layers
from deepspeed.checkpoint.formats.zero_files.file_names import layer_file
from deepspeed.errors import CheckpointError
from deepspeed.parallel.topology import PipelineParallelGrid
from deepspeed.pipe.cutting import ModelCut
from deepspeed.pipe.specs import Layer, LayerSpec, TiedLayerSpec

__all__ = ["LayerFiles"]

_LOSS = "loss_fn"
"""The loss of a pipeline, where it is a module of the model."""


class LayerFiles:
    """Methods of `PipelineModule`."""

    tied_modules: nn.ModuleDict
    _layer_specs: list[Layer]
    _calls: dict[int, Callable[..., Any]]
    _grid: PipelineParallelGrid
    _modules: dict[str, nn.Module | None]
    _local_start: int
    cut: ModelCut | None

    def layer_names(self) -> Layers:
        """The layers that have a file, with what the names of their tensors begin."""
        if self.cut is not None:
            files = list(enumerate(self.cut.files()))
            here = {file: prefix for file, (number, prefix) in files if number in self._calls}
            tied = {f"{tie.path}." for tie in self.cut.ties} if len(self._layer_specs) - 1 in self._calls else set()
            here |= self._loss_file(len(files))
            return Layers(here, {file: prefix for file, (_, prefix) in files if file not in here and prefix in tied})
        owned = {number: f"tied_modules.{key}." for key, number in _files_of_ties(self._layer_specs).items()}
        here = {}
        for number in self._calls:
            layer = self._layer_specs[number]
            if number in owned:
                here[number] = owned[number]
            elif isinstance(layer, (LayerSpec, nn.Module)) and not isinstance(layer, TiedLayerSpec):
                here[number] = f"{number}."
        here |= self._loss_file(len(self._layer_specs))
        prefixes = tuple(f"tied_modules.{key}." for key in self.tied_modules)
        return Layers(here, {n: p for n, p in owned.items() if n not in here and p in prefixes})

    def _loss_file(self, number: int) -> dict[int, str]:
        """The file behind those of the layers, where the loss has weights."""
        return {number: f"{_LOSS}."} if _LOSS in self._modules else {}

    def holds(self, name: str) -> bool:
        """Whether a tensor of the whole model lies on this rank; what no rank can have does, to be refused there."""
        if name.startswith(f"{_LOSS}."):
            return _LOSS in self._modules
        if self.cut is not None:
            return not self.cut.knows(name) or name.startswith(tuple(self.layer_names().known.values()))
        first, _, rest = name.partition(".")
        if first == "tied_modules":
            return rest.partition(".")[0] in self.tied_modules
        if not first.isdigit() or int(first) >= len(self._layer_specs):
            return True
        return first in self._modules

    def ckpt_prefix(self, checkpoints_path: str | os.PathLike[str], tag: str) -> str:
        """The beginning of the names of this rank's model files."""
        return str(Path(checkpoints_path) / tag / f"module{self._slices()}")

    def ckpt_layer_path(self, ckpt_dir: str | os.PathLike[str], local_layer_idx: int) -> str:
        """The file of this rank's layer of that number."""
        return str(Path(ckpt_dir) / self._file(self._local_start + local_layer_idx))

    def save_state_dict(
        self, save_dir: str | os.PathLike[str], checkpoint_engine: Any, exclude_frozen_params: bool = False
    ) -> None:
        """Write the files of this rank's layers by a checkpoint engine; on the first replica only."""
        if self._grid.data_parallel_id != 0 or self._grid.get_sequence_parallel_rank() != 0:
            return
        Path(save_dir).mkdir(parents=True, exist_ok=True)
        for number, module in self._with_files():
            frozen = {name for name, param in module.named_parameters() if not param.requires_grad}
            values = {
                name: value
                for name, value in module.state_dict().items()
                if not (exclude_frozen_params and name in frozen)
            }
            checkpoint_engine.save(values, str(Path(save_dir) / self._file(number)))

    def load_state_dir(self, load_dir: str | os.PathLike[str], checkpoint_engine: Any, strict: bool = True) -> None:
        """Read the files of this rank's layers by a checkpoint engine."""
        for number, module in self._with_files():
            path = Path(load_dir) / self._file(number)
            if not path.exists():
                raise CheckpointError(f"{path} is missing: the checkpoint has no file of layer {number}")
            module.load_state_dict(checkpoint_engine.load(str(path), map_location="cpu"), strict=strict)
        self.share_ties()

    def share_ties(self) -> None:
        """Give every stage the tied weights of the first that has them."""

    def _with_files(self) -> Sequence[tuple[int, nn.Module]]:
        if self.cut is not None:
            return [(file, self._under(prefix)) for file, prefix in self.layer_names().here.items()]
        found = []
        for number, prefix in self.layer_names().here.items():
            if prefix == f"{_LOSS}.":
                found.append((number, self._under(prefix)))
                continue
            layer = self._layer_specs[number]
            module = self.tied_modules[layer.key] if isinstance(layer, TiedLayerSpec) else self._modules[str(number)]
            assert module is not None, "a layer with a file is a module"
            found.append((number, module))
        return found

    def _under(self, prefix: str) -> nn.Module:
        assert isinstance(self, nn.Module), "these are methods of a module"
        return self.get_submodule(prefix.removesuffix("."))

    def _file(self, number: int) -> str:
        slices = self._grid.get_slice_parallel_world_size()
        return layer_file(number, self._grid.get_slice_parallel_rank() if slices > 1 else None)

    def _slices(self) -> str:
        words = self._grid.topology().get_rank_repr(self._grid.global_rank, ("data", "pipe", "sequence"))
        return f"-{words}" if words else ""


def _files_of_ties(layers: Sequence[Layer]) -> dict[str, int]:
    """Tied key → the layer whose file holds it: its first use as a plain module, or its first use."""
    found: dict[str, int] = {}
    for number, layer in enumerate(layers):
        if isinstance(layer, TiedLayerSpec):
            known = found.setdefault(layer.key, number)
            first = layers[known]
            if layer.forward_fn is None and isinstance(first, TiedLayerSpec) and first.forward_fn is not None:
                found[layer.key] = number
    return found
