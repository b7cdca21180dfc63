"""Experts of Transformers' models dealt to tensor-parallel ranks, beside dense layers that these share."""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.checkpoint.pretrained import values_from
from deepspeed.errors import CommError, DeepSpeedConfigError, FeatureUnavailable
from tests.distributed.moe.test_auto import config
from tests.distributed.moe.test_expert_checkpoints import shared_folder
from tests.harness import ranks

pytest.importorskip("transformers")


@dataclass(frozen=True)
class Case:
    family: str
    stage: int
    size: int = 2
    grouped: bool = True
    born: bool = False
    folder: bool = False
    """Every rank reads its part of the values."""
    tokens: int = 5
    inner: bool = False
    """Ranks share every expert; else experts are dealt to them."""


def check(case):
    """Loss, norm and the whole trained model, on ranks of which two share the dense layers."""
    from tests.distributed.moe.families import model_of

    plain = model_of(case.family)
    model = copy.deepcopy(plain) if not case.born else in_shards(case.family, plain)
    folder = shared_folder("values") if case.folder else None
    if folder is not None:
        model = from_folder(case.family, plain, folder)
    section = {"use_grouped_mm": case.grouped, "expert_tensor_parallel_size": 2 if case.inner else 1}
    made = config(case.stage, case.size, expert_parallel=section)
    engine, *_ = deepspeed.initialize(model=model, config=made | {"tensor_parallel": {"autotp_size": 2}})
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    replica, replicas = dist.get_rank() // 2, dist.get_world_size() // 2
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        given = [torch.randint(1, 32, (1, case.tokens), generator=generator) for _ in range(replicas)]
        loss = engine(input_ids=given[replica], labels=given[replica]).loss
        engine.backward(loss)
        engine.step()
        losses = [plain(input_ids=each, labels=each).loss for each in given]
        torch.testing.assert_close(loss, losses[replica], rtol=1e-5, atol=1e-6, msg=f"{case}")
        (sum(losses) / len(losses)).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(torch.tensor(engine.get_global_grad_norm()), norm, rtol=1e-4, atol=1e-6)
    with torch.no_grad():  # a token that one of the ranks sends, and the other has none
        one = given[replica][:, :1]
        torch.testing.assert_close(engine(input_ids=one).logits, plain(input_ids=one).logits, rtol=1e-4, atol=1e-5)
    whole = engine.zero3_consolidated_16bit_state_dict()
    if dist.get_rank() == 0:
        assert set(whole) == set(plain.state_dict())
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(whole[name], value, rtol=1e-4, atol=1e-5, msg=f"{name} in {case}")
    doubled = {name: 2 * value for name, value in plain.state_dict().items()}
    engine.load_module_state_dict(doubled)
    for name, value in engine.module_state_dict().items():
        torch.testing.assert_close(value, doubled[name], rtol=0, atol=0, msg=f"{name} in {case}")
    engine.destroy()
    if folder is not None and dist.get_rank() == 0:
        shutil.rmtree(folder)


def from_folder(family, plain, folder):
    from accelerate import init_empty_weights

    from tests.distributed.moe.families import FAMILIES

    if dist.get_rank() == 0:
        plain.save_pretrained(folder)
    dist.barrier()
    with init_empty_weights():
        return values_from(FAMILIES[family](), folder)


def in_shards(family, plain):
    from tests.distributed.moe.families import FAMILIES

    with deepspeed.zero.Init():
        model = FAMILIES[family]()
    with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=0):
        model.load_state_dict(plain.state_dict())
    return model


@ranks(4, timeout=300)
def test_four_ranks():
    for case in (
        Case("mixtral", 0),
        Case("mixtral", 1, size=4, grouped=False),
        Case("mixtral", 3, tokens=4),
        Case("qwen3_moe", 0, size=4, tokens=4),
        Case("qwen3_moe", 1),
        Case("qwen3_moe", 3, born=True),
        Case("qwen2_moe", 2),
    ):
        check(case)
    with pytest.raises(FeatureUnavailable, match=r"divided sequences \(tensor_parallel\.sequence_parallel\)"):
        from tests.distributed.moe.families import model_of

        split = {"tensor_parallel": {"autotp_size": 2, "sequence_parallel": True}}
        deepspeed.initialize(model=model_of("mixtral"), config=config() | split)


@ranks(4, timeout=300)
def test_ranks_that_share_every_expert():
    for case in (
        Case("mixtral", 0, inner=True, folder=True),
        Case("gpt_oss", 1, inner=True),
        Case("qwen2_moe", 3, inner=True, born=True),
        Case("qwen3_moe", 3, inner=True, grouped=False),
        Case("llama4", 1, inner=True),
    ):
        check(case)
    section = {"expert_tensor_parallel_size": 4}
    with pytest.raises(DeepSpeedConfigError, match="expert_tensor_parallel_size is 4, but there are 2 tensor-parallel"):
        from tests.distributed.moe.families import model_of

        deepspeed.initialize(
            model=model_of("mixtral"), config=config(expert_parallel=section) | {"tensor_parallel": {"autotp_size": 2}}
        )


@ranks(2, timeout=300)
def test_two_ranks():
    """Without a further data-parallel rank, also where every expert computes a row for every token."""
    check(Case("mixtral", 1))
    check(Case("llama4", 0))
    routers_that_disagree("mixtral", 1)
    routers_that_disagree("llama4", 1)
    routers_that_disagree("mixtral", 2)


def routers_that_disagree(family, inner):
    from tests.distributed.moe.families import model_of

    section = {"validate_folding_routing": True, "expert_tensor_parallel_size": inner}
    made = config(0, 2 // inner, expert_parallel=section) | {"tensor_parallel": {"autotp_size": 2}}
    engine, *_ = deepspeed.initialize(model=model_of(family), config=made)
    given = torch.randint(1, 32, (1, 6), generator=torch.Generator().manual_seed(0))
    engine(input_ids=given)
    with torch.no_grad():
        for name, param in engine.module.named_parameters():
            if "layers.1" in name and name.endswith(("gate.weight", "router.weight")):
                param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(dist.get_rank())))
    with pytest.raises(CommError, match=r"layers\.1\..*experts: rank 1 chose experts .* otherwise than rank 0"):
        engine(input_ids=given)
    engine.destroy()
