"""`DeepSpeedCheckpoint`: a Megatron-style pipeline checkpoint for offline tools, also for smaller grids of ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.formats.guard import guarded
from deepspeed.checkpoint.formats.safe_load import safe_load
from deepspeed.checkpoint.formats.zero_files.file_names import sort_files
from deepspeed.errors import CheckpointError


class model_3d_desc:
    """The sizes of a grid of ranks."""

    def __init__(self, pp_degree: int = 1, tp_degree: int = 1, dp_degree: int = 1) -> None:
        self.pp_degree = pp_degree
        self.tp_degree = tp_degree
        self.dp_degree = dp_degree

    def world_size(self) -> int:
        """All ranks."""
        return self.pp_degree * self.tp_degree * self.dp_degree

    def is_valid(self, pp_index: int, tp_index: int, dp_index: int) -> tuple[bool, list[str]]:
        """Whether a rank is in the grid, and if not why."""
        given = (("PP", pp_index, self.pp_degree), ("TP", tp_index, self.tp_degree), ("DP", dp_index, self.dp_degree))
        errors = [f"{axis} indexing error: index {i} >= degree {degree}" for axis, i, degree in given if i >= degree]
        return not errors, errors

    def reshape(self, target_3d_desc: model_3d_desc) -> list[dict[tuple[int, int], list[int]]]:
        """Per data-parallel index: (pipeline, tensor) index → numbers of the files, which are in dp, pp, tp order.

        A grid that is larger in a direction cannot be made of this one.
        """
        axes = (("PP", "pp_degree"), ("TP", "tp_degree"), ("DP", "dp_degree"))
        errors = [
            f"Expansion reshape not supported - {axis}: {getattr(self, key)} ---> {getattr(target_3d_desc, key)}"
            for axis, key in axes
            if getattr(target_3d_desc, key) > getattr(self, key)
        ]
        if errors:
            raise CheckpointError(",".join(errors))
        target, plane = target_3d_desc, self.pp_degree * self.tp_degree
        rows, columns = self.pp_degree // target.pp_degree, self.tp_degree // target.tp_degree
        result: list[dict[tuple[int, int], list[int]]] = [{} for _ in range(target.dp_degree)]
        for pp in range(target.pp_degree):
            for tp in range(target.tp_degree):
                files = [
                    dp * plane + row * self.tp_degree + column
                    for row in range(pp * rows, (pp + 1) * rows)
                    for column in range(tp * columns, (tp + 1) * columns)
                    for dp in range(self.dp_degree)
                ]
                share = len(files) // target.dp_degree
                for dp in range(target.dp_degree):
                    result[dp][pp, tp] = files[dp * share : (dp + 1) * share]
        return result


def get_model_3d_descriptor(dir: str) -> model_3d_desc:
    """The grid that wrote a directory."""
    found = sort_files(os.listdir(dir))
    layers = len(
        {name.split("-model_")[1][:2] for name in found.layers if "-model_" in name.replace("-model_states", "")}
    )
    mp = len(found.models) or len({rank for _, rank in found.sharded_models}) or 1
    dp = len({rank for rank, _ in found.optimizers}) or 1
    if found.layers:
        tp = max(layers, 1)
        return model_3d_desc(mp // tp, tp, dp)
    return model_3d_desc(1, mp, dp)


@guarded
class ZeROCheckpoint:
    """The optimizer's files of a directory, by the rank of a grid that may be smaller than the one that wrote them."""

    def __init__(self, dir: str, source_3d: model_3d_desc | None = None) -> None:
        found = sort_files(os.listdir(dir)).optimizers
        if not found:
            raise CheckpointError(f"No ZeRO files found in {dir}")
        self.dir = dir
        self.file_list = [str(Path(dir) / found[key]) for key in sorted(found)]
        self.num_files = len(self.file_list)
        self.src_3d = source_3d or get_model_3d_descriptor(dir)
        self.reshape(self.src_3d)

    def reshape(self, target_3d_desc: model_3d_desc) -> None:
        """Look at the files as those of another grid."""
        self.target_3d = target_3d_desc
        self._map = self.src_3d.reshape(target_3d_desc)

    def get_file_indices_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[int]:
        """Numbers in `file_list`."""
        valid, errors = self.target_3d.is_valid(pp_index, tp_index, dp_index)
        if not valid:
            raise CheckpointError("; ".join(errors))
        return self._map[dp_index][pp_index, tp_index]

    def get_files_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """The files of a rank."""
        return [self.file_list[index] for index in self.get_file_indices_for_rank(pp_index, tp_index, dp_index)]

    def get_state_for_rank(
        self,
        pp_index: int,
        tp_index: int,
        dp_index: int,
        keys_to_ignore: Sequence[str] = (),
        strip_tensor_paddings: bool = True,
    ) -> dict[str, Any]:
        """The files of a rank as one state: flat tensors one after the other, without padding."""
        states = []
        for file in self.get_files_for_rank(pp_index, tp_index, dp_index):
            state = {key: value for key, value in safe_load(file).items() if key not in keys_to_ignore}
            states.append(_without_padding(state) if strip_tensor_paddings else state)
        merged: dict[str, Any] = _concatenate(states)
        inner = merged.get("optimizer_state_dict", {})
        if "partition_count" in inner:
            groups = inner.get("base_optimizer_state", {}).get("param_groups") or [None]
            inner["partition_count"] = [self.target_3d.dp_degree] * len(groups)
        return merged


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


_LAYER = re.compile(r"(layer_\d+)-model_(\d+)-model_states\.pt")


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
        self.mp_rank_files = [str(Path(dir) / found.models[rank]) for rank in sorted(found.models)]
        self.layer_files = [str(Path(dir) / name) for name in found.layers]
        self._layers: dict[str, dict[int, str]] = {}
        for name in found.layers:
            if match := _LAYER.fullmatch(name):
                self._layers.setdefault(match[1], {})[int(match[2])] = str(Path(dir) / name)
        self.layer_keys = sorted(self._layers)
        self.layer_count = len(self.layer_keys)
        self.zero_checkpoint = ZeROCheckpoint(dir)
        source = self.zero_checkpoint.src_3d
        self.tp_degree = source.tp_degree if tp_degree is None else tp_degree
        self.pp_degree = source.pp_degree if pp_degree is None else pp_degree
        self.dp_degree = source.dp_degree if dp_degree is None else dp_degree
        self.original_world_size = source.world_size()
        self.world_size = self.tp_degree * self.pp_degree * self.dp_degree
        target = model_3d_desc(self.pp_degree, self.tp_degree, self.dp_degree)
        self._plane = model_3d_desc(source.pp_degree, source.tp_degree).reshape(
            model_3d_desc(self.pp_degree, self.tp_degree)
        )[0]
        self.zero_checkpoint.reshape(target)

    def is_change_tp_degree(self) -> bool:
        """Whether it is seen with another number of tensor-parallel ranks."""
        return self.tp_degree != self.zero_checkpoint.src_3d.tp_degree

    def is_change_pp_degree(self) -> bool:
        """Whether it is seen with another number of pipeline stages."""
        return self.pp_degree != self.zero_checkpoint.src_3d.pp_degree

    def is_change_dp_degree(self) -> bool:
        """Whether it is seen with another number of data-parallel ranks."""
        return self.dp_degree != self.zero_checkpoint.src_3d.dp_degree

    def get_zero_checkpoint_state(
        self, pp_index: int, tp_index: int, dp_index: int, strip_tensor_paddings: bool = True
    ) -> dict[str, Any]:
        """The optimizer's state of a rank."""
        return self.zero_checkpoint.get_state_for_rank(
            pp_index, tp_index, dp_index, ["param_shapes"], strip_tensor_paddings
        )

    def get_zero_files(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """The optimizer's files of a rank."""
        return self.zero_checkpoint.get_files_for_rank(pp_index, tp_index, dp_index)

    def get_iteration(self) -> int:
        """The client's `iteration`, 0 if it has none."""
        return int(safe_load(self.mp_rank_files[0]).get("iteration", 0))

    def get_args(self) -> Any:
        """The client's `args`."""
        return safe_load(self.mp_rank_files[0]).get("args")

    def get_checkpoint_info(self, info_key: str = "checkpoint_info") -> Any:
        """An entry of the first model file."""
        return safe_load(self.mp_rank_files[0]).get(info_key)

    def get_embedding_layer_id(self) -> str:
        """The first layer."""
        return self.layer_keys[0]

    def get_final_norm_layer_id(self) -> str:
        """The layer of the last normalisation."""
        return self.layer_keys[self.final_layer_norm_idx]

    def get_embedding_files(self, tp_index: int) -> list[str]:
        """The files of the first layer."""
        return self._layer_files(self.get_embedding_layer_id(), tp_index)

    def get_embedding_state(self, tp_index: int) -> dict[str, Any]:
        """The first layer, its tensor-parallel slices one after the other."""
        return _merge([safe_load(file) for file in self.get_embedding_files(tp_index)])

    def get_final_norm_files(self, tp_index: int) -> list[str]:
        """The files of the last normalisation."""
        return self._layer_files(self.get_final_norm_layer_id(), tp_index)

    def get_final_norm_state(self, tp_index: int) -> dict[str, Any]:
        """The last normalisation."""
        state: dict[str, Any] = safe_load(self.get_final_norm_files(tp_index)[0])
        return state

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
        return [
            _merge([safe_load(file) for file in self._layer_files(layer, tp_index)])
            for layer in self.get_pp_transformer_map(pp_index)
        ]

    def get_2d_parallel_files(self, tp_index: int, pp_index: int) -> list[str]:
        """The model files of a rank."""
        return [self.mp_rank_files[index] for index in self._plane[pp_index, tp_index]]

    def get_2d_parallel_state(self, tp_index: int, pp_index: int) -> dict[str, Any]:
        """The model files of a rank as one."""
        return _merge([safe_load(file) for file in self.get_2d_parallel_files(tp_index, pp_index)])

    def validate_files(self) -> None:
        """Every file must be there."""
        for file in (*self.mp_rank_files, *self.layer_files, *self.zero_checkpoint.file_list):
            if not os.path.isfile(file):
                raise CheckpointError(f"{file} does not exist")

    def _layer_files(self, layer: str, tp_index: int) -> list[str]:
        slices = self._layers[layer]
        share = self.zero_checkpoint.src_3d.tp_degree // self.tp_degree
        return [slices[rank] for rank in sorted(slices)][tp_index * share : (tp_index + 1) * share]


def _merge(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Tensors with dims one after the other, anything else as in the first."""
    first = states[0]
    if len(states) == 1:
        return first
    return {
        key: torch.cat([state[key] for state in states]) if isinstance(value, torch.Tensor) and value.ndim else value
        for key, value in first.items()
    }
