"""Lamb and Muon with moments in 8 bits, by the config: beside float32, through checkpoints, on shards."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from tests.harness import ranks, store_path

WIDTH, RATES = 24, {"Lamb": 0.1, "Muon": 1e-2}


def build(kind, bits, stage, **zero):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": kind, "params": {"lr": RATES[kind], "moment_bits": bits}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 30, **zero},
        "zero_allow_untested_optimizer": True,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine, steps):
    """The same batch again and again, so that the loss falls."""
    losses, x = [], torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(steps):
        loss = (engine(x) - x.roll(1, 1)).square().mean()
        engine.backward(loss)
        engine.step()
        dist.all_reduce(loss := loss.detach())
        losses.append(float(loss) / dist.get_world_size())
    return losses


@ranks(2)
def test_the_losses_of_float32_and_checkpoints():
    for kind, stages in (("Lamb", (0, 0)), ("Muon", (0, 1)), ("Muon", (3, 2))):
        engine, wide = build(kind, 8, stages[0]), build(kind, 32, stages[0])
        losses, others = train(engine, 8), train(wide, 8)
        assert losses[-1] < 0.9 * losses[0], (kind, losses)
        assert losses == pytest.approx(others, rel=2e-2), kind
        states = engine.basic_optimizer.state.values()
        held = {key: value.dtype for state in states for key, value in state.items() if isinstance(value, torch.Tensor)}
        assert {held[name] for name in held if not name.endswith("_scale")} == {torch.uint8}, held
        folder = f"{store_path()}_{kind}_{stages[0]}"
        engine.save_checkpoint(folder)
        losses = train(engine, 3)
        for bits, stage in ((8, stages[1]), (32, stages[0])):
            other = build(kind, bits, stage)
            other.load_checkpoint(folder)
            assert train(other, 3) == pytest.approx(losses, rel=2e-2), (kind, bits, stage)
            other.destroy()
        engine.destroy()
        wide.destroy()


@ranks(1)
def test_what_is_refused():
    with pytest.raises(DeepSpeedConfigError, match=r"optimizer\.params\.moment_bits is 8, .*offload_optimizer"):
        build("Muon", 8, 1, offload_optimizer={"device": "cpu"})
    for kind in ("Lamb", "Muon"):
        with pytest.raises(DeepSpeedConfigError, match="moment_bits is 12"):
            build(kind, 12, 0)
