"""The functions that scripts import from here: one state dict out of a ZeRO checkpoint. Also runs as a program."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from deepspeed.checkpoint.formats.consolidate import fp32_weights, write_shards
from deepspeed.checkpoint.formats.detect import find_tag, open_checkpoint
from deepspeed.checkpoint.formats.guard import reading
from deepspeed.checkpoint.formats.safe_load import safe_load
from deepspeed.checkpoint.zero_to_fp32 import check_output, main

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_model_state_files",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
    "parse_optim_states",
]


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


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str,
    output_dir: str,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the fp32 state dict, in several files with an index where it is larger than `max_shard_size`."""
    output = Path(output_dir)
    with reading(checkpoint_dir):
        folder = find_tag(checkpoint_dir, tag)
        check_output(output, folder)
        source = open_checkpoint(folder, verify=False)
        tensors = fp32_weights(source, exclude_frozen=exclude_frozen_parameters)
        write_shards(output, tensors, source.aliases, limit=max_shard_size, safe=safe_serialization)


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: str, tag: str | None = None) -> nn.Module:
    """Move the model to the CPU and load the fp32 weights; names that only one side has are passed over."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def _files(checkpoint_dir: str, pattern: str) -> list[str]:
    """The files of a pattern, by rank: that of rank 10 after that of rank 9."""
    found = Path(checkpoint_dir).glob(pattern)
    ordered = sorted(found, key=lambda path: [int(n) if n.isdigit() else n for n in re.split(r"(\d+)", path.name)])
    if not ordered:
        raise FileNotFoundError(f"can't find {pattern} files in directory '{checkpoint_dir}'")
    return [str(path) for path in ordered]


def get_optim_files(checkpoint_dir: str) -> list[str]:
    """The optimizer's files, by rank."""
    return _files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: str) -> list[str]:
    """The model's files, by rank."""
    return _files(checkpoint_dir, "*_model_states.pt")


def get_model_state_file(checkpoint_dir: str, zero_stage: int) -> str:
    """The model's file of the first rank."""
    if not Path(checkpoint_dir).is_dir():
        raise FileNotFoundError(f"Directory '{checkpoint_dir}' doesn't exist")
    name = "mp_rank_00_model_states.pt" if zero_stage <= 2 else "zero_pp_rank_0_mp_rank_00_model_states.pt"
    path = Path(checkpoint_dir) / name
    if not path.exists():
        raise FileNotFoundError(f"can't find model states file at '{path}'")
    return str(path)


def parse_optim_states(files: Sequence[str], ds_checkpoint_dir: str) -> tuple[int, int, list[Any]]:
    """(stage, ranks, each rank's flat fp32 tensors)."""
    with reading(ds_checkpoint_dir):
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


if __name__ == "__main__":
    main()
