"""Valid configs and random damage to them: wrong values, misspelt keys, sections in the wrong place."""

from __future__ import annotations

import copy
import random

from deepspeed.config.model import walk
from deepspeed.config.schema import Schema

VALID = [
    {"train_batch_size": 8},
    {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "fp16": {"enabled": True, "initial_scale_power": 12},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "stage3_max_live_parameters": 1e9},
    },
    {
        "train_batch_size": 16,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}, "leaf_module": {"names": ["a"]}},
        "tensorboard": {"enabled": True, "output_path": "runs"},
        "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 4},
        "comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]},
        "flops_profiler": {"enabled": False, "top_modules": 3},
        "pipeline": {"stages": "auto"},
        "checkpoint": {"tag_validation": "Warn", "parallel_write": {"pipeline_stage": True}},
        "data_types": {"grad_accum_dtype": "fp32"},
        "tensor_parallel": {"partition_config": {"layer_specs": [{"patterns": ["a"], "partition_type": "row"}]}},
        "autotuning": {"enabled": False, "arg_mappings": {"train_micro_batch_size_per_gpu": "--bs"}},
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}},
        "elasticity": {"enabled": False, "micro_batch_sizes": [2, 4]},
    },
]

_BATCH = {"train_micro_batch_size_per_gpu": 2}
_OPTIMIZERS = [
    {"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": False, "weight_decay": 0.1, "bias_correction": True}},
    {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "foreach": False, "amsgrad": True}},
    {"type": "Lion", "params": {"lr": 1e-4, "betas": [0.9, 0.99], "set_grad_none": True}},
    {"type": "Lamb", "params": {"lr": 1e-3, "max_coeff": 10.0, "min_coeff": 0.1, "eps_inside_sqrt": True}},
    {"type": "Adagrad", "params": {"lr": 1e-2, "lr_decay": 0.1, "initial_accumulator_value": 0.1}},
    {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 1e-3, "momentum": 0.9, "ns_method": "standard"}},
    {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "dampening": 0}},
    {"type": "RMSprop", "params": {"lr": 0.1, "alpha": 0.9, "centered": True}},
]
_SCHEDULES = [
    {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": [1e-3], "warmup_type": "linear"}},
    {"type": "WarmupDecayLR", "params": {"total_num_steps": 50, "warmup_num_steps": 5, "last_batch_iteration": 3}},
    {"type": "WarmupCosineLR", "params": {"total_num_steps": 50, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.01}},
    {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 5}},
    {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_stair_count": 2}},
    {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1, "decay_step_size": 3, "cycle_min_mom": 0.5}},
    {"type": "StepLR", "params": {"step_size": 3, "gamma": 0.5}},
    {"type": "CosineAnnealingLR", "params": {"T_max": 10, "eta_min": 0}},
]
_SECTIONS = [
    {"fp16": {"enabled": True, "loss_scale": 128, "auto_cast": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    {"fp16": {"enabled": True, "hysteresis": 1, "min_loss_scale": 2}, "data_types": {"buffer_dtype": "fp16"}},
    {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
        "zero_optimization": {"stage": 2, "round_robin_gradients": True, "allgather_bucket_size": 64},
    },
    {"torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]}},
    {
        "zero_optimization": {
            "stage": 3,
            "leaf_module": {"names": ["up"], "classes": []},
            "stage3_module_granularity_threshold": 3,
            "stage3_param_persistence_threshold": 0,
        }
    },
    {"csv_monitor": {"enabled": True, "output_path": "runs", "job_name": "a"}, "steps_per_print": 2},
    {"wall_clock_breakdown": True, "memory_breakdown": True, "timers": {"throughput": {"enabled": True}}},
    {"checkpoint": {"writer": {"type": "PYTHON", "io_buffer_size": 1024}, "keep_last": 2, "rank_wait": 1.0}},
    {"activation_checkpointing": {"partition_activations": True, "number_checkpoints": 2, "profile": True}},
    {"gradient_predivide_factor": 2.0, "prescale_gradients": True, "communication_data_type": "fp32"},
    {"data_parallel_size": 1, "sequence_parallel_size": 1, "log_level": "Error", "vocabulary_size": 17},
]
TRAINABLE = [
    *({**_BATCH, "optimizer": each, "zero_optimization": {"stage": n % 3}} for n, each in enumerate(_OPTIMIZERS)),
    *({**_BATCH, "optimizer": _OPTIMIZERS[0], "scheduler": each} for each in _SCHEDULES),
    *({**_BATCH, "optimizer": _OPTIMIZERS[0], **each} for each in _SECTIONS),
]
"""Small ones that train as they are, where what is damaged reaches the optimizer, the schedule and the shards."""

JUNK = [None, True, False, 0, -1, 1, 3.5, 1e30, float("inf"), float("nan"), "", "auto", "cpu", "x" * 300, [], [1, "a"]]
JUNK += [{}, {"a": {"b": 1}}, {"enabled": "yes"}, object(), (1, 2), b"bytes", {"type": []}, [[]], {"": 1}, 10**400, {1}]
NAMES = [*sorted({path.split(".")[-1] for path, _ in walk(Schema)}), "", " ", "_x", "stage.3", "a.b.c", "$schema"]


def containers(config):
    """Every object and list inside a config, itself included."""
    found, stack = [], [config]
    while stack:
        here = stack.pop()
        if isinstance(here, (dict, list)):
            found.append(here)
            stack.extend(here.values() if isinstance(here, dict) else here)
    return found


def junk(rng: random.Random):
    return copy.deepcopy(rng.choice(JUNK))


def mutate(config, rng: random.Random, most=4):
    """A copy with 1 to `most` random changes."""
    config = copy.deepcopy(config)
    for _ in range(rng.randint(1, most)):
        here = rng.choice(containers(config))
        if isinstance(here, list):
            here.insert(rng.randint(0, len(here)), junk(rng))
            continue
        name = rng.choice([*here, rng.choice(NAMES)]) if here else rng.choice(NAMES)
        action = rng.randrange(5)
        if action == 0:
            here.pop(name, None)
        elif action == 1 and name:
            cut = rng.randrange(len(name))
            here[name[:cut] + rng.choice("abx_1") + name[cut + 1 :]] = here.pop(name, junk(rng))
        elif action == 2:
            here[name] = copy.deepcopy(rng.choice(VALID))
        else:
            here[name] = junk(rng)
    return config
