"""The engine against the same training written out in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import deepspeed
from tests.closeness import Training, assert_same_training
from tests.harness import shared_ranks
from tests.models import PlainLoop, batches, make, share

OPTIMIZERS = {
    "AdamW": ({"lr": 1e-2, "weight_decay": 0.1}, lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1)),
    "SGD": ({"lr": 0.5, "momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9)),
    "Adagrad": ({"lr": 0.1}, lambda p: torch.optim.Adagrad(p, lr=0.1)),
}


def train(config, *, steps=3, accumulation=1, samples=12):
    """Train an engine; the training and the engine."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = make()
    config = {
        "train_micro_batch_size_per_gpu": samples // world,
        "gradient_accumulation_steps": accumulation,
        **config,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    before = parameters(model)
    data = batches(steps * accumulation, samples)
    losses, norms = [], []
    for step in range(steps):
        window = data[step * accumulation : (step + 1) * accumulation]
        total = 0.0
        for batch in window:
            loss = engine(*share(batch, rank, world))
            total += loss.item()
            engine.backward(loss)
            engine.step()
        mean = torch.tensor(total / accumulation, dtype=torch.float64)
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
        norms.append(engine.get_global_grad_norm())
    return Training(before, parameters(model), losses, norms), engine


def parameters(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def reference(name, *, steps=3, accumulation=1, samples=12, **options):
    loop = PlainLoop(make(), OPTIMIZERS[name][1], ranks=dist.get_world_size(), steps=accumulation, **options)
    before = parameters(loop.model)
    data = batches(steps * accumulation, samples)
    results = [loop.step(data[step * accumulation : (step + 1) * accumulation]) for step in range(steps)]
    return Training(before, parameters(loop.model), [loss for loss, _ in results], [norm for _, norm in results])


@pytest.mark.parametrize("clip", [0.0, 0.3])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
@shared_ranks(1, 3)
def test_fp32(name, accumulation, clip):
    config = {"optimizer": {"type": name, "params": OPTIMIZERS[name][0]}, "gradient_clipping": clip}
    found, engine = train(config, accumulation=accumulation)
    assert_same_training(found, reference(name, accumulation=accumulation, clip=clip))
    assert engine.global_steps == 3
    assert engine.micro_steps == 3 * accumulation
    assert engine.global_samples == 3 * accumulation * 12


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@shared_ranks(1, 2)
def test_16_bit(precision, accumulation, wide):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    section = {"enabled": True, **({"loss_scale": 128.0} if precision == "fp16" else {})}
    config = {
        "optimizer": {"type": "SGD", "params": OPTIMIZERS["SGD"][0]},
        "gradient_clipping": 0.3,
        precision: section,
        **({"data_types": {"grad_accum_dtype": "fp32"}} if wide else {}),
    }
    found, engine = train(config, accumulation=accumulation)
    expected = reference(
        "SGD",
        accumulation=accumulation,
        clip=0.3,
        param=dtype,
        accumulate=torch.float32 if wide else dtype,
        scale=128.0 if precision == "fp16" else 1.0,
    )
    assert_same_training(found, expected)
    assert {param.dtype for param in engine.module.parameters()} == {dtype}
    assert isinstance(engine.optimizer, deepspeed.runtime.base_optimizer.DeepSpeedOptimizer)
