"""MMEngine's `DeepSpeedStrategy`, which registers the 1-bit optimizers in its constructor."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from tests.harness import ranks
from tests.models import batches, make, share
from tests.projects.stand_ins import needs, stand_ins

pytestmark = [needs("mmengine"), pytest.mark.slow]

STEPS, SAMPLES, RATE = 3, 8, 1e-2


def plain():
    model = nn.parallel.DistributedDataParallel(make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        loss = model(*share(batches(1, SAMPLES)[0], dist.get_rank(), 2))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_its_strategy_trains_as_in_a_plain_run(stage, tmp_path):
    expected = plain()
    with stand_ins("cv2"):
        from mmengine._strategy import DeepSpeedStrategy
        from mmengine.model import BaseModel

    class Model(BaseModel):
        def __init__(self):
            super().__init__()
            self.inner = make()

        def forward(self, tokens, labels, mode="tensor"):
            return {"loss": self.inner(tokens, labels)}

    strategy = DeepSpeedStrategy(
        zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
        gradient_clipping=0.0,
        train_micro_batch_size_per_gpu=SAMPLES // 2,
        work_dir=str(tmp_path),
    )
    wrapper = {"type": "DeepSpeedOptimWrapper", "optimizer": {"type": "AdamW", "lr": RATE}}
    model, optimizer = strategy.prepare(Model(), optim_wrapper=wrapper, dispatch_kwargs={"max_iters": STEPS})[:2]
    assert isinstance(model.model, deepspeed.DeepSpeedEngine)
    rows = share(batches(1, SAMPLES)[0], dist.get_rank(), 2)
    losses = [float(model.train_step(rows, optim_wrapper=optimizer)["loss"]) for _ in range(STEPS)]
    assert losses == pytest.approx(expected, abs=1e-5)
    assert losses[-1] < losses[0]

    strategy.save_checkpoint(str(tmp_path / "step3"), extra_ckpt={"meta": {"seen": 24}})
    after = float(model.train_step(rows, optim_wrapper=optimizer)["loss"])
    assert strategy.resume(str(tmp_path / "step3"))["meta"]["seen"] == 24
    assert float(model.train_step(rows, optim_wrapper=optimizer)["loss"]) == after
