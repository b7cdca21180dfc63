"""The files of a pipeline's layers: each a state dict whose names begin where the layer does."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from deepspeed.checkpoint.formats.checked_files import Opened, Opener
from deepspeed.checkpoint.formats.rank_files import Host
from deepspeed.checkpoint.formats.training_state import TrainingState
from deepspeed.checkpoint.formats.zero_files.experts import layer_of
from deepspeed.checkpoint.formats.zero_files.file_names import layer_file
from deepspeed.errors import CheckpointError

_NUMBER = re.compile(r"layer_(\d+)-(?:model_(\d+)-)?model_states\.pt")


def layer_files(state: TrainingState, host: Host) -> dict[str, Any]:
    """What this rank writes of its layers; experts lie in files of their own."""
    experts = {} if state.experts is None else state.experts.layers
    slices = state.mp_size // state.pp_size
    part = state.mp_rank % slices if slices > 1 else None
    found: dict[str, Any] = {}
    for number, prefix in state.layers.here.items() if state.layers is not None else ():
        found[layer_file(number, part)] = OrderedDict(
            (name.removeprefix(prefix), host.take(tensor))
            for name, tensor in state.module.items()
            if name.startswith(prefix) and layer_of(name) not in experts
        )
    return found


def read_layers(
    names: Iterable[str], opener: Opener, prefixes: Mapping[int, str], tp_rank: int
) -> dict[str, tuple[Tensor, Opened]]:
    """Every tensor of the files by its name in the model, with the file that holds it."""
    found: dict[str, tuple[Tensor, Opened]] = {}
    for file in names:
        match = _NUMBER.fullmatch(file)
        if match is None or int(match[2] or 0) != (tp_rank if match[2] else 0):
            continue
        opened = opener.torch(file, shared=True)
        if not isinstance(opened.state, Mapping):
            raise CheckpointError(f"{opener.directory / file} holds no state dict of a layer")
        prefix = prefixes.get(int(match[1]), f"{int(match[1])}.")
        for name, tensor in opened.state.items():
            if isinstance(tensor, Tensor):
                found[f"{prefix}{name}"] = tensor, opened
    return found
