"""Models that were constructed in shards, by `zero.Init` or by Transformers under it, have their experts spread."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.errors import UsageError
from tests.distributed.moe.models import StackedModel
from tests.distributed.moe.test_auto import Case, compare, config
from tests.distributed.moe.test_expert_checkpoints import shared_folder
from tests.harness import ranks

pytest.importorskip("transformers")


def born(family):
    """(a model of which every rank has shards, the whole one of the same values)."""
    from tests.distributed.moe.families import FAMILIES, model_of

    plain = model_of(family)
    with deepspeed.zero.Init():
        model = FAMILIES[family]()
    with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=0):
        model.load_state_dict(plain.state_dict())
    assert all(param.numel() == 0 for param in model.parameters())
    return model, plain


@ranks(2)
def test_two_ranks():
    """Alone with its experts, a rank has nobody to shard them with; with size 1 they stay where they were."""
    for case in (Case("mixtral", 3), Case("deepseek_v3", 3, size=1), Case("llama4", 3, uneven=True)):
        compare(case, *born(case.family))
    with deepspeed.zero.Init():
        model = StackedModel()
    with pytest.raises(UsageError, match=r"zero_optimization\.stage is 1"):
        deepspeed.initialize(model=model, config=config(1))


@ranks(4)
def test_four_ranks():
    compare(Case("qwen3_moe", 3), *born("qwen3_moe"))


@ranks(2)
def test_from_pretrained():
    """Transformers constructs the model in shards where it knows of a config of stage 3."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    from tests.distributed.moe.families import model_of

    folder = shared_folder("pretrained")
    for family in ("mixtral", "gpt_oss"):
        plain = model_of(family)
        if dist.get_rank() == 0:
            plain.save_pretrained(folder / family)
        dist.barrier()
        known = HfDeepSpeedConfig(config(3))
        model = AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float32)
        assert all(param.numel() == 0 for param in model.parameters())
        compare(Case(family, 3), model.train(), plain)
        del known
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
