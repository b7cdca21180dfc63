"""The value "auto": which client replaces it, and from what, for the error when nobody did."""

from __future__ import annotations

__all__ = ["is_filled", "is_inert", "unresolved"]

_TRAINER = "Transformers' Trainer"
_BOTH = f"{_TRAINER} and Accelerate"

_FILLED: dict[str, str] = {
    "train_micro_batch_size_per_gpu": f"{_BOTH} fill it from the per-device batch size",
    "gradient_accumulation_steps": f"{_BOTH} fill it from their own gradient_accumulation_steps",
    "train_batch_size": f"{_BOTH} compute it from the other two batch keys and the number of processes",
    "gradient_clipping": f"{_TRAINER} fills it from max_grad_norm, Accelerate from gradient_clipping",
    "optimizer.params.lr": f"{_TRAINER} fills it from learning_rate, Accelerate from DummyOptim",
    "optimizer.params.betas": f"{_TRAINER} fills it from adam_beta1 and adam_beta2",
    "optimizer.params.eps": f"{_TRAINER} fills it from adam_epsilon",
    "optimizer.params.weight_decay": f"{_TRAINER} fills it from weight_decay, Accelerate from DummyOptim",
    "scheduler.params.warmup_min_lr": f"{_BOTH} set it to 0",
    "scheduler.params.warmup_max_lr": f"{_BOTH} fill it from the learning rate",
    "scheduler.params.warmup_num_steps": f"{_BOTH} fill it from the warm-up steps",
    "scheduler.params.total_num_steps": f"{_BOTH} fill it from the length of the training",
    "fp16.enabled": f"{_TRAINER} fills it from fp16, Accelerate from mixed_precision",
    "bf16.enabled": f"{_TRAINER} fills it from bf16, Accelerate from mixed_precision",
    "zero_optimization.stage": "Accelerate fills it from its zero_stage",
    "zero_optimization.reduce_bucket_size": f"{_BOTH} compute it from the model's hidden size",
    "zero_optimization.stage3_prefetch_bucket_size": f"{_BOTH} compute it from the model's hidden size",
    "zero_optimization.stage3_param_persistence_threshold": f"{_BOTH} compute it from the model's hidden size",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "Accelerate fills it from zero3_save_16bit_model",
    "zero_optimization.offload_optimizer.device": "Accelerate fills it from offload_optimizer_device",
    "zero_optimization.offload_param.device": "Accelerate fills it from offload_param_device",
}


def unresolved(path: str) -> str:
    """What to say of a key that is still "auto" when the engine is built."""
    who = _FILLED.get(path)
    if who is None:
        return 'it is "auto", and nobody fills this key: write a value, or remove the key to get its default'
    return (
        f'it is still "auto": {who} before the engine is built. Build the engine through that client, or write a value.'
    )


def is_filled(path: str) -> bool:
    """True for a key that some client fills."""
    return path in _FILLED


def is_inert(path: str, stage: object) -> bool:
    """True for a key that has no effect at this ZeRO stage; clients leave those at "auto".

    TRL builds engines for reference models from the config as it is before Accelerate has filled it: the flag about
    saving, which such an engine never does, and the bucket size, which stage 0 does not use, are still "auto" there.
    """
    if path == "zero_optimization.stage3_gather_16bit_weights_on_model_save":
        return True
    if path == "zero_optimization.reduce_bucket_size":
        return stage in (None, 0, "0")
    return path.startswith("zero_optimization.stage3_") and stage not in (3, "3")
