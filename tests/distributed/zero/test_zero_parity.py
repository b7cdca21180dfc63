"""Every stage against the same training written out in plain PyTorch."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist

import deepspeed
from tests.closeness import Training, assert_same_training
from tests.covering import triples
from tests.harness import shared_ranks
from tests.models import PlainLoop, batches, make, share
from tests.user_models import whole

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def train(stage, precision="fp32", *, steps=3, accumulation=1, clip=0.0, samples=12, **zero):
    """Train on this rank's share."""
    rank, world = dist.get_rank(), dist.get_world_size()
    section = {} if precision == "fp32" else {precision: {"enabled": True}}
    if precision == "fp16":
        section["fp16"]["loss_scale"] = 128.0
    engine, *_ = deepspeed.initialize(
        model=make(),
        config={
            "train_micro_batch_size_per_gpu": samples // world,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": clip,
            "optimizer": ADAMW,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
            **section,
        },
    )
    before, losses, norms = whole(engine), [], []
    data = batches(steps * accumulation, samples)
    for step in range(steps):
        total = torch.zeros((), dtype=torch.float64)
        for batch in data[step * accumulation : (step + 1) * accumulation]:
            loss = engine(*share(batch, rank, world))
            engine.backward(loss)
            engine.step()
            total += loss.item()
        dist.all_reduce(total)
        losses.append(total.item() / world / accumulation)
        norms.append(engine.get_global_grad_norm())
    after = whole(engine)
    engine.destroy()
    return Training(before, after, losses, norms)


@cache
def train_plainly(precision, *, accumulation, clip):
    loop = PlainLoop(
        make(),
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
        ranks=dist.get_world_size(),
        steps=accumulation,
        clip=clip,
        param=DTYPES[precision],
        scale=128.0 if precision == "fp16" else 1.0,
    )
    before = {name: param.detach().clone() for name, param in loop.model.named_parameters()}
    data = batches(3 * accumulation, 12)
    told = [loop.step(data[step * accumulation : (step + 1) * accumulation]) for step in range(3)]
    after = {name: param.detach() for name, param in loop.model.named_parameters()}
    return Training(before, after, [loss for loss, _ in told], [norm for _, norm in told])


WORLDS = (1, 2, 3)
CASES = triples(WORLDS, (0, 1, 2, 3), list(DTYPES), (1, 3), (0.0, 0.3))


@pytest.mark.parametrize("precision", list(DTYPES))
@shared_ranks(*WORLDS)
def test_stages_agree(precision):
    for world, stage, kind, accumulation, clip in CASES:
        if (world, kind) == (dist.get_world_size(), precision):
            plain = train_plainly(precision, accumulation=accumulation, clip=clip)
            assert_same_training(train(stage, precision, accumulation=accumulation, clip=clip), plain)
