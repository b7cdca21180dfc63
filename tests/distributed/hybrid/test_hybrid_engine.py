"""One set of weights that trains and generates: tokens are Transformers', and training does not notice."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.zero.interface import shards_of
from tests.harness import ranks

pytestmark = pytest.mark.usefixtures("with_transformers")


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 256, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**sizes, **more, eos_token_id=2, attention_dropout=0.2))


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


def train(engine, step):
    batch = ids(2, 12, seed=10 * step)
    loss = engine(input_ids=batch, labels=batch).loss
    engine.backward(loss)
    engine.step()
    return loss.detach()


def plain(engine):
    """A model of its own with the engine's weights."""
    model = llama().eval()
    model.load_state_dict(engine.module_state_dict())
    return model


def prompts(rank):
    """Rows of different lengths, padded on the left; other ones on each rank."""
    rows = ids(3 + rank, 9)
    mask = torch.ones_like(rows)
    mask[1, :4] = 0
    rows[1, :4] = 0
    return {"input_ids": rows, "attention_mask": mask}


@ranks(2)
def test_tokens_and_losses(tmp_path):
    rank = dist.get_rank()
    # ranks hold other prompts, and end at other times
    given = {**prompts(rank), "max_new_tokens": 5 + 9 * rank, "min_new_tokens": 4, "do_sample": False}
    for stage in (0, 1, 2, 3):
        engine, other = start(stage), start(stage, hybrid=False)
        assert type(engine) is deepspeed.DeepSpeedHybridEngine
        for step in range(3):
            expected = plain(engine).generate(**given)
            generate = engine.generate if step else engine.module.generate
            assert torch.equal(generate(**given), expected), (stage, step)
            assert torch.equal(engine.generate(**given, num_beams=2), plain(engine).generate(**given, num_beams=2))
            drawn = [engine.generate(**prompts(rank), max_new_tokens=8, do_sample=True) for _ in range(2)]
            assert not torch.equal(drawn[0][:, :13], drawn[1][:, :13]), "every call draws anew"
            assert all(each.training for each in engine.module.modules())
            assert all(not shard.holds for shard in shards_of(engine.module.parameters()))
            states = torch.get_rng_state()
            losses = []
            for each in (other, engine):
                torch.set_rng_state(states)
                losses.append(train(each, step))
            assert torch.equal(*losses), (stage, step)
        for one, two in zip(engine.module_state_dict().values(), other.module_state_dict().values(), strict=True):
            assert torch.equal(one, two)
        assert [each[:20] for each in engine._generation._paged._reasons] == ["it is asked for num_"], "else by pages"
        engine.destroy(), other.destroy()
        assert "generate" not in vars(engine.module)
