"""Training with narrow moments beside float32: a small language model learns the same."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import nn

from deepspeed.ops import blockwise
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.ops.muon import MuonWithAuxAdam
from deepspeed.ops.registry import operations


def muon(params, moment_bits, **given):
    """Matrices to Muon, the rest to Adam."""
    kinds = {True: [], False: []}
    for param in params:
        kinds[param.ndim == 2 and param.shape != (128, 16)].append(param)
    halves = [
        {"params": chosen, "use_muon": kind, "lr": given["lr"] if kind else 3e-3} for kind, chosen in kinds.items()
    ]
    return MuonWithAuxAdam(halves, moment_bits=moment_bits)


ROOT = Path(__file__).parents[3]
CONTEXT = 8
STEPS = 300
LEARNING = {
    DeepSpeedCPUAdam: {"lr": 3e-3, "weight_decay": 0.01},
    DeepSpeedCPULion: {"lr": 5e-4, "betas": (0.9, 0.99), "weight_decay": 0.01},
    DeepSpeedCPUAdagrad: {"lr": 2e-2},
    FusedAdam: {"lr": 3e-3, "weight_decay": 0.01},
    FusedLamb: {"lr": 1e-2, "weight_decay": 0.01},
    muon: {"lr": 1e-2},
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def text():
    """Characters of the project's documentation, as numbers below 128."""
    words = "".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/*.md")))
    return torch.tensor([min(ord(character), 127) for character in words])


@functools.cache
def losses(cls, bits, seed=0):
    """The loss over the last steps of a training that predicts the next character: mean of the last 50."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(128, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(),
        nn.Linear(96, 128),
    )  # fmt: skip
    optimizer = cls(model.parameters(), moment_bits=bits, **LEARNING[cls])
    data, chosen, found = text(), torch.Generator().manual_seed(seed), []
    for _ in range(STEPS):
        at = torch.randint(len(data) - CONTEXT, (64, 1), generator=chosen)
        windows = data[at + torch.arange(CONTEXT + 1)]
        loss = nn.functional.cross_entropy(model(windows[:, :-1]), windows[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return sum(found[:10]) / 10, sum(found[-50:]) / 50


@pytest.mark.slow
@pytest.mark.parametrize("cls", LEARNING, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("bits", [16, 8])
def test_the_loss_falls_as_with_float32(cls, bits):
    first, wide = losses(cls, 32)
    _, narrow = losses(cls, bits)
    assert wide < first * 0.75  # there is something to learn
    assert abs(narrow - wide) < 0.01 * wide


@pytest.mark.slow
def test_rounding_to_nearest_would_not_do(monkeypatch):
    """The test above can fail: without the random rounding of 8-bit codes the second moment never moves."""
    found = operations()["cpu_adagrad"]
    monkeypatch.setenv("DS_OP_CPU_ADAGRAD", "reference")
    monkeypatch.setattr(
        blockwise, "dither", lambda numel, step, *, signed, device=None: torch.full((numel,), 1 << 19).int()
    )
    found.forget()
    try:
        _, nearest = losses(DeepSpeedCPUAdagrad, 8, seed=1)
    finally:
        found.forget()
    _, wide = losses(DeepSpeedCPUAdagrad, 32, seed=1)
    assert abs(nearest - wide) > 0.01 * wide


@pytest.mark.parametrize("kind", [DeepSpeedCPUAdam, DeepSpeedCPULion, DeepSpeedCPUAdagrad])
def test_codes_stay_codes_on_a_device(kind):
    optimizer = kind([nn.Parameter(torch.zeros(4))], moment_bits=8)
    layout = optimizer.state_layout(torch.empty(64, 64, device="meta"))
    held = sum(dtype.itemsize * numel for _, dtype, numel in layout)
    assert held < 1.1 * 64 * 64 * len(optimizer.moments), f"{held} bytes of {len(optimizer.moments)} moments of a byte"
