"""zero.Init on a real GPU: where what is constructed lives, and that an engine takes it over."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import zero
from deepspeed.accelerator.cuda import CUDA_Accelerator
from tests.models import Tiny, batches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=str(CUDA_Accelerator.why_unavailable())),
]

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3},
}


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.legacy = nn.Parameter(torch.FloatTensor(2, 2).fill_(1.0))
        self.register_buffer("table", torch.linspace(0, 1, 4))
        self.register_buffer("host", torch.Tensor(2).zero_())
        self.layer.weight.data.mul_(2.0)


def test_everything_is_on_the_device():
    with zero.Init(config_dict_or_path=CONFIG):
        model = Mixed()
    for param in model.parameters():
        assert (param.device.type, param.ds_tensor.device.type, param.dtype) == ("cuda", "cuda", torch.bfloat16)
        assert param.numel() == 0
    assert {each.device.type for each in model.buffers()} == {"cuda"}
    assert model.table.dtype == torch.float32
    torch.manual_seed(0)
    with torch.device("cuda"):
        plain = Tiny()
    torch.manual_seed(0)
    with zero.Init():
        sharded = Tiny()
    with zero.GatheredParameters(sharded.parameters()):
        assert all(map(torch.equal, sharded.parameters(), plain.parameters()))


def test_a_model_on_the_host_until_there_is_an_engine():
    with zero.Init(config_dict_or_path=CONFIG, remote_device="cpu", pin_memory=True):
        model = Tiny()
    assert all(param.ds_tensor.device.type == "cpu" and param.ds_tensor.is_pinned() for param in model.parameters())
    with zero.GatheredParameters(model.parameters(), modifier_rank=0):
        model.up.weight.data.fill_(0.5)
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
    assert {param.device.type for param in model.parameters()} == {"cuda"}
    assert torch.equal(model.up.weight, torch.full((24, 8), 0.5, device="cuda", dtype=torch.bfloat16))
    losses = []
    for batch in batches(1, 4) * 8:
        loss = engine(*(each.cuda() for each in batch))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
