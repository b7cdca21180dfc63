"""Constants of DeepSpeed's modules that scripts import; `published/old_paths.py` says under which paths."""

from __future__ import annotations

import os

from deepspeed.comm.init import default_timeout

# deepspeed.constants
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
CROSS_RANK, CROSS_SIZE = "CROSS_RANK", "CROSS_SIZE"
default_pg_timeout = default_timeout(os.environ)

# deepspeed.runtime.config
ADAGRAD_OPTIMIZER = "adagrad"
ADAMW_OPTIMIZER = "adamw"
ADAM_OPTIMIZER = "adam"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
MUON_OPTIMIZER = "muon"
ONEBIT_ADAM_OPTIMIZER = "onebitadam"
ONEBIT_LAMB_OPTIMIZER = "onebitlamb"
ZERO_ONE_ADAM_OPTIMIZER = "zerooneadam"

# deepspeed.utils.timer: the names of the engine's timers
FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER = "fwd_microstep", "fwd"
BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER = "bwd_microstep", "bwd"
BACKWARD_INNER_MICRO_TIMER, BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner_microstep", "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce_microstep", "bwd_allreduce"
STEP_MICRO_TIMER, STEP_GLOBAL_TIMER = "step_microstep", "step"

# deepspeed.runtime.activation_checkpointing.checkpointing
_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"

# deepspeed.checkpoint.deepspeed_checkpoint
ARGS_KEY, CHECKPOINT_INFO_KEY = "args", "checkpoint_info"
