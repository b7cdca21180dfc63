"""A config tried without a model: the very calls with which `initialize` builds what a config alone describes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.config import DeepSpeedConfig, Loaded
from deepspeed.config.load import FILLED, is_inert, unresolved
from deepspeed.config.schema import Schema
from deepspeed.config.zero import DeepSpeedZeroConfig
from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError, LayoutError
from deepspeed.monitor.monitor import folder_of
from deepspeed.ops.sparse_attention.sparse_self_attention import sparsity_of
from deepspeed.parallel.axes import Axis
from deepspeed.parallel.hierarchy import mics_split
from deepspeed.precision.policy import Precision, make_scale
from deepspeed.runtime.activation_checkpointing.configuration import CheckpointingSettings, given_settings
from deepspeed.runtime.lr_schedules import build_scheduler
from deepspeed.runtime.saving.checkpoints import policy_of
from deepspeed.runtime.step.optimizers import build_optimizer, hold_states, require_tested
from deepspeed.zero.interface import check_size

# The one required parameter that clients fill; no check of another parameter depends on its size.
_FILLED = {"scheduler.params.total_num_steps": 10**9}


@dataclass(frozen=True)
class Verdict:
    """What `initialize` would refuse in a config, and what it would tell."""

    problems: list[str]
    notes: list[str]


def verdict(loaded: Loaded, world_size: int) -> Verdict:
    """Try a loaded config on that many processes; what clients fill is taken for filled."""
    stage = int(loaded.schema.zero_optimization.stage)
    nobody = [path for path in loaded.autos if path not in FILLED and not is_inert(path, stage)]
    problems = [f"{path}: {unresolved(path)}" for path in nobody]
    try:
        config = DeepSpeedConfig(loaded, world_size=world_size, partial=bool(loaded.autos))
    except DeepSpeedConfigError as error:
        return Verdict([*problems, *str(error).splitlines()], [])
    left = {path: is_inert(path, stage) for path in loaded.autos if path not in nobody}
    notes = [
        f'{path}: left at "auto"; '
        + ("it has its default if no client fills it" if inert else "a client must fill it before the engine is built")
        for path, inert in left.items()
    ]
    return Verdict([*problems, *map(str, _refused(config, world_size))], [*config.notes, *notes])


def _refused(config: DeepSpeedConfig, world_size: int) -> Iterator[DeepSpeedError]:
    """The errors of everything that a config describes by itself, each tried apart."""
    schema = config.schema
    attempts: list[Callable[[], Any]] = [
        lambda: make_scale(schema, Precision.from_config(schema)),
        lambda: CheckpointingSettings.of(given_settings(schema.activation_checkpointing)),
        lambda: policy_of(schema.checkpoint),
        lambda: _monitors(schema),
        lambda: _optimizer(schema),
        lambda: _schedule(schema, config.loaded.autos),
        lambda: schema.sparse_attention and sparsity_of(schema.sparse_attention, num_heads=1),
        lambda: _neighbours(schema.zero_optimization, world_size // schema.axis_sizes["tp"]),
    ]
    for attempt in attempts:
        try:
            attempt()
        except (DeepSpeedConfigError, LayoutError) as error:
            yield error


def _neighbours(zero: DeepSpeedZeroConfig, ranks: int) -> None:
    """Sizes that do not divide all ranks cannot divide those that share parameters, such as a stage of a pipeline."""
    if ranks < 2:
        return
    axis = Axis("dp", [tuple(range(ranks))])
    check_size(axis, int(zero.zero_hpz_partition_size))
    if zero.shards_states and zero.mics_shard_size > 0:
        mics_split(axis, int(zero.mics_shard_size))


def _monitors(schema: Schema) -> None:
    for key, section in (("tensorboard", schema.tensorboard), ("csv_monitor", schema.csv_monitor)):
        if section.enabled:
            folder_of(key, section.output_path, section.job_name)


def _optimizer(schema: Schema) -> None:
    if schema.optimizer.type is None:
        return
    named = [("layer.weight", _matrix()), ("layer.bias", nn.Parameter(torch.zeros(2)))]
    made = build_optimizer(schema.optimizer, [param for _, param in named], named_parameters=named)
    if schema.zero_optimization.shards_states:
        require_tested(made, allowed=schema.zero_allow_untested_optimizer)
    hold_states(made, Precision.from_config(schema))


def _matrix() -> nn.Parameter:
    """What every optimizer takes, one for matrices and for attention heads too."""
    param = nn.Parameter(torch.zeros(2, 2))
    param.muon_num_heads = 1  # type: ignore[attr-defined]
    return param


def _schedule(schema: Schema, autos: tuple[str, ...]) -> None:
    """Over a plain optimizer, since an error in the optimizer section is reported by itself."""
    if schema.scheduler.type is None:
        return
    filled = {path.rpartition(".")[2]: value for path, value in _FILLED.items() if path in autos}
    section = schema.scheduler.model_copy(update={"params": {**schema.scheduler.params, **filled}})
    # A list has a value for each parameter group; how many there are, only the script knows.
    groups = max((len(value) for value in section.params.values() if isinstance(value, (list, tuple))), default=1)
    build_scheduler(section, torch.optim.AdamW([{"params": [_matrix()]} for _ in range(groups or 1)], lr=1e-3))
