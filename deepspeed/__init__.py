"""Train and serve models that are larger than your GPUs, with one JSON file and no change to the model.

This file is the API: what `__all__` names is public, everything else may move. Names are resolved on first use, so
that `import deepspeed` costs little more than `import torch`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

# The check for CUDA must not create a context: a fork later in the program would then fail.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

from deepspeed._package import (
    __git_branch__,
    __git_hash__,
    __version__,
    __version_major__,
    __version_minor__,
    __version_patch__,
    lazy,
    require_torch,
    without_collection,
)

with without_collection():  # a tenth of the time of a cold start
    import torch  # the environment variable comes first

    require_torch(torch.__version__)

from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError
from deepspeed.log import log_dist, logger
from deepspeed.published import finder

if TYPE_CHECKING:
    from deepspeed import accelerator, comm, inference, moe, ops, parallel, pipe, runtime, tensor_parallel, utils, zero
    from deepspeed import comm as dist
    from deepspeed._api import (
        DeepSpeedOptimizerCallable,
        DeepSpeedSchedulerCallable,
        add_config_arguments,
        initialize,
    )
    from deepspeed.accelerator import get_accelerator
    from deepspeed.comm import init_distributed
    from deepspeed.config import DeepSpeedConfig
    from deepspeed.config.inference import DeepSpeedInferenceConfig
    from deepspeed.hybrid.engine import DeepSpeedHybridEngine
    from deepspeed.inference.engine import InferenceEngine, default_inference_config, init_inference
    from deepspeed.inference.modules import replace_transformer_layer
    from deepspeed.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer
    from deepspeed.pipe.engine import DualPipeVEngine, DualPipeVModule, PipelineEngine
    from deepspeed.pipe.module import PipelineModule
    from deepspeed.published.init_on_device import OnDevice
    from deepspeed.published.runtime_names import HAS_TRITON
    from deepspeed.runtime.activation_checkpointing import checkpointing
    from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
    from deepspeed.runtime.dataloader import DeepSpeedDataLoader
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.tensor_parallel.model_init import set_autotp_mode, tp_model_init
    from deepspeed.verify.replay import replay

# name → module, or module:attribute; imported when first asked for
_LAZY = {
    "DeepSpeedConfig": "deepspeed.config:DeepSpeedConfig",
    "DeepSpeedDataLoader": "deepspeed.runtime.dataloader:DeepSpeedDataLoader",
    "DeepSpeedEngine": "deepspeed.runtime.engine:DeepSpeedEngine",
    "DeepSpeedHybridEngine": "deepspeed.hybrid.engine:DeepSpeedHybridEngine",
    "DeepSpeedInferenceConfig": "deepspeed.config.inference:DeepSpeedInferenceConfig",
    "DeepSpeedOptimizer": "deepspeed.runtime.base_optimizer:DeepSpeedOptimizer",
    "DeepSpeedOptimizerCallable": "deepspeed._api:DeepSpeedOptimizerCallable",
    "DeepSpeedSchedulerCallable": "deepspeed._api:DeepSpeedSchedulerCallable",
    "DeepSpeedTransformerConfig": "deepspeed.ops.transformer:DeepSpeedTransformerConfig",
    "DeepSpeedTransformerLayer": "deepspeed.ops.transformer:DeepSpeedTransformerLayer",
    "DualPipeVEngine": "deepspeed.pipe.engine:DualPipeVEngine",
    "DualPipeVModule": "deepspeed.pipe.engine:DualPipeVModule",
    "HAS_TRITON": "deepspeed.published.runtime_names:HAS_TRITON",
    "InferenceEngine": "deepspeed.inference.engine:InferenceEngine",
    "PipelineEngine": "deepspeed.pipe.engine:PipelineEngine",
    "PipelineModule": "deepspeed.pipe.module:PipelineModule",
    "OnDevice": "deepspeed.published.init_on_device:OnDevice",
    "accelerator": "deepspeed.accelerator",
    "add_config_arguments": "deepspeed._api:add_config_arguments",
    "checkpointing": "deepspeed.runtime.activation_checkpointing.checkpointing",
    "comm": "deepspeed.comm",
    "default_inference_config": "deepspeed.inference.engine:default_inference_config",
    "dist": "deepspeed.comm",
    "get_accelerator": "deepspeed.accelerator:get_accelerator",
    "inference": "deepspeed.inference",
    "init_distributed": "deepspeed.comm:init_distributed",
    "init_inference": "deepspeed.inference.engine:init_inference",
    "initialize": "deepspeed._api:initialize",
    "moe": "deepspeed.moe",
    "ops": "deepspeed.ops",
    "runtime": "deepspeed.runtime",
    "set_autotp_mode": "deepspeed.tensor_parallel.model_init:set_autotp_mode",
    "tensor_parallel": "deepspeed.tensor_parallel",
    "tp_model_init": "deepspeed.tensor_parallel.model_init:tp_model_init",
    "parallel": "deepspeed.parallel",
    "replay": "deepspeed.verify:replay",
    "replace_transformer_layer": "deepspeed.inference.modules:replace_transformer_layer",
    "pipe": "deepspeed.pipe",
    "git_branch": "deepspeed.published.git_version_info:git_branch",
    "git_hash": "deepspeed.published.git_version_info:git_hash",
    "utils": "deepspeed.utils",
    "version": "deepspeed.published.git_version_info:version",
    "zero": "deepspeed.zero",
}

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500

__all__ = [
    "HAS_TRITON",
    "TORCH_DISTRIBUTED_DEFAULT_PORT",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedDataLoader",
    "DeepSpeedEngine",
    "DeepSpeedError",
    "DeepSpeedHybridEngine",
    "DeepSpeedInferenceConfig",
    "DeepSpeedOptimizer",
    "DeepSpeedOptimizerCallable",
    "DeepSpeedSchedulerCallable",
    "DeepSpeedTransformerConfig",
    "DeepSpeedTransformerLayer",
    "DualPipeVEngine",
    "DualPipeVModule",
    "InferenceEngine",
    "OnDevice",
    "PipelineEngine",
    "PipelineModule",
    "__git_branch__",
    "__git_hash__",
    "__version__",
    "__version_major__",
    "__version_minor__",
    "__version_patch__",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "default_inference_config",
    "dist",
    "get_accelerator",
    "inference",
    "init_distributed",
    "init_inference",
    "initialize",
    "log_dist",
    "logger",
    "moe",
    "ops",
    "parallel",
    "pipe",
    "replace_transformer_layer",
    "replay",
    "runtime",
    "set_autotp_mode",
    "tensor_parallel",
    "tp_model_init",
    "utils",
    "zero",
]

__getattr__ = lazy(__name__, _LAZY)

finder.install()


def __dir__() -> list[str]:
    return sorted(__all__)
