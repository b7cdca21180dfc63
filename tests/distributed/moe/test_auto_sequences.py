"""Experts of Transformers' models spread over ranks that share sequences: parity with the unmodified model."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from tests.distributed.moe.test_auto import config
from tests.harness import ranks

pytest.importorskip("transformers")


@dataclass(frozen=True)
class Case:
    family: str
    stage: int
    attention: str = "ulysses"
    size: int = 2
    tensor: int = 1
    padded: bool = False
    sections: dict[str, Any] = field(default_factory=dict)


def batch_of(step, replicas, padded):
    """One batch for each replica."""
    generator = torch.Generator().manual_seed(step)
    made = []
    for _ in range(replicas):
        tokens = torch.randint(1, 32, (2, 8), generator=generator)
        batch = {"input_ids": tokens, "labels": tokens.clone()}
        if padded:
            batch["attention_mask"] = (torch.arange(8) < torch.tensor([[5], [8]])).long()
            batch["labels"][batch["attention_mask"] == 0] = -100
        made.append(batch)
    return made


def check(case):
    """Losses, norm and the whole trained model; two ranks share every sequence."""
    from tests.distributed.moe.families import model_of

    plain = model_of(case.family)
    made = config(case.stage, case.size, **case.sections) | {
        "sequence_parallel_size": 2,
        "sequence_parallel": {"attention": case.attention},
    }
    if case.tensor > 1:
        made["tensor_parallel"] = {"autotp_size": case.tensor}
    engine, *_ = deepspeed.initialize(model=copy.deepcopy(plain), config=made)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    replicas = dist.get_world_size() // 2 // case.tensor
    replica = dist.get_rank() // 2 // case.tensor
    for step in range(2):
        given = batch_of(step, replicas, case.padded)
        loss = engine(**given[replica]).loss
        engine.backward(loss)
        engine.step()
        losses = [plain(**each).loss for each in given]
        torch.testing.assert_close(loss, losses[replica], rtol=1e-5, atol=1e-6, msg=f"{case}")
        (sum(losses) / len(losses)).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(torch.tensor(engine.get_global_grad_norm()), norm, rtol=1e-4, atol=1e-6)
    whole = engine.zero3_consolidated_16bit_state_dict()
    if dist.get_rank() == 0:
        assert set(whole) == set(plain.state_dict())
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(whole[name], value, rtol=1e-4, atol=1e-5, msg=f"{name} in {case}")
    engine.destroy()


@ranks(2, timeout=400)
def test_two_ranks():
    for case in (
        Case("mixtral", 0),
        Case("mixtral", 3, "ring"),
        Case("qwen2_moe", 1, padded=True),
        Case("deepseek_v3", 2),
        Case("qwen3_moe", 3, size=1),
    ):
        check(case)


@ranks(4, timeout=400)
def test_four_ranks():
    """Experts over ranks that share a sequence, over both replicas, and over replicas alone."""
    for case in (
        Case("mixtral", 1, size=4),
        Case("mixtral", 3),
        Case("qwen3_moe", 0, "ring", sections={"use_data_before_expert_parallelism": True}),
        Case("qwen3_moe", 3, size=4, padded=True),
        Case("mixtral", 1, "ring", tensor=2),
        Case("qwen3_moe", 3, "ring", size=4, tensor=2),
    ):
        check(case)
