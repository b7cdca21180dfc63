"""Models of Transformers cut into stages: the same numbers as the whole model, and its names."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import nn

import deepspeed
from deepspeed.checkpoint.formats.universal.convert import convert
from deepspeed.errors import UsageError
from deepspeed.pipe import PipelineModule
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.harness import ranks, shared_ranks, store_path

pytestmark = pytest.mark.usefixtures("with_transformers")

SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 23}
GATED = {**SIZES, "intermediate_size": 24, "max_position_embeddings": 16, "num_key_value_heads": 1}
GPT2 = {"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": 23, "n_positions": 16}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}

FAMILIES = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GATED, tie_word_embeddings=True)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(**GATED, use_sliding_window=True, sliding_window=2, max_window_layers=2)
    ),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GATED)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, **NO_DROPOUT)),
    "gpt-neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**GATED)),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(**SIZES, max_position_embeddings=16, ffn_dim=24, word_embed_proj_dim=8, dropout=0.0)
    ),
    "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(hidden_size=16, n_layer=3, n_head=2, vocab_size=23)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GATED, num_local_experts=2)),
}


def model(family: str) -> nn.Module:
    hf.logging.set_verbosity_error()
    torch.manual_seed(0)
    return FAMILIES[family]()


def config(stage: int = 0, count: int = 2, **more) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": count,
        "gradient_clipping": 0.3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        **more,
    }


def batches(count: int = 2, replica: int = 0):
    """With padding on the left, which masks and positions must show."""
    generator = torch.Generator().manual_seed(5 + replica)
    for _ in range(count):
        tokens = torch.randint(1, 23, (2, 6), generator=generator)
        mask = torch.ones_like(tokens)
        mask[1, :2] = 0
        yield {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def expected(family: str, replicas: int = 1, steps: int = 1) -> tuple[float, dict]:
    whole = model(family).train()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5, momentum=0.9)
    for _ in range(steps):
        total = 0.0
        optimizer.zero_grad()
        for replica in range(replicas):
            for batch in batches(replica=replica):
                loss = whole(**batch).loss / (2 * replicas)
                loss.backward()
                total += float(loss.detach())
        nn.utils.clip_grad_norm_(whole.parameters(), 0.3)
        optimizer.step()
    return total, whole.state_dict()


def assert_weights(engine, end: dict, within: float = 2e-6) -> None:
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            assert float((param.detach() - end[name]).abs().max()) < within, name


@ranks(2)
def test_the_same_as_the_whole_model():
    cases = {
        name: (stage, schedule)
        for name, stage, schedule in zip(
            FAMILIES,
            (0, 1, 3, 2, 0, 3, 0, 1),
            ("1f1b", "zb-h1", "1f1b", "zbv", "gpipe", "zbv", "interleaved", "1f1b"),
            strict=True,
        )
    }
    for family, (stage, schedule) in cases.items():
        given = model(family)
        own = {name for name, _ in given.named_parameters()}
        names = set(given.state_dict())
        module = PipelineModule(given, num_stages=2, schedule=schedule, partition_method="uniform")
        engine, *_ = deepspeed.initialize(model=module, config=config(stage))
        loss, end = expected(family)
        assert float(engine.train_batch(batches())) == pytest.approx(loss, abs=2e-6), family
        assert_weights(engine, end)
        assert set(module.state_dict()) < names
        blocks = module.cut.outline.blocks
        assert len(module.get_submodule(blocks)) < 3  # the other's blocks are gone from the model itself
        assert len(given.get_submodule(blocks)) < 3
        assert {name for name, _ in module.named_parameters()} < own
        engine.destroy()


@shared_ranks(2)
def test_evaluation_checkpointing_and_tensors_alone():
    module = PipelineModule(model("gpt2"), num_stages=2, partition_method="type:gpt2block")
    more = {"pipeline": {"activation_checkpoint_interval": 1}}
    engine, *_ = deepspeed.initialize(model=module, config=config(3, **more))
    loss, end = expected("gpt2")
    assert float(engine.train_batch(batches())) == pytest.approx(loss, abs=2e-6)
    assert_weights(engine, end)
    whole = model("gpt2").eval()
    whole.load_state_dict(end)
    tokens = next(batches())["input_ids"]
    found = engine.inference_batch(iter([(tokens, tokens)]), num_micro_batches=1)
    if engine.is_last_stage():
        assert torch.allclose(found[0], whole(tokens).logits, atol=1e-5)
    else:
        assert found is None


def loaded(path: Path, tag: str, stage: int, end: dict, stages: int = 2, **options) -> object:
    """An engine with a checkpoint in it, whose weights are the expected ones."""
    module = PipelineModule(model("llama"), num_stages=stages, **options) if stages else model("llama")
    engine, *_ = deepspeed.initialize(model=module, config=config(stage, 2 if stages else 1))
    engine.load_checkpoint(str(path), tag=tag)
    assert_weights(engine, end)
    return engine


@ranks(2)
def test_checkpoints_fit_the_whole_model_both_ways():
    _, end = expected("llama")
    for stage in (1, 3):
        module = PipelineModule(model("llama"), num_stages=2)
        engine, *_ = deepspeed.initialize(model=module, config=config(stage))
        engine.train_batch(batches())
        path = Path(f"{store_path()}-{stage}")
        engine.save_checkpoint(str(path), tag="cut")
        engine.destroy()
        plain = loaded(path, "cut", stage, end, stages=0)
        plain.save_checkpoint(str(path), tag="whole")
        plain.destroy()
        loaded(path, "whole", stage, end, schedule="zbv").destroy()
        if deepspeed.comm.get_rank() == 0:
            fresh = model("llama")
            fresh.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(str(path), "cut"))
            assert all(torch.allclose(value, end[name], atol=2e-6) for name, value in fresh.state_dict().items())
            convert(path / "cut", path / "universal")
        deepspeed.comm.barrier()
        loaded(path, "universal", 1, end, stages=1).destroy()


@shared_ranks(2)
def test_the_first_rank_writes_the_whole_model():
    _, end = expected("gpt2")
    for stage in (1, 3):
        module = PipelineModule(model("gpt2"), num_stages=2)
        zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
        engine, *_ = deepspeed.initialize(model=module, config=config(zero_optimization=zero))
        engine.train_batch(batches())
        path = Path(f"{store_path()}-{stage}")
        assert engine.save_16bit_model(str(path), "model.safetensors")
        engine.destroy()
        if dist.get_rank() == 0:
            model("gpt2").config.save_pretrained(path)
        dist.barrier()
        again = hf.GPT2LMHeadModel.from_pretrained(path)
        assert all(torch.allclose(value, end[name], atol=2e-6) for name, value in again.state_dict().items())


@shared_ranks(2)
def test_layers_of_other_ranks_are_let_go():
    given = model("mistral")
    head, block = weakref.ref(given.lm_head.weight), weakref.ref(given.model.layers[0].mlp.up_proj.weight)
    module = PipelineModule(given, num_stages=2, partition_method="uniform")
    gc.collect()
    assert (head() is None) == module.first
    assert (block() is None) == module.last
    row = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    weights = [weakref.ref(layer.weight) for layer in row]
    pair = PipelineModule(row, num_stages=2, partition_method="uniform", loss_fn=nn.functional.mse_loss)
    del row
    gc.collect()
    assert [weight() is None for weight in weights] == [pair.stage_id == 1, pair.stage_id == 0]
    assert "layers 0 to 0 (Linear); stage 1" in pair.describe()


@shared_ranks(1)
def test_what_cannot_be_cut_says_why():
    with pytest.raises(UsageError, match="LlamaForSequenceClassification is cut without its loss"):
        PipelineModule(hf.LlamaForSequenceClassification(hf.LlamaConfig(**GATED)), num_stages=1)
    with pytest.raises(UsageError, match=r"word_embeddings\.weight is shared in a way that cannot be cut"):
        PipelineModule(hf.BertForMaskedLM(hf.BertConfig(**SIZES, intermediate_size=24)), num_stages=1)
    with pytest.raises(UsageError, match=r"Linear has 0 lists"):
        PipelineModule(nn.Linear(2, 2), num_stages=1)
    with torch.device("meta"), pytest.raises(UsageError, match="no values"):
        PipelineModule(model("llama"), num_stages=1)
    shared = model("llama")
    shared.model.layers[1].mlp = shared.model.layers[0].mlp
    with pytest.raises(UsageError, match=r"model\.layers\.1\.mlp.* is shared with model\.layers\.0"):
        PipelineModule(shared, num_stages=1)
    with pytest.raises(UsageError, match="expected a list of layers"):
        PipelineModule("layers", num_stages=1)
