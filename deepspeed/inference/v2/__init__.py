"""The engine whose caller schedules: `put` tokens of sequences, get logits. Names are imported on first use."""

from deepspeed._package import lazy

_HOME = "deepspeed.inference.v2.engine_v2"
_LAZY = {
    "InferenceEngineV2": f"{_HOME}:InferenceEngineV2",
    "RaggedInferenceEngineConfig": "deepspeed.config.inference:RaggedInferenceEngineConfig",
    "SchedulingError": f"{_HOME}:SchedulingError",
    "SchedulingResult": f"{_HOME}:SchedulingResult",
    "build_engine_from_ds_checkpoint": f"{_HOME}:build_engine_from_ds_checkpoint",
    "build_hf_engine": f"{_HOME}:build_hf_engine",
}

__all__ = sorted(_LAZY)

__getattr__ = lazy(__name__, _LAZY)
