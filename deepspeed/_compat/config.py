"""Functions that read one thing of a config that is a plain dict; the schema answers them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from deepspeed._compat.constants import CONSTANTS
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.inference import HybridEngineConfig
from deepspeed.config.load import load
from deepspeed.config.monitor import DeepSpeedMonitorConfig
from deepspeed.config.parallel import TPTrainingConfig
from deepspeed.config.read import read
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.precision.dtypes import DTYPES

__all__ = [
    "DEEPSPEED_OPTIMIZERS",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedConfigWriter",
    "HybridEngineConfig",
    "get_communication_data_type",
    "get_monitor_config",
    "get_optimizer_gradient_clipping",
    "get_tensor_parallel_config",
    "infer_config_dtype",
    "load_ds_config",
    "tp_group_world_size",
]

DEEPSPEED_OPTIMIZERS = ["adagrad", "adam", "adamw", "lamb", "muadam", "muadamw", "musgd", "lion", "muon"]

# function → path below the schema; `function(param_dict)` is the value there
_READERS: dict[str, str] = {
    "get_bfloat16_config": "bf16",
    "get_checkpoint_params": "checkpoint",
    "get_dataloader_drop_last": "dataloader_drop_last",
    "get_disable_allgather": "disable_allgather",
    "get_disable_python_gc": "disable_python_gc",
    "get_dump_state": "dump_state",
    "get_expert_data_topo_config": "use_data_before_expert_parallelism",
    "get_expert_parallel_config": "expert_parallel",
    "get_gradient_accumulation_steps": "gradient_accumulation_steps",
    "get_gradient_clipping": "gradient_clipping",
    "get_gradient_predivide_factor": "gradient_predivide_factor",
    "get_hybrid_engine_config": "hybrid_engine",
    "get_log_level": "log_level",
    "get_lower_precision_safe_modules": "torch_autocast.lower_precision_safe_modules",
    "get_managed_gradient_accumulation": "managed_gradient_accumulation",
    "get_memory_breakdown": "memory_breakdown",
    "get_pipeline_config": "pipeline",
    "get_prescale_gradients": "prescale_gradients",
    "get_steps_per_print": "steps_per_print",
    "get_torch_autocast_dtype": "torch_autocast.dtype",
    "get_torch_autocast_enabled": "torch_autocast.enabled",
    "get_train_batch_size": "train_batch_size",
    "get_train_micro_batch_size_per_gpu": "train_micro_batch_size_per_gpu",
    "get_wall_clock_breakdown": "wall_clock_breakdown",
    "get_zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "get_zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
}
_OF_SECTIONS: dict[str, tuple[str, str]] = {
    "get_optimizer_legacy_fusion": ("optimizer", "legacy_fusion"),
    "get_optimizer_name": ("optimizer", "type"),
    "get_optimizer_params": ("optimizer", "params"),
    "get_scheduler_name": ("scheduler", "type"),
    "get_scheduler_params": ("scheduler", "params"),
}


def _schema(param_dict: dict[str, Any]) -> Any:
    """The whole dict, checked; it may be incomplete, and may still hold "auto"."""
    return load(param_dict, partial=True).schema


def _read(path: str, param_dict: dict[str, Any]) -> Any:
    return attrgetter(path)(_schema(param_dict))


def _of_section(section: str, key: str, param_dict: dict[str, Any]) -> Any:
    """The value in a section that need not be there; None then."""
    return getattr(getattr(_schema(param_dict), section), key, None)


def __getattr__(name: str) -> Any:
    # Also the names of the keys: this module was where scripts found them, too.
    made: Callable[[dict[str, Any]], Any]
    if name in CONSTANTS:
        return CONSTANTS[name]
    if name in _READERS:
        made = partial(_read, _READERS[name])
    elif name in _OF_SECTIONS:
        made = partial(_of_section, *_OF_SECTIONS[name])
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = made
    return made


def get_monitor_config(param_dict: dict[str, Any]) -> DeepSpeedMonitorConfig:
    """The sections of the four monitors."""
    schema = _schema(param_dict)
    return DeepSpeedMonitorConfig(
        tensorboard=schema.tensorboard, comet=schema.comet, wandb=schema.wandb, csv_monitor=schema.csv_monitor
    )


def get_tensor_parallel_config(ds_config: dict[str, Any]) -> TPTrainingConfig:
    """The section `tensor_parallel`."""
    section: TPTrainingConfig = _schema(ds_config).tensor_parallel
    return section


def infer_config_dtype(config_dict: dict[str, Any]) -> torch.dtype | None:
    """What a config makes of a model's parameters; None where it says nothing of them."""
    schema = _schema(config_dict)
    enabled = {torch.bfloat16: schema.bf16.enabled, torch.float16: schema.fp16.enabled}
    return next((dtype for dtype, on in enabled.items() if on is True), None)


def load_ds_config(config: str | dict[str, Any]) -> dict[str, Any]:
    """A config as a dict of its own: of a dict, a file or the base64 of one."""
    return read(config)[0]


def tp_group_world_size(tp_group: Any, dist_module: Any) -> int | None:
    """How many ranks a group has, by `dist_module`; None without a group."""
    return None if tp_group is None else int(dist_module.get_world_size(tp_group))


def get_optimizer_gradient_clipping(param_dict: dict[str, Any]) -> float | None:
    """`max_grad_norm` among the optimizer's arguments; None if it is not there."""
    params = param_dict.get("optimizer", {}).get("params", {})
    found: float | None = params.get("max_grad_norm")
    return found


def get_communication_data_type(
    param_dict: dict[str, Any], comm_type: str = "communication_data_type", comm_data_type_default: Any = None
) -> Any:
    """The dtype that a key names; the default if it is not given."""
    found = param_dict.get(comm_type)
    if found is None:
        return comm_data_type_default
    if found not in DTYPES:
        raise DeepSpeedConfigError(
            f"{comm_type} is {found!r}; expected one of {', '.join(sorted(DTYPES))}", path=comm_type
        )
    return DTYPES[found]


class DeepSpeedConfigWriter:
    """A config that is put together key by key and written as JSON."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data = {} if data is None else data

    def add_config(self, key: str, value: Any) -> None:
        """Set one key."""
        self.data[key] = value

    def load_config(self, filename: str) -> None:
        """Begin with what a file holds; a key that stands there twice is an error."""
        self.data, _ = read(filename)

    def write_config(self, filename: str) -> None:
        """Write the file."""
        with open(filename, "w", encoding="utf-8") as file:
            json.dump(self.data, file)
