"""`DeepSpeedCheckpoint`: a Megatron-style pipeline checkpoint for offline tools, also for smaller grids of ranks."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.formats.guard import guarded
from deepspeed.checkpoint.formats.megatron.grid import ZeROCheckpoint, model_3d_desc
from deepspeed.checkpoint.formats.safe_load import safe_load
from deepspeed.checkpoint.formats.zero_files.file_names import sort_files
from deepspeed.errors import CheckpointError

__all__ = ["DeepSpeedCheckpoint"]

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
