"""The names of config keys as constants, and their defaults, which the schema knows: NAME and NAME_DEFAULT."""

from __future__ import annotations

from functools import reduce
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from deepspeed.config.schema import Schema
from deepspeed.runtime.dataloader import ROUTE_EVAL, ROUTE_PREDICT, ROUTE_TRAIN

__all__ = ["CONSTANTS", "ROUTE_EVAL", "ROUTE_PREDICT", "ROUTE_TRAIN"]

# constant → where the key lies in the config; the constant is the last word of it
_KEYS: dict[str, str] = {
    "BFLOAT16": "bf16",
    "BFLOAT16_CHECK_OVERFLOW": "bf16.check_grad_overflow",
    "BFLOAT16_ENABLED": "bf16.enabled",
    "BFLOAT16_IMMEDIATE_GRAD_UPDATE": "bf16.immediate_grad_update",
    "BFLOAT16_MASTER_WEIGHTS_AND_GRADS": "bf16.bf16_master_weights_and_grads",
    "BFLOAT16_OPTIMIZER_STATES": "bf16.bf16_optimizer_states",
    "CHECKPOINT": "checkpoint",
    "CHECKPOINT_PARALLEL_WRITE": "checkpoint.parallel_write",
    "CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE": "checkpoint.parallel_write.pipeline_stage",
    "CHECKPOINT_TAG_VALIDATION": "checkpoint.tag_validation",
    "COMMUNICATION_DATA_TYPE": "communication_data_type",
    "DATALOADER_DROP_LAST": "dataloader_drop_last",
    "DATA_TYPES": "data_types",
    "DISABLE_ALLGATHER": "disable_allgather",
    "DISABLE_PYTHON_GC": "disable_python_gc",
    "DUMP_STATE": "dump_state",
    "FP16": "fp16",
    "FP16_AUTO_CAST": "fp16.auto_cast",
    "FP16_CONSECUTIVE_HYSTERESIS": "fp16.consecutive_hysteresis",
    "FP16_ENABLED": "fp16.enabled",
    "FP16_HYSTERESIS": "fp16.hysteresis",
    "FP16_INITIAL_SCALE_POWER": "fp16.initial_scale_power",
    "FP16_LOSS_SCALE": "fp16.loss_scale",
    "FP16_LOSS_SCALE_WINDOW": "fp16.loss_scale_window",
    "FP16_MASTER_WEIGHTS_AND_GRADS": "fp16.fp16_master_weights_and_grads",
    "FP16_MIN_LOSS_SCALE": "fp16.min_loss_scale",
    "GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "GRADIENT_ALLREDUCE_OP": "gradient_allreduce_op",
    "GRADIENT_CLIPPING": "gradient_clipping",
    "GRADIENT_PREDIVIDE_FACTOR": "gradient_predivide_factor",
    "GRAD_ACCUM_DTYPE": "data_types.grad_accum_dtype",
    "LOAD_UNIVERSAL_CHECKPOINT": "checkpoint.load_universal",
    "LOG_LEVEL": "log_level",
    "MANAGED_GRADIENT_ACCUMULATION": "managed_gradient_accumulation",
    "MEMORY_BREAKDOWN": "memory_breakdown",
    "OPTIMIZER": "optimizer",
    "PRESCALE_GRADIENTS": "prescale_gradients",
    "SCHEDULER": "scheduler",
    "SEQ_PARALLEL_COMMUNICATION_DATA_TYPE": "seq_parallel_communication_data_type",
    "STEPS_PER_PRINT": "steps_per_print",
    "TORCH_AUTOCAST": "torch_autocast",
    "TORCH_AUTOCAST_DTYPE": "torch_autocast.dtype",
    "TORCH_AUTOCAST_ENABLED": "torch_autocast.enabled",
    "TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES": "torch_autocast.lower_precision_safe_modules",
    "TRAIN_BATCH_SIZE": "train_batch_size",
    "TRAIN_MICRO_BATCH_SIZE_PER_GPU": "train_micro_batch_size_per_gpu",
    "USE_DATA_BEFORE_EXPERT_PARALLEL": "use_data_before_expert_parallelism",
    "USE_NODE_LOCAL_STORAGE_CHECKPOINT": "checkpoint.use_node_local_storage",
    "VOCABULARY_SIZE": "vocabulary_size",
    "WALL_CLOCK_BREAKDOWN": "wall_clock_breakdown",
    "ZERO_ALLOW_UNTESTED_OPTIMIZER": "zero_allow_untested_optimizer",
    "ZERO_FORCE_DS_CPU_OPTIMIZER": "zero_force_ds_cpu_optimizer",
}
_WORDS: dict[str, Any] = {
    "ADAGRAD_OPTIMIZER": "adagrad",
    "ADAMW_OPTIMIZER": "adamw",
    "ADAM_OPTIMIZER": "adam",
    "ADAM_W_MODE": "adam_w_mode",
    "ADAM_W_MODE_DEFAULT": True,
    "BFLOAT16_OLD": "bfloat16",
    "LAMB_OPTIMIZER": "lamb",
    "LEGACY_FUSION": "legacy_fusion",
    "LION_OPTIMIZER": "lion",
    "MAX_GRAD_NORM": "max_grad_norm",
    "MUADAMW_OPTIMIZER": "muadamw",
    "MUADAM_OPTIMIZER": "muadam",
    "MUON_OPTIMIZER": "muon",
    "MUSGD_OPTIMIZER": "musgd",
    "OPTIMIZER_PARAMS": "params",
    "SCHEDULER_PARAMS": "params",
    "TORCH_ADAM_PARAM": "torch_adam",
    "TYPE": "type",
}


def _default(path: str) -> Any:
    """What the schema says if the key is not given; a section is no value and has none."""

    def inner(model: type[BaseModel], name: str) -> type[BaseModel]:
        annotation = model.model_fields[name].annotation
        assert isinstance(annotation, type), f"{name} is a section"
        return annotation

    *sections, key = path.split(".")
    field = reduce(inner, sections, Schema).model_fields[key]  # type: ignore[arg-type]
    return field.default


def _constants() -> dict[str, Any]:
    defaults = {f"{name}_DEFAULT": _default(path) for name, path in _KEYS.items()}
    return {
        **_WORDS,
        **{name: path.rpartition(".")[2] for name, path in _KEYS.items()},
        **{name: value for name, value in defaults.items() if value is not PydanticUndefined},
    }


CONSTANTS: dict[str, Any] = _constants()


def __getattr__(name: str) -> Any:
    if name in CONSTANTS:
        return CONSTANTS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
