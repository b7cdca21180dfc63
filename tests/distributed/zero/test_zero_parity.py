"""Every stage against stage 0 and against the same training written out in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import deepspeed
from tests.harness import ranks
from tests.models import PlainLoop, batches, make, share

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def train(stage, precision="fp32", *, steps=3, accumulation=1, clip=0.0, samples=12, **zero):
    """Train on this rank's share; (losses, norms, whole parameters, whole moments)."""
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
    losses, norms = [], []
    data = batches(steps * accumulation, samples)
    for number, batch in enumerate(data):
        loss = engine(*share(batch, rank, world))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
        if (number + 1) % accumulation == 0:
            norms.append(engine.get_global_grad_norm())
    return losses, norms, whole(engine), engine


def whole(engine):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return [param.detach().clone() for param in engine.module.parameters()]


@pytest.mark.parametrize("clip", [0.0, 0.3])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("precision", list(DTYPES))
@ranks(1, 2, 3, 4)
def test_stages_agree(precision, accumulation, clip):
    world = dist.get_world_size()
    base = train(0, precision, accumulation=accumulation, clip=clip)
    loop = PlainLoop(
        make(),
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
        ranks=world,
        steps=accumulation,
        clip=clip,
        param=DTYPES[precision],
        scale=128.0 if precision == "fp16" else 1.0,
    )
    data = batches(3 * accumulation, 12)
    expected = [loop.step(data[step * accumulation : (step + 1) * accumulation]) for step in range(3)]
    for stage in (0, 1, 2, 3):
        losses, norms, params, engine = (
            base if stage == 0 else train(stage, precision, accumulation=accumulation, clip=clip)
        )
        # Summing over micro steps and then over ranks rounds otherwise than the other way round.
        exact = world <= 2 and (accumulation == 1 or stage < 2)
        rough = 1e-6 if precision == "fp32" else 2e-2
        assert losses == pytest.approx(base[0], rel=0 if exact else rough, abs=0)
        assert norms == pytest.approx(base[1], rel=0 if exact else rough, abs=0)
        assert norms == pytest.approx([norm for _, norm in expected], rel=1e-5 if precision == "fp32" else 2e-2)
        for mine, theirs, plain in zip(params, base[2], loop.model.parameters(), strict=True):
            if exact:
                assert torch.equal(mine, theirs), (stage, (mine - theirs).abs().max())
            torch.testing.assert_close(mine, theirs, rtol=rough, atol=rough)
            torch.testing.assert_close(mine, plain, rtol=rough, atol=rough)
        engine.destroy()
