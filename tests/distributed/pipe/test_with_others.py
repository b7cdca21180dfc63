"""What a pipeline is refused together with."""

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from tests.harness import ranks

CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}}


class First(nn.Module):
    """Experts that hand on their output alone."""

    def __init__(self):
        super().__init__()
        self.inner = MoE(8, nn.Linear(8, 8), num_experts=2, ep_size=1, k=1)

    def forward(self, x):
        return self.inner(x)[0]


def pipeline(*layers):
    return PipelineModule(list(layers), num_stages=2, loss_fn=lambda out, _: out.sum(), partition_method="uniform")


@ranks(2)
def test_axes_of_the_config_and_experts():
    plain = pipeline(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(DeepSpeedConfigError, match="sequence_parallel_size is 2, and the model is a PipelineModule"):
        deepspeed.initialize(model=plain, config={**CONFIG, "sequence_parallel_size": 2})
    torch.manual_seed(0)
    with pytest.raises(UsageError, match="layers of experts"):
        deepspeed.initialize(model=pipeline(First(), First()), config=CONFIG)
