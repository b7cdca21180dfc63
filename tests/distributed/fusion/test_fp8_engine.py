"""Training with products of 8-bit numbers: near training without them, and the same at every stage."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from tests.harness import ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(32, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, 16)

    def forward(self, x, y):
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return nn.functional.mse_loss(self.last(x).float(), y)


def train(stage, section, steps=30):
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(
        model=Net(),
        config={
            "train_micro_batch_size_per_gpu": 16,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "fp8": section,
        },
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, y = torch.randn(16, 32, generator=generator).bfloat16(), torch.randn(16, 16, generator=generator)
    losses = []
    for _ in range(steps):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    engine.destroy()
    return losses


@ranks(2)
def test_the_curve_beside_that_of_16_bits_at_every_stage():
    exact = train(0, {"enabled": False})
    for scaling in ("tensor", "row"):
        curves = {stage: train(stage, {"enabled": True, "scaling": scaling}) for stage in (0, 2, 3)}
        for stage, losses in curves.items():
            assert losses == pytest.approx(curves[0], rel=2e-2), (scaling, stage)  # bf16 sums in another order
            assert losses != exact
            assert losses == pytest.approx(exact, rel=0.1), (scaling, stage)
            assert losses[-1] < 0.7 * losses[0]


@ranks(1)
def test_a_device_without_such_units_is_told():
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepspeed.fusion.build.log_dist", lambda message, **_: told.append(message))
        train(0, {"enabled": True}, steps=1)
    assert any("multiplied as float32" in message for message in told) == (not torch.cuda.is_available())


@ranks(1)
def test_layers_that_stay_are_chosen_by_name():
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(
        model=Net(),
        config={"train_micro_batch_size_per_gpu": 16, "fp8": {"enabled": True, "exclude": ["first", "la.t"]}},
    )
    replaced = [name for name, module in engine.module.named_modules() if "forward" in module.__dict__]
    assert replaced == ["second"]
    engine.destroy()
    assert "forward" not in engine.module.second.__dict__
