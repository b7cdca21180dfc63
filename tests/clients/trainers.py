"""What the tests of Trainer and of the trainers built on it share: one script, plain or with a config."""

from __future__ import annotations

import os
from typing import Any

AUTO_ZERO = {
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
}
AUTO_OPTIMIZER = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
AUTO_SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "total_num_steps": "auto",
        "warmup_type": "linear",
    },
}


def auto(stage: int, *, optimizer: bool = False, scheduler: bool = False, **zero: Any) -> dict[str, Any]:
    """The config of the Transformers documentation: what the client knows already is "auto"."""
    config: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": stage, **AUTO_ZERO, **zero},
    }
    if optimizer:
        config["optimizer"] = AUTO_OPTIMIZER
    if scheduler:
        config["scheduler"] = AUTO_SCHEDULER
    return config


def arguments(folder: Any, kind: Any = None, **options: Any) -> Any:
    """TrainingArguments (or `kind`, a subclass) on the CPU, with nothing written unless asked for."""
    from transformers import TrainingArguments

    forget_clients()
    given = {
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 4,
    }
    return (kind or TrainingArguments)(output_dir=str(folder), **{**given, **options})


def forget_clients() -> None:
    """Let the next trainer of this process choose anew between DeepSpeed and plain PyTorch."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


def column(trainer: Any, name: str = "loss") -> list[float]:
    """One value per logged step."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]
