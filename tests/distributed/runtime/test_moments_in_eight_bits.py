"""Moments in 8 bits where the model is: training beside float32, memory, checkpoints in both directions."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from tests.harness import ranks

WIDTH = 48


def build(stage, bits, kind="AdamW"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 96), nn.Tanh(), nn.Linear(96, WIDTH))
    params = {"lr": 5e-3 if kind == "AdamW" else 1e-3, **({} if bits is None else {"moment_bits": bits})}
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "optimizer": {"type": kind, "params": params},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return deepspeed.initialize(model=model, config=config)[0]


def train(engine, steps):
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(3 + dist.get_rank())).bfloat16()
    losses = []
    for _ in range(steps):
        loss = (engine(x).float() - x.float()).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def state_bytes(engine):
    states = engine.basic_optimizer.state.values()
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))


@ranks(1, 2)
def test_training_and_checkpoints_beside_float32(tmp_path):
    for stage, kind in ((0, "AdamW"), (1, "Lion"), (2, "AdamW"), (3, "AdamW")):
        narrow, wide = build(stage, 8, kind), build(stage, None, kind)
        losses = train(narrow, 40), train(wide, 40)
        assert losses[0][-1] < 0.5 * losses[0][0], (stage, kind)
        assert losses[0][-1] == pytest.approx(losses[1][-1], rel=0.1, abs=2e-3), (stage, kind)
        assert state_bytes(narrow) < 0.3 * state_bytes(wide)
        param = next(iter(narrow.module.parameters()))
        kept = deepspeed.utils.safe_get_full_optimizer_state(param, "exp_avg")
        assert kept.dtype == torch.float32
        assert kept.shape == (96, WIDTH)
        narrow.save_checkpoint(str(tmp_path / f"narrow{stage}"))
        wide.save_checkpoint(str(tmp_path / f"wide{stage}"))
        narrow.load_checkpoint(str(tmp_path / f"wide{stage}"))
        wide.load_checkpoint(str(tmp_path / f"narrow{stage}"))
        taken = deepspeed.utils.safe_get_full_optimizer_state(next(iter(wide.module.parameters())), "exp_avg")
        torch.testing.assert_close(taken, kept)
        assert state_bytes(narrow) < 0.3 * state_bytes(wide)
        assert train(narrow, 3)[0] == pytest.approx(losses[1][-1], rel=0.5), (stage, kind)
        assert train(wide, 3)[0] == pytest.approx(losses[0][-1], rel=0.5), (stage, kind)
        deepspeed.utils.safe_set_full_optimizer_state(param, torch.full((96, WIDTH), 0.5), "exp_avg")
        assert torch.equal(
            deepspeed.utils.safe_get_full_optimizer_state(param, "exp_avg"), torch.full((96, WIDTH), 0.5)
        )
        narrow.destroy()
        wide.destroy()
