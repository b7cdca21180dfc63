"""Which ranks of a pipeline × tensor × data grid become one of a smaller grid, as maps of lists; files by prefix."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from deepspeed.errors import UsageError
from deepspeed.parallel.axes import LayoutPlan

__all__ = [
    "basic_folder_validation",
    "flatten_dp_dimension",
    "get_files",
    "get_files_with_prefix",
    "get_mpu_ranks",
    "get_zero_files",
    "meg_2d_parallel_map",
    "merge_state",
    "merge_state_dict",
    "merge_state_list",
    "partition_data",
    "reshape_meg_2d_parallel",
    "sort_zero_files",
    "unflatten_dp_dimension",
    "validate_files",
]

T = TypeVar("T")
_ZERO_PREFIXES = ("zero_pp_rank_", "bf16_zero_pp_rank_", "fp16_zero_pp_rank_")


class meg_2d_parallel_map:
    """A list for each (stage, tensor slice); `map` has them by "stage,slice"."""

    def __init__(self, pp_degree: int, tp_degree: int) -> None:
        self.pp_degree = pp_degree
        self.tp_degree = tp_degree
        self.map: dict[str, list[Any]] = {}

    def simple_init(self) -> None:
        """Number the places row by row."""
        places = product(range(self.pp_degree), range(self.tp_degree))
        self.map = {f"{pp},{tp}": [number] for number, (pp, tp) in enumerate(places)}

    def add_data(self, pp_index: int, tp_index: int, data: list[Any]) -> None:
        """Append to the list of a place."""
        self._check(pp_index, tp_index)
        self.map.setdefault(f"{pp_index},{tp_index}", []).extend(data)

    def get_data(self, pp_index: int | None = None, tp_index: int | None = None) -> list[Any]:
        """The list of a place; of all stages or all slices where an index is None."""
        self._check(pp_index or 0, tp_index or 0)
        stages = range(self.pp_degree) if pp_index is None else (pp_index,)
        slices = range(self.tp_degree) if tp_index is None else (tp_index,)
        return [each for pp, tp in product(stages, slices) for each in self.map[f"{pp},{tp}"]]

    def print_data(self, tag: str) -> None:
        """Write the lists to standard output."""
        print("\n".join([tag, *(f"({place}) = {data}" for place, data in self.map.items())]))  # noqa: T201

    def _check(self, pp_index: int, tp_index: int) -> None:
        if not (0 <= pp_index < self.pp_degree and 0 <= tp_index < self.tp_degree):
            raise UsageError(
                f"there is no place ({pp_index}, {tp_index}) in {self.pp_degree} stages × {self.tp_degree} slices"
            )


def reshape_meg_2d_parallel(
    old_pp_degree: int, old_tp_degree: int, new_pp_degree: int, new_tp_degree: int, verbose: bool = False
) -> meg_2d_parallel_map:
    """The old ranks that each place of a smaller grid is made of; sizes must divide."""
    old = meg_2d_parallel_map(old_pp_degree, old_tp_degree)
    old.simple_init()
    new = meg_2d_parallel_map(new_pp_degree, new_tp_degree)
    stages = partition_data(list(range(old_pp_degree)), new_pp_degree)
    for pp, members in enumerate(stages):
        for stage in members:
            for tp, data in enumerate(partition_data(old.get_data(pp_index=stage), new_tp_degree)):
                new.add_data(pp, tp, data)
    if verbose:
        new.print_data(f"{old_pp_degree} × {old_tp_degree} → {new_pp_degree} × {new_tp_degree}")
    return new


def flatten_dp_dimension(meg_2d_map: meg_2d_parallel_map, src_2d_size: int, dp_degree: int) -> meg_2d_parallel_map:
    """Each rank of a map followed by its copies in the other data-parallel grids."""
    flat = meg_2d_parallel_map(meg_2d_map.pp_degree, meg_2d_map.tp_degree)
    for place, ranks in meg_2d_map.map.items():
        flat.map[place] = [rank + copy * src_2d_size for rank in ranks for copy in range(dp_degree)]
    return flat


def unflatten_dp_dimension(meg_2d_map: meg_2d_parallel_map, dp_degree: int) -> list[meg_2d_parallel_map]:
    """The lists of a map cut into one map for each data-parallel rank."""
    maps = [meg_2d_parallel_map(meg_2d_map.pp_degree, meg_2d_map.tp_degree) for _ in range(dp_degree)]
    for place, ranks in meg_2d_map.map.items():
        for cut, part in zip(maps, partition_data(ranks, dp_degree), strict=True):
            cut.map[place] = part
    return maps


def get_mpu_ranks(
    tp_size: int = 1, pp_size: int = 1, dp_size: int = 1, virtual_pp_size: int | None = None
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """The tensor, model and data groups of Megatron's grid; virtual stages share the ranks of the real ones."""
    plan = LayoutPlan.fit(tp_size * pp_size * dp_size, pp=pp_size, tp=tp_size)
    tensor, model, data = plan["tp"], plan["pp", "tp"], plan["dp"]
    return [list(g) for g in tensor.groups], [list(g) for g in model.groups], [list(g) for g in data.groups]


def partition_data(data_list: Sequence[T], num_partitions: int) -> list[list[T]]:
    """Consecutive parts of equal length."""
    if num_partitions < 1 or len(data_list) % num_partitions:
        raise UsageError(f"{len(data_list)} items cannot be cut into {num_partitions} parts of equal length")
    length = len(data_list) // num_partitions
    return [list(data_list[start : start + length]) for start in range(0, len(data_list), length)] if length else []


def basic_folder_validation(dir: str) -> None:
    """Raise UsageError unless this is a directory."""
    if not os.path.isdir(dir):
        raise UsageError(f"{dir} is no directory")


def get_files(dir: str) -> list[str]:
    """All files below a directory, in order."""
    return sorted(str(path) for path in Path(dir).rglob("*") if path.is_file())


def get_files_with_prefix(all_files: Iterable[str], prefix: str) -> list[str]:
    """Those whose names begin so, in order."""
    return sorted(file for file in all_files if Path(file).name.startswith(prefix))


def get_zero_files(dir: str) -> list[str]:
    """The files of sharded optimizer states, by data-parallel and then by model-parallel rank."""
    files = get_files(dir)
    for prefix in _ZERO_PREFIXES:
        found = get_files_with_prefix(files, prefix)
        if found:
            return sort_zero_files([file for file in found if file.endswith("optim_states.pt")], prefix)
    return []


def sort_zero_files(files: Iterable[str], prefix: str) -> list[str]:
    """By data-parallel and then by model-parallel rank, as numbers."""

    def ranks(file: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", Path(file).name.removeprefix(prefix))]

    return sorted(files, key=ranks)


def validate_files(file_list: Iterable[str]) -> None:
    """Raise UsageError for a file that is not there."""
    missing = [file for file in file_list if not os.path.isfile(file)]
    if missing:
        raise UsageError(f"there is no file {', '.join(missing)}")


def merge_state(state_a: Any, state_b: Any, key_list: Sequence[str] = ()) -> Any:
    """Two states of one structure with their tensors joined end to end; other values are the first one's.

    `key_list` names the place within a larger state, for errors.
    """
    if type(state_a) is not type(state_b):
        raise UsageError(f"{_place(key_list)}: a {type(state_a).__name__} and a {type(state_b).__name__} do not join")
    if isinstance(state_a, dict):
        return merge_state_dict(state_a, state_b, key_list)
    if isinstance(state_a, (list, tuple)):
        return type(state_a)(merge_state_list(state_a, state_b, key_list))
    return torch.cat([state_a, state_b]) if isinstance(state_a, Tensor) and state_a.dim() else state_a


def merge_state_dict(dict_a: dict[str, Any], dict_b: dict[str, Any], key_list: Sequence[str]) -> dict[str, Any]:
    """As `merge_state`, of dicts with the same keys."""
    if dict_a.keys() != dict_b.keys():
        odd = sorted(map(str, dict_a.keys() ^ dict_b.keys()))
        raise UsageError(f"{_place(key_list)}: only one of the two states has {', '.join(odd)}")
    return {key: merge_state(value, dict_b[key], [*key_list, str(key)]) for key, value in dict_a.items()}


def merge_state_list(list_a: Sequence[Any], list_b: Sequence[Any], key_list: Sequence[str]) -> list[Any]:
    """As `merge_state`, of lists of one length."""
    if len(list_a) != len(list_b):
        raise UsageError(f"{_place(key_list)}: lists of {len(list_a)} and {len(list_b)} do not join")
    return [merge_state(one, other, key_list) for one, other in zip(list_a, list_b, strict=True)]


def _place(key_list: Sequence[str]) -> str:
    return ".".join(key_list) or "the state"
