"""Composer's `Trainer` with `deepspeed_config`, in the last release that has it (0.28 removed it)."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import deepspeed
from tests.harness import ranks
from tests.projects.stand_ins import needs, stand_ins

pytestmark = [needs("composer"), pytest.mark.slow]

STEPS, SAMPLES, RATE = 3, 8, 0.05


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def dataset():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(STEPS * SAMPLES, 6, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].argmax(dim=1))


def plain():
    """The losses of the same batches in one process."""
    model = layers()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    losses = []
    rows = [torch.tensor([*range(first, first + SAMPLES)]) for first in range(0, STEPS * SAMPLES, SAMPLES)]
    for batch in rows * 2:
        inputs, labels = dataset()[batch]
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trainer_of(stage):
    from composer import Callback, ComposerModel, Trainer

    class Classifier(ComposerModel):
        def __init__(self):
            super().__init__()
            self.layers = layers()

        def forward(self, batch):
            return self.layers(batch[0])

        def loss(self, outputs, batch):
            return nn.functional.cross_entropy(outputs, batch[1])

    class Losses(Callback):
        """The mean over the ranks, as the gradients are."""

        def __init__(self):
            self.found = []

        def batch_end(self, state, logger):
            loss = torch.tensor(float(state.loss))
            dist.all_reduce(loss)
            self.found.append(loss.item() / 2)

    model, losses = Classifier(), Losses()
    data = dataset()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.Adam(model.parameters(), lr=RATE),
        train_dataloader=DataLoader(data, batch_size=SAMPLES // 2, sampler=DistributedSampler(data, shuffle=False)),
        max_duration="2ep",
        deepspeed_config={
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "gradient_clipping": 0.0,
        },
        device="cpu",
        precision="fp32",
        progress_bar=False,
        callbacks=[losses],
    )
    return trainer, losses.found


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_the_trainer_trains_as_in_a_plain_run(stage, tmp_path):
    os.environ.update(LOCAL_WORLD_SIZE="2", NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # as its launcher
    with stand_ins("torchvision", "torch_optimizer", "mcli"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own, of a dozen libraries
        expected = plain()
        trainer, losses = trainer_of(stage)
        assert isinstance(trainer.state.deepspeed_model, deepspeed.DeepSpeedEngine)
        assert trainer.state.deepspeed_model.zero_optimization_stage() == stage
        trainer.fit()
        # Composer gives each rank a temporary folder of its own: a checkpoint here needs one that all ranks see.
        with pytest.raises(deepspeed.errors.CheckpointError, match="this one does not see it so"):
            trainer.save_checkpoint(str(tmp_path / "rank{rank}"))
    assert losses == pytest.approx(expected, abs=1e-5)
    assert losses[-1] < losses[0]
