"""Batch sizes of a config that splits layers are counted over replicas; numbers that count every rank are told."""

from __future__ import annotations

import pytest

from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import BatchSizeError


def config(**sizes):
    return DeepSpeedConfig({**sizes, "tensor_parallel": {"autotp_size": 4}}, world_size=8)


def test_ranks_that_share_layers_count_once():
    made = config(train_micro_batch_size_per_gpu=2)
    assert made.train_batch_size == 4
    assert made.notes == []
    assert config(train_batch_size=8, train_micro_batch_size_per_gpu=2).gradient_accumulation_steps == 2


def test_numbers_that_count_every_rank_are_accepted_and_told():
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    made = config(train_batch_size=48, **sizes)
    assert made.train_batch_size == 12
    (note,) = made.notes
    assert "48 counts tensor-parallel ranks" in note
    assert "2 × 3 × 2 data-parallel ranks = 12 samples" in note
    with pytest.raises(BatchSizeError):
        config(train_batch_size=47, **sizes)
