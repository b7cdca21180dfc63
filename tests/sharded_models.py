"""Models made in shards: a config for them, their whole values, a few steps."""

from __future__ import annotations

import torch.distributed as dist

import deepspeed
from deepspeed import zero
from tests.models import batches, share

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}


def settings(precision="fp32", stage=3, **zero_keys):
    section = {} if precision == "fp32" else {precision: {"enabled": True}}
    return {
        "train_micro_batch_size_per_gpu": 12 // dist.get_world_size(),
        "optimizer": ADAMW,
        "gradient_clipping": 0.3,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero_keys},
        **section,
    }


def whole(module):
    with zero.GatheredParameters(module.parameters()):
        return {name: param.detach().clone() for name, param in module.named_parameters()}


def train(model, config, steps=3):
    engine, *_ = deepspeed.initialize(model=model, config=config)
    losses = []
    for batch in batches(steps, 12):
        loss = engine(*share(batch, dist.get_rank(), dist.get_world_size()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, whole(engine.module), engine
