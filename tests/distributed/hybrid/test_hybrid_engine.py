"""One set of weights that trains and generates: tokens are Transformers', and training does not notice."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.zero.interface import shards_of
from tests.harness import shared_ranks

pytestmark = pytest.mark.usefixtures("with_transformers")


def llama(**keys):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 256, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**sizes, **more, eos_token_id=2, attention_dropout=0.2, **keys))


def start(stage, model=None, hybrid=None, **keys):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 64},
        "hybrid_engine": {"enabled": True, "max_out_tokens": 64, **(hybrid or {})},
        "steps_per_print": None,
        **keys,
    }
    if hybrid is False:
        del config["hybrid_engine"]
    model = llama() if model is None else model
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def ids(*shape, seed=1):
    return torch.randint(3, 100, shape, generator=torch.Generator().manual_seed(seed + dist.get_rank()))


def train(engine, step, between=None):
    batch = ids(2, 12, seed=10 * step)
    loss = engine(input_ids=batch, labels=batch).loss
    if between is not None:
        between()
    engine.backward(loss)
    engine.step()
    return loss.detach()


def same_loss(engine, other, step, between=None):
    """Whether a step of both, with the same random numbers, has the same bits."""
    states = torch.get_rng_state()
    losses = []
    for each in (other, engine):
        torch.set_rng_state(states)
        losses.append(train(each, step, between if each is engine else None))
    return torch.equal(*losses)


def plain(engine):
    """A model of its own with the engine's weights."""
    model = llama(tie_word_embeddings=engine.module.config.tie_word_embeddings).eval()
    model.load_state_dict(engine.module_state_dict())
    return model


def prompts(rank):
    """Rows of different lengths, padded on the left; other ones on each rank."""
    rows = ids(3 + rank, 9)
    mask = torch.ones_like(rows)
    mask[1, :4] = 0
    rows[1, :4] = 0
    return {"input_ids": rows, "attention_mask": mask}


@shared_ranks(2)
def test_tokens_and_losses(tmp_path):
    rank = dist.get_rank()
    # ranks hold other prompts, and end at other times
    given = {**prompts(rank), "max_new_tokens": 5 + 9 * rank, "min_new_tokens": 4, "do_sample": False}
    for stage in (0, 1, 2, 3):
        engine, other = start(stage), start(stage, hybrid=False)
        assert type(engine) is deepspeed.DeepSpeedHybridEngine
        for step in range(2):
            expected = plain(engine).generate(**given)
            generate = engine.generate if step else engine.module.generate
            with torch.inference_mode(not step):
                assert torch.equal(generate(**given), expected), (stage, step)
            assert torch.equal(engine.generate(**given, num_beams=2), plain(engine).generate(**given, num_beams=2))
            drawn = [engine.generate(**prompts(rank), max_new_tokens=8, do_sample=True) for _ in range(2)]
            assert not torch.equal(drawn[0][:, :13], drawn[1][:, :13]), "every call draws anew"
            assert all(each.training for each in engine.module.modules())
            assert all(not shard.holds for shard in shards_of(engine.module.parameters()))
            between = partial(engine.generate, **given)
            assert same_loss(engine, other, step, between if step else None), (stage, step)
        for one, two in zip(engine.module_state_dict().values(), other.module_state_dict().values(), strict=True):
            assert torch.equal(one, two)
        assert [each[:20] for each in engine._generation._paged._reasons] == ["it is asked for num_"], "else by pages"
        engine.destroy(), other.destroy()
        assert "generate" not in vars(engine.module)


@shared_ranks(2)
def test_phases():
    """In eval mode parameters stay whole and states away until training goes on; then all is as it was."""
    given = {**prompts(dist.get_rank()), "max_new_tokens": 6, "do_sample": False}
    keys = {"offload_states": True, "tp_gather_partition_size": 2, "release_inference_cache": True}
    engine, other = start(3, hybrid=keys), start(3, hybrid=False)
    assert same_loss(engine, other, 0)
    expected = plain(engine).generate(**given)
    shards = shards_of(engine.module.parameters())
    engine.eval()
    for _ in range(2):
        assert torch.equal(engine.generate(**given), expected)
        assert all(shard.whole for shard in shards), "pinned"
        assert engine._generation._paged._llm is None, "released"
        assert engine._parts.moved
    batch = ids(2, 12)
    assert engine(input_ids=batch, labels=batch).loss.item() == plain(engine)(input_ids=batch, labels=batch).loss.item()
    assert torch.equal(engine.generate(**given), expected)
    engine.load_module_state_dict({name: value * 1.5 for name, value in engine.module_state_dict().items()})
    assert torch.equal(engine.generate(**given), plain(engine).generate(**given)), "values that were loaded"
    engine.load_module_state_dict({name: value / 1.5 for name, value in engine.module_state_dict().items()})
    other.load_module_state_dict(engine.module_state_dict())
    engine.train()
    assert not engine._parts.moved
    assert all(shard.whole is shard.persistent for shard in shards)
    assert same_loss(engine, other, 1)
    # a call as Transformers' continuous batching has it
    rows = [given["input_ids"][1, 4:].tolist(), given["input_ids"][0].tolist()]
    settings = copy.deepcopy(engine.module.generation_config)
    settings.update(max_new_tokens=6, do_sample=False)
    found = list(engine.module.generate_batch(rows, generation_config=settings, progress_bar=False).values())
    for row, one in zip(rows, found, strict=True):
        alone = plain(engine).generate(torch.tensor([row]), generation_config=settings)[0, len(row) :]
        assert one.generated_tokens == alone.tolist()[: len(one.generated_tokens)]
        assert len(one.logprobs) == len(one.generated_tokens)
        assert all(value <= 0 for value in one.logprobs)


@shared_ranks(2)
def test_slices():
    """Neighbours share the layers while they generate: no rank has a whole one."""
    rank = dist.get_rank()
    given = {**prompts(rank), "max_new_tokens": 5 + rank, "do_sample": False}
    tied = {"tie_word_embeddings": True}
    other = start(3, llama(**tied), hybrid=False)
    engine = start(3, llama(**tied), hybrid={"inference_tp_size": 2, "release_inference_cache": True})
    sliced = engine._generation._sliced.model
    for step in range(2):
        engine.eval()
        assert torch.equal(engine.generate(**given), plain(engine).generate(**given))
        assert sliced.model.layers[0].mlp.up_proj.weight.shape == (64, 64)
        assert sliced.model.layers[0].mlp.up_proj.weight.device.type == "cpu"
        assert torch.equal(engine.generate(**given, num_beams=2), plain(engine).generate(**given, num_beams=2))
        drawn = engine.generate(**prompts(0), max_new_tokens=4, do_sample=True, top_k=1)
        assert torch.equal(drawn, plain(engine).generate(**prompts(0), max_new_tokens=4, do_sample=False))
        engine.train()
        assert {param.device.type for param in sliced.parameters()} == {"meta"}, "freed"
        assert all(shard.whole is shard.persistent for shard in shards_of(engine.module.parameters()))
        assert same_loss(engine, other, step)
    with pytest.raises(DeepSpeedConfigError, match="inference_tp_size is 3, which does not go with 2 ranks"):
        start(3, hybrid={"inference_tp_size": 3})
    with pytest.raises(DeepSpeedConfigError, match=r"inference_tp_size is 2, which does not go with tensor_parallel"):
        start(3, hybrid={"inference_tp_size": 2}, tensor_parallel={"autotp_size": 2})
    with pytest.raises(DeepSpeedConfigError, match=r"generation on sequences that 2 ranks share"):
        start(3, sequence_parallel_size=2)


def with_lora(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(model, lora)


class LinearWithPair(nn.Linear):
    """A layer as DeepSpeed-Chat makes it."""

    fuse_lora = False

    def __init__(self, base):
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = base.weight
        self.weight.requires_grad_(False)
        self.lora_right_weight = nn.Parameter(torch.randn(base.in_features, 4) / 8)
        self.lora_left_weight = nn.Parameter(torch.randn(4, base.out_features) / 8)
        self.lora_scaling = 0.5

    def forward(self, x):
        found = nn.functional.linear(x, self.weight)
        return found if self.fuse_lora else found + x @ self.lora_right_weight @ self.lora_left_weight * 0.5


def with_pairs(model):
    torch.manual_seed(3)
    for layer in model.model.layers:
        layer.mlp.up_proj = LinearWithPair(layer.mlp.up_proj)
    return model


@shared_ranks(2)
def test_adapters():
    given = {**prompts(dist.get_rank()), "max_new_tokens": 6, "do_sample": False}
    for change in (with_lora, with_pairs):
        for stage in (2, 3):
            engine, other = (start(stage, change(llama()), hybrid=keys) for keys in ({}, False))
            reference = change(llama()).eval()
            for step in range(2):
                before = engine.module_state_dict()
                reference.load_state_dict(before)
                expected = reference.generate(**given)
                assert torch.equal(engine.module.generate(**given), expected)
                engine.fuse_lora_weight()
                assert engine._generation.lora.active
                assert torch.equal(engine.generate(**given), expected)
                if step:
                    engine.unfuse_lora_weight()
                    assert all(map(torch.equal, before.values(), engine.module_state_dict().values()))
                assert same_loss(engine, other, step), "not fused"
            streamed = {name: value for bucket in engine.stream_weights("40KB") for name, value in bucket.items()}
            merged = llama().eval()
            merged.load_state_dict(streamed)
            reference.load_state_dict(engine.module_state_dict())
            logits = [each(ids(2, 9)).logits for each in (merged, reference)]
            torch.testing.assert_close(*logits, atol=1e-5, rtol=0)
            engine.destroy(), other.destroy()
