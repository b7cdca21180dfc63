"""The functions that scripts import from here: one state dict out of a ZeRO checkpoint. Also runs as a program."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.checkpoint.formats.consolidate import DTYPES, StoredTensor, fp32_weights, write_shards
from deepspeed.checkpoint.formats.detect import find_tag, open_checkpoint
from deepspeed.checkpoint.formats.guard import reading
from deepspeed.checkpoint.formats.safe_load import safe_load
from deepspeed.checkpoint.zero_to_fp32 import check_output, main
from deepspeed.errors import CheckpointError

__all__ = [
    "GatheredTensor",
    "atoi",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_checkpoint_files",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_model_state_files",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
    "natural_keys",
    "parse_model_states",
    "parse_optim_states",
    "to_torch_tensor",
    "zero3_partitioned_param_info",
    "zero_model_state",
]

GatheredTensor = StoredTensor
"""What lazy mode gives: `contiguous()` reads the tensor."""


@dataclass
class zero_model_state:
    """What a model's file says of a rank."""

    buffers: dict[str, Tensor]
    param_shapes: Any
    shared_params: list[tuple[str, str]]
    ds_version: str
    frozen_param_shapes: Any
    frozen_param_fragments: Any


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """The fp32 state dict; in lazy mode tensors stay in the files until their `contiguous()` is called."""
    with reading(checkpoint_dir):
        source = open_checkpoint(find_tag(checkpoint_dir, tag), verify=False)
        lazy: dict[str, Any] = dict(fp32_weights(source, exclude_frozen=exclude_frozen_parameters))
        result = lazy if lazy_mode else {name: tensor.contiguous() for name, tensor in lazy.items()}
        result.update({alias: result[owner] for alias, owner in source.aliases.items() if owner in result})
    return result


def to_torch_tensor(
    state_dict: Mapping[str, Any], return_empty_tensor: bool = False, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Read what lazy mode left in files, tied tensors once; or give empty tensors of the same shapes."""
    made: dict[int, Tensor] = {}
    result = {}
    for name, value in state_dict.items():
        if id(value) not in made:
            kind = dtype if dtype is not None and value.dtype.is_floating_point else value.dtype
            if return_empty_tensor:
                made[id(value)] = torch.empty(value.shape, dtype=kind)
            else:
                made[id(value)] = value.contiguous().to(kind)
        result[name] = made[id(value)]
    return result


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str,
    output_dir: str,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the fp32 state dict, in several files with an index where it is larger than `max_shard_size`."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str,
    output_dir: str,
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the state dict with floating-point tensors in `dtype`."""
    kind = DTYPES.get(str(dtype).removeprefix("torch."))
    if kind is None:
        raise CheckpointError(f"dtype {dtype!r} is not one of {', '.join(sorted(DTYPES))}")
    output = Path(output_dir)
    with reading(checkpoint_dir):
        folder = find_tag(checkpoint_dir, tag)
        check_output(output, folder)
        source = open_checkpoint(folder, verify=False)
        tensors = fp32_weights(source, exclude_frozen=exclude_frozen_parameters)
        write_shards(output, tensors, source.aliases, limit=max_shard_size, safe=safe_serialization, dtype=kind)


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: str, tag: str | None = None) -> nn.Module:
    """Move the model to the CPU and load the fp32 weights; names that only one side has are passed over."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def atoi(text: str) -> int | str:
    """Digits as a number, anything else as it is."""
    return int(text) if text.isdigit() else text


def natural_keys(text: str) -> list[int | str]:
    """A sorting key that counts: rank 10 after rank 9."""
    return [atoi(part) for part in re.split(r"(\d+)", text)]


def get_checkpoint_files(checkpoint_dir: str, glob_pattern: str) -> list[str]:
    """The files of a pattern, by rank."""
    found = sorted(Path(checkpoint_dir).glob(glob_pattern), key=lambda path: natural_keys(path.name))
    if not found:
        raise FileNotFoundError(f"can't find {glob_pattern} files in directory '{checkpoint_dir}'")
    return [str(path) for path in found]


def get_optim_files(checkpoint_dir: str) -> list[str]:
    """The optimizer's files, by rank."""
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: str) -> list[str]:
    """The model's files, by rank."""
    return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")


def get_model_state_file(checkpoint_dir: str, zero_stage: int) -> str:
    """The model's file of the first rank."""
    if not Path(checkpoint_dir).is_dir():
        raise FileNotFoundError(f"Directory '{checkpoint_dir}' doesn't exist")
    name = "mp_rank_00_model_states.pt" if zero_stage <= 2 else "zero_pp_rank_0_mp_rank_00_model_states.pt"
    path = Path(checkpoint_dir) / name
    if not path.exists():
        raise FileNotFoundError(f"can't find model states file at '{path}'")
    return str(path)


def parse_model_states(files: Sequence[str]) -> list[zero_model_state]:
    """What each of the model's files says."""
    result = []
    for file in files:
        with reading(file):
            result.append(_model_state(file))
    return result


def _model_state(file: str) -> zero_model_state:
    entries = safe_load(file)
    if "buffer_names" not in entries:
        raise ValueError(f"{file} is not a model state checkpoint")
    return zero_model_state(
        {name: entries["module"][name].float() for name in entries["buffer_names"]},
        entries.get("param_shapes"),
        list((entries.get("shared_params") or {}).items()),
        str(entries.get("ds_version", "")),
        entries.get("frozen_param_shapes"),
        entries.get("frozen_param_fragments"),
    )


def parse_optim_states(files: Sequence[str], ds_checkpoint_dir: str) -> tuple[int, int, list[Any]]:
    """(stage, ranks, each rank's flat fp32 tensors)."""
    with reading(ds_checkpoint_dir):
        return _optim_states(files, ds_checkpoint_dir)


def _optim_states(files: Sequence[str], ds_checkpoint_dir: str) -> tuple[int, int, list[Any]]:
    states = [safe_load(file)["optimizer_state_dict"] for file in files]
    if "zero_stage" not in states[0]:
        raise ValueError(f"{files[0]} is not a zero checkpoint")
    count = states[0]["partition_count"]
    world = max(count) if isinstance(count, (list, tuple)) else int(count)
    if world != len(files):
        raise ValueError(
            f"Expected {world} of '*_optim_states.pt' under '{ds_checkpoint_dir}' but found {len(files)} files"
        )
    stage = int(states[0]["zero_stage"])
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    return stage, world, [state[key] for state in states]


def zero3_partitioned_param_info(unpartitioned_numel: int, world_size: int) -> tuple[int, int]:
    """(elements of a rank's part, padding elements in all)."""
    part = math.ceil(unpartitioned_numel / world_size)
    return part, part * world_size - unpartitioned_numel


if __name__ == "__main__":
    main()
