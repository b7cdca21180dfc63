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

# deepspeed.comm.constants
NCCL_BACKEND, CCL_BACKEND, MPI_BACKEND, GLOO_BACKEND = "nccl", "ccl", "mpi", "gloo"

# deepspeed.launcher.constants
PDSH_LAUNCHER, PDSH_MAX_FAN_OUT = "pdsh", 1024
OPENMPI_LAUNCHER, MPICH_LAUNCHER, IMPI_LAUNCHER = "openmpi", "mpich", "impi"
SLURM_LAUNCHER, MVAPICH_LAUNCHER = "slurm", "mvapich"

# deepspeed.elasticity.constants
ELASTICITY, ENABLED = "elasticity", "enabled"
MAX_ACCEPTABLE_BATCH_SIZE, MICRO_BATCHES = "max_train_batch_size", "micro_batch_sizes"
MIN_GPUS, MAX_GPUS, NUM_GPUS_PER_NODE = "min_gpus", "max_gpus", "num_gpus_per_node"
MODEL_PARALLEL_SIZE, MIN_TIME, VERSION = "model_parallel_size", "min_time", "version"
PREFER_LARGER_BATCH, IGNORE_NON_ELASTIC_BATCH_INFO = "prefer_larger_batch", "ignore_non_elastic_batch_info"
LATEST_ELASTICITY_VERSION, MINIMUM_DEEPSPEED_VERSION = 0.2, "0.3.8"
DEEPSPEED_ELASTICITY_CONFIG = "DEEPSPEED_ELASTICITY_CONFIG"

# deepspeed.runtime.activation_checkpointing.checkpointing
_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"

# deepspeed.checkpoint.deepspeed_checkpoint
ARGS_KEY, CHECKPOINT_INFO_KEY = "args", "checkpoint_info"
