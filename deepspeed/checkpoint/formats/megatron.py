"""`DeepSpeedCheckpoint`: a Megatron-style pipeline checkpoint for offline tools, also for smaller grids of ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.formats.guard import guarded
from deepspeed.checkpoint.formats.safe_load import safe_load
from deepspeed.checkpoint.formats.zero_files.file_names import CheckpointFiles, sort_files
from deepspeed.errors import CheckpointError

_LAYER = re.compile(r"(layer_\d+)-model_(\d+)-model_states\.pt")


@dataclass(frozen=True, slots=True)
class _Grid:
    """The sizes of a grid of ranks."""

    pp: int
    tp: int
    dp: int = 1

    @property
    def size(self) -> int:
        return self.pp * self.tp * self.dp

    def joined(self, target: _Grid) -> dict[tuple[int, int, int], list[int]]:
        """(pipeline, tensor, data) index in a smaller grid → the ranks of this one, numbered in dp, pp, tp order.

        A grid that is larger in a direction cannot be made of this one.
        """
        axes = (("PP", self.pp, target.pp), ("TP", self.tp, target.tp), ("DP", self.dp, target.dp))
        errors = [
            f"Expansion reshape not supported - {axis}: {here} ---> {there}"
            for axis, here, there in axes
            if there > here
        ]
        if errors:
            raise CheckpointError(",".join(errors))
        rows, columns = self.pp // target.pp, self.tp // target.tp
        result = {}
        for pp in range(target.pp):
            for tp in range(target.tp):
                ranks = [
                    (dp * self.pp + row) * self.tp + column
                    for row in range(pp * rows, (pp + 1) * rows)
                    for column in range(tp * columns, (tp + 1) * columns)
                    for dp in range(self.dp)
                ]
                share = len(ranks) // target.dp
                result.update({(pp, tp, dp): ranks[dp * share : (dp + 1) * share] for dp in range(target.dp)})
        return result


def _grid_of(found: CheckpointFiles) -> _Grid:
    """The grid that wrote these files."""
    mp = len(found.models) or len({rank for _, rank in found.sharded_models}) or 1
    dp = len({rank for rank, _ in found.optimizers}) or 1
    if not found.layers:
        return _Grid(1, mp, dp)
    tp = len({match[2] for name in found.layers if (match := _LAYER.fullmatch(name))}) or 1
    return _Grid(mp // tp, tp, dp)


@guarded
class DeepSpeedCheckpoint:
    """A directory of layer files, model files and optimizer files, seen from a grid of ranks no larger than theirs."""

    def __init__(
        self,
        dir: str,
        tp_degree: int | None = None,
        pp_degree: int | None = None,
        dp_degree: int | None = None,
        final_layer_norm_idx: int = -1,
    ) -> None:
        self.dir = dir
        self.final_layer_norm_idx = final_layer_norm_idx
        found = sort_files(os.listdir(dir))
        if not found.optimizers:
            raise CheckpointError(f"No ZeRO files found in {dir}")
        self.mp_rank_files = [str(Path(dir) / found.models[rank]) for rank in sorted(found.models)]
        self.layer_files = [str(Path(dir) / name) for name in found.layers]
        self._optimizers = [str(Path(dir) / found.optimizers[key]) for key in sorted(found.optimizers)]
        self._layers: dict[str, dict[int, str]] = {}
        for name in found.layers:
            if match := _LAYER.fullmatch(name):
                self._layers.setdefault(match[1], {})[int(match[2])] = str(Path(dir) / name)
        self.layer_keys = sorted(self._layers)
        self.layer_count = len(self.layer_keys)
        source = _grid_of(found)
        self.tp_degree = source.tp if tp_degree is None else tp_degree
        self.pp_degree = source.pp if pp_degree is None else pp_degree
        self.dp_degree = source.dp if dp_degree is None else dp_degree
        self.original_world_size = source.size
        self.world_size = self.tp_degree * self.pp_degree * self.dp_degree
        self._slices = source.tp // self.tp_degree
        self._plane = _Grid(source.pp, source.tp).joined(_Grid(self.pp_degree, self.tp_degree))
        self._ranks = source.joined(_Grid(self.pp_degree, self.tp_degree, self.dp_degree))

    def get_zero_files(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """The optimizer's files of a rank."""
        given = (("PP", pp_index, self.pp_degree), ("TP", tp_index, self.tp_degree), ("DP", dp_index, self.dp_degree))
        errors = [f"{axis} indexing error: index {i} >= degree {degree}" for axis, i, degree in given if i >= degree]
        if errors:
            raise CheckpointError("; ".join(errors))
        return [self._optimizers[rank] for rank in self._ranks[pp_index, tp_index, dp_index]]

    def get_zero_checkpoint_state(
        self, pp_index: int, tp_index: int, dp_index: int, strip_tensor_paddings: bool = True
    ) -> dict[str, Any]:
        """The optimizer's files of a rank as one state: flat tensors one after the other, without padding."""
        states = []
        for file in self.get_zero_files(pp_index, tp_index, dp_index):
            state = {key: value for key, value in safe_load(file).items() if key != "param_shapes"}
            states.append(_without_padding(state) if strip_tensor_paddings else state)
        merged: dict[str, Any] = _concatenate(states)
        inner = merged.get("optimizer_state_dict", {})
        if "partition_count" in inner:
            groups = inner.get("base_optimizer_state", {}).get("param_groups") or [None]
            inner["partition_count"] = [self.dp_degree] * len(groups)
        return merged

    def get_iteration(self) -> int:
        """The client's `iteration`, 0 if it has none."""
        return int(self.get_checkpoint_info("iteration") or 0)

    def get_args(self) -> Any:
        """The client's `args`."""
        return self.get_checkpoint_info("args")

    def get_checkpoint_info(self, info_key: str = "checkpoint_info") -> Any:
        """An entry of the first model file."""
        return safe_load(self.mp_rank_files[0]).get(info_key)

    def get_embedding_layer_id(self) -> str:
        """The first layer."""
        return self.layer_keys[0]

    def get_final_norm_layer_id(self) -> str:
        """The layer of the last normalisation."""
        return self.layer_keys[self.final_layer_norm_idx]

    def get_embedding_state(self, tp_index: int) -> dict[str, Any]:
        """The first layer, its tensor-parallel slices one after the other."""
        return _merge(self._layer_files(self.get_embedding_layer_id(), tp_index))

    def get_final_norm_state(self, tp_index: int) -> dict[str, Any]:
        """The last normalisation."""
        return _merge(self._layer_files(self.get_final_norm_layer_id(), tp_index)[:1])

    def get_pp_transformer_map(self, pp_index: int) -> list[str]:
        """The transformer layers of a pipeline stage."""
        last = self.final_layer_norm_idx % max(self.layer_count, 1)
        layers = self.layer_keys[1:last]
        share = len(layers) // self.pp_degree
        if share * self.pp_degree != len(layers):
            raise CheckpointError(f"{len(layers)} transformer layers do not divide into {self.pp_degree} stages")
        return layers[pp_index * share : (pp_index + 1) * share]

    def get_transformer_state(self, tp_index: int, pp_index: int) -> list[dict[str, Any]]:
        """The transformer layers of a stage, slices one after the other."""
        return [_merge(self._layer_files(layer, tp_index)) for layer in self.get_pp_transformer_map(pp_index)]

    def get_2d_parallel_files(self, tp_index: int, pp_index: int) -> list[str]:
        """The model files of a rank."""
        return [self.mp_rank_files[index] for index in self._plane[pp_index, tp_index, 0]]

    def get_2d_parallel_state(self, tp_index: int, pp_index: int) -> dict[str, Any]:
        """The model files of a rank as one."""
        return _merge(self.get_2d_parallel_files(tp_index, pp_index))

    def _layer_files(self, layer: str, tp_index: int) -> list[str]:
        slices = self._layers[layer]
        return [slices[rank] for rank in sorted(slices)][tp_index * self._slices : (tp_index + 1) * self._slices]


def _without_padding(state: dict[str, Any]) -> dict[str, Any]:
    inner = dict(state["optimizer_state_dict"])
    paddings = inner.get("group_paddings")
    base = inner.get("base_optimizer_state")
    if not paddings or not isinstance(base, dict):
        return state
    cut = {
        group: {
            key: value[: len(value) - paddings[group]] if isinstance(value, torch.Tensor) and value.ndim else value
            for key, value in entry.items()
        }
        for group, entry in base["state"].items()
    }
    inner["base_optimizer_state"] = {**base, "state": cut}
    inner["group_paddings"] = [0] * len(paddings)
    return {**state, "optimizer_state_dict": inner}


def _concatenate(values: Sequence[Any]) -> Any:
    """Containers by their entries, flat tensors one after the other, anything else as in the first."""
    first = values[0]
    if isinstance(first, torch.Tensor) and first.ndim:
        return torch.cat(list(values))
    if type(first) is dict:
        return {key: _concatenate([value[key] for value in values if key in value]) for key in first}
    if isinstance(first, list):
        return [_concatenate(list(parts)) for parts in zip(*values, strict=False)]
    return first


def _merge(files: Sequence[str]) -> dict[str, Any]:
    """Of state dicts: tensors with dims one after the other, anything else as in the first."""
    first: dict[str, Any]
    first, *others = map(safe_load, files)
    return {
        key: torch.cat([value, *(state[key] for state in others)])
        if others and isinstance(value, torch.Tensor) and value.ndim
        else value
        for key, value in first.items()
    }
