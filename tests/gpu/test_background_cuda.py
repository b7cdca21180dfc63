"""Snapshots of device memory: page-locked copies of what tensors held when the save was asked for."""

from __future__ import annotations

import pytest
import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.formats.safe_load import safe_load
from deepspeed.checkpoint.storage.background import Snapshot
from deepspeed.checkpoint.storage.manager import CheckpointManager, SavePolicy, SaveRequest
from deepspeed.checkpoint.storage.rank_meeting import SingleRank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_snapshot_of_device_tensors():
    flat = torch.arange(1_000_000.0, device="cuda")
    state = {"a": flat[10:20], "b": flat[20:500_020].view(500, 1000), "host": torch.ones(3)}
    expected = {name: value.clone().cpu() for name, value in state.items()}
    taken = Snapshot().take(state)
    flat.zero_()
    for name, value in expected.items():
        assert taken[name].device.type == "cpu"
        assert torch.equal(taken[name], value)
    assert get_accelerator().is_pinned(taken["b"])


def test_training_goes_on_while_a_snapshot_is_written(tmp_path):
    manager = CheckpointManager(SingleRank(), SavePolicy(background=True))
    weights = torch.zeros(2**22, device="cuda")
    for step in range(3):
        weights.fill_(step)
        manager.save(SaveRequest(tmp_path, f"step{step}", {"model.pt": {"w": weights}}))
        weights.fill_(-1)
    manager.close()
    for step in range(3):
        assert safe_load(tmp_path / f"step{step}" / "model.pt")["w"].unique().tolist() == [step]
