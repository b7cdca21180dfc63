"""Checkpoints of engines on a GPU: values go straight between the device and the files, and come back as they were."""

from __future__ import annotations

import sys
import time

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.accelerator.cuda import CUDA_Accelerator
from deepspeed.checkpoint.formats.safe_load import StandIns
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=str(CUDA_Accelerator.why_unavailable())),
]

SECTIONS = {
    "deepspeed": {},
    "safetensors": {"format": "safetensors"},
    "background": {"writer": {"type": "FAST", "decoupled": True}},
}


def build(stage, section, width=1024, layers=3, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)), nn.BatchNorm1d(width))
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage},
            "checkpoint": section,
        },
    )
    return engine


def train(engine, steps):
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        weight = next(engine.module.parameters())
        inputs = torch.randn(4, engine.module[0].in_features, device=weight.device, dtype=weight.dtype)
        loss = engine(inputs).float().sum()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def held(engine):
    found = {name: value.clone() for name, value in engine.module.state_dict().items()}
    for name, param in engine.module.named_parameters():
        found[f"master {name}"] = safe_get_full_fp32_param(param).clone()
        for kind in ("exp_avg", "exp_avg_sq"):
            found[f"{kind} {name}"] = safe_get_full_optimizer_state(param, kind).clone()
    return found


def test_this_torch_hands_over_memory():
    assert StandIns.works()


@pytest.mark.parametrize("way", SECTIONS)
@pytest.mark.parametrize("stage", range(4))
def test_a_round_trip(stage, way, tmp_path):
    engine = build(stage, SECTIONS[way])
    train(engine, 2)
    before = held(engine)
    engine.save_checkpoint(tmp_path)
    rest = train(engine, 2)
    engine.destroy()
    engine = build(stage, SECTIONS[way], seed=5)
    assert engine.load_checkpoint(tmp_path)[0] is not None
    after = held(engine)
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
        assert after[name].device == value.device
    assert train(engine, 2) == rest
    engine.destroy()
    if way == "deepspeed" and stage > 0:
        whole = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
        for name in whole:
            if f"master {name}" in before:
                assert torch.equal(whole[name], before[f"master {name}"].cpu()), name


def test_speed_and_memory_are_shown(tmp_path, capsys):
    """A third of a billion parameters; the figures are printed, nothing is asserted of them but that values return."""
    engine = build(2, {}, width=4096, layers=20)
    train(engine, 1)
    size = 14 * sum(param.numel() for param in engine.module.parameters()) / 2**30
    shown = []
    for number in range(3):
        began = time.perf_counter()
        engine.save_checkpoint(tmp_path, tag=str(number))
        saved = time.perf_counter()
        engine.load_checkpoint(tmp_path, tag=str(number))
        loaded = time.perf_counter()
        shown.append(f"save {size / (saved - began):.2f} GiB/s, load {size / (loaded - saved):.2f} GiB/s")
    before = held(engine)
    engine.load_checkpoint(tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in held(engine).items())
    engine.destroy()
    with capsys.disabled():
        sys.stdout.write(f"\n{size:.2f} GiB on one GPU: {'; '.join(shown)}\n")
