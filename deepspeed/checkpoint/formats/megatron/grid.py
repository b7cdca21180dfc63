"""Which files of a pipeline × tensor × data grid of ranks make up a rank of a smaller grid: for offline tools."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.formats.guard import guarded
from deepspeed.checkpoint.formats.safe_load import safe_load
from deepspeed.checkpoint.formats.zero_files.file_names import sort_files
from deepspeed.errors import CheckpointError

__all__ = ["ZeROCheckpoint", "get_model_3d_descriptor", "model_3d_desc"]


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
