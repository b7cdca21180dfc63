"""`init_inference` on two ranks: layers and experts that they share, and files of any number of ranks."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM

import deepspeed
from deepspeed.errors import CheckpointError, UsageError
from deepspeed.inference import LLM, SamplingParams
from tests.harness import shared_ranks
from tests.unit.inference.test_engine import empty, ids, llama

pytestmark = pytest.mark.usefixtures("with_transformers")


def logits(engine):
    return engine(ids(2, 9)).logits.float()


@shared_ranks(2)
def test_ways_to_share_layers():
    expected = llama()(ids(2, 9)).logits
    block = type(llama().model.layers[0])
    ways = (
        ({"mp_size": 2}, 1e-5),
        ({"tensor_parallel": {"tp_size": 2, "tp_group": dist.group.WORLD}}, 1e-5),
        ({"tensor_parallel": {"tp_group": dist.group.WORLD}}, 1e-5),
        ({"mp_size": 2, "injection_policy": {block: ("self_attn.o_proj", "mlp.down_proj")}}, 1e-5),
        ({"mp_size": 2, "replace_with_kernel_inject": True}, 1e-5),
        ({"mp_size": 2, "quant": {"weight": {"num_bits": 8}}}, 0.02),
    )
    for keys, within in ways:
        engine = deepspeed.init_inference(llama(), dtype="fp32", **keys)
        assert engine.mp_world_size == 2
        assert engine.module.model.layers[0].mlp.up_proj.out_features == 64
        torch.testing.assert_close(logits(engine), expected, atol=within, rtol=0)
    with pytest.raises(UsageError, match=r"tensor_parallel\.tp_size is 2, but no layer of Linear can be split"):
        deepspeed.init_inference(torch.nn.Linear(4, 4), dtype="fp32", mp_size=2)
    prompts = ids(2, 9)
    plain = deepspeed.init_inference(llama(), dtype="fp32", mp_size=2)
    found = plain.generate(prompts, max_new_tokens=6)
    assert torch.equal(found, llama().generate(prompts, max_new_tokens=6))
    assert plain._paged._llm is not None
    sampled = plain.generate(prompts, max_new_tokens=6, do_sample=True)
    others = [torch.empty_like(sampled) for _ in range(2)]
    dist.all_gather(others, sampled)
    assert torch.equal(*others)


@shared_ranks(2)
def test_experts():
    def mixtral():
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=128, num_local_experts=4)
        return MixtralForCausalLM(config).eval()

    engine = deepspeed.init_inference(mixtral(), dtype="fp32", moe={"ep_size": 2})
    torch.testing.assert_close(logits(engine), mixtral()(ids(2, 9)).logits, atol=1e-5, rtol=0)


@shared_ranks(2)
def test_files(tmp_path):
    """Written by one or two ranks, read by one or two, with and without a word about how they are cut."""
    rank, expected = dist.get_rank(), llama()(ids(2, 9)).logits

    def check(**keys):
        engine = deepspeed.init_inference(empty(), dtype="fp32", **keys)
        torch.testing.assert_close(logits(engine), expected, atol=1e-5, rtol=0)

    whole, two, one = (str(tmp_path / name) for name in ("whole", "two", "one"))
    if rank == 0:
        llama().save_pretrained(whole)
        deepspeed.init_inference(llama(), dtype="fp32", save_mp_checkpoint_path=one)
        torch.save({"module": llama().state_dict()}, tmp_path / "model.pt")
    dist.barrier()
    check(mp_size=2, checkpoint=whole, save_mp_checkpoint_path=two)
    dist.barrier()
    check(mp_size=2, checkpoint=two)
    tiers = {"memory": {"device": 0, "host": "100KB", "disk": "1GB", "path": str(tmp_path)}}
    check(mp_size=2, checkpoint=two, keep_module_on_host=True)
    check(mp_size=2, checkpoint=whole, ragged=tiers)
    cache = {"memory_config": {"mode": "allocate", "size": 16}}
    with LLM(whole, {"tensor_parallel": {"tp_size": 2}, "state_manager": cache, **tiers}) as llm:
        assert {unit.tier for unit in llm._parts.stream.units} == {"device", "host", "disk"}
        found = llm.generate(ids(9).tolist(), SamplingParams(max_tokens=4, temperature=0.0), progress=False)
        assert found[0].token_ids == llama().generate(ids(1, 9), max_new_tokens=4)[0, 9:].tolist()
    check(checkpoint=f"{two}/ds_inference_config.json", set_empty_params=True)
    check(mp_size=2, checkpoint=one)
    check(mp_size=2, base_dir=str(tmp_path), checkpoint={"type": "ds_model", "checkpoints": ["model.pt"]})
    about = json.loads((tmp_path / "two" / "ds_inference_config.json").read_text())
    check(checkpoint={**about, "splits": None, "base_dir": two})
    check(mp_size=2, checkpoint={**about, "splits": None, "base_dir": two})
    with pytest.raises(CheckpointError, match="tp_size is 3, but 'tp' lists 2 files"):
        check(checkpoint={**about, "tp_size": 3, "base_dir": two})
    with pytest.raises(CheckpointError, match=r"'\.\./x' has '\.\.' in it"):
        check(base_dir=two, checkpoint={"checkpoints": ["../x"]})
