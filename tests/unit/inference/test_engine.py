"""`init_inference` on one rank: results are those of the model, whatever computes them."""

from __future__ import annotations

import copy

import pytest
import torch
from deepspeed.model_implementations import DeepSpeedTransformerInference
from deepspeed.module_inject import replace_transformer_layer
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    pipeline,
)

import deepspeed
from deepspeed.errors import FeatureUnavailable, UsageError


def llama(**keys):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=2,
        **keys,
    )
    return LlamaForCausalLM(config).eval()


def ids(*shape):
    return torch.randint(3, 100, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("keys", "within"),
    [
        ({"dtype": "fp32"}, 1e-6),
        ({"dtype": "fp32", "replace_with_kernel_inject": True}, 1e-5),
        ({"dtype": "bf16"}, 0.02),
        ({"dtype": "int8"}, 0.02),
        ({"dtype": "fp32", "quant": {"activation": {"num_bits": 8}}}, 0.03),
        ({"dtype": "fp32", "quant": {"weight": {"num_bits": 4, "q_type": "asymmetric"}}}, 0.2),
        ({"dtype": "fp32", "ragged": {"quantization": {"quantization_mode": "wf6af16"}}}, 0.1),
    ],
)
def test_logits(keys, within):
    model, plain = llama(), llama()
    expected = plain(ids(2, 9)).logits
    engine = deepspeed.init_inference(model, **keys)
    found = engine(ids(2, 9)).logits.float()
    assert engine.module is model
    torch.testing.assert_close(found, expected, atol=within, rtol=0)
    quantised = "quant" in keys or "ragged" in keys or keys["dtype"] == "int8"
    assert bool(engine._prepared.packed) is quantised
    assert quantised is ("weight" not in dict(model.model.layers[0].mlp.up_proj.named_parameters()))


def test_blocks_of_fused_kernels():
    model = llama()
    engine = deepspeed.init_inference(model, dtype="fp32", kernel_inject=True)
    assert all(isinstance(block, DeepSpeedTransformerInference) for block in model.model.layers)
    engine.destroy()
    assert not any(isinstance(block, DeepSpeedTransformerInference) for block in model.model.layers)
    kind = type(model.model.layers[0])
    assert replace_transformer_layer(kind, model) is model
    assert isinstance(model.model.layers[0], DeepSpeedTransformerInference)
    with pytest.raises(UsageError, match="no module of the class Bilinear"):
        replace_transformer_layer(nn.Bilinear, model)


def test_other_families():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    bert = BertModel(BertConfig(**sizes, vocab_size=100)).eval()
    t5 = T5ForConditionalGeneration(
        T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=100, decoder_start_token_id=0)
    ).eval()
    x = ids(2, 7)
    for model, call in ((bert, lambda m: m(x)[0]), (t5, lambda m: m(input_ids=x, decoder_input_ids=x)[0])):
        expected = call(copy.deepcopy(model))
        engine = deepspeed.init_inference(model, dtype="fp32", replace_with_kernel_inject=True)
        torch.testing.assert_close(call(engine), expected, atol=1e-5, rtol=1e-5)
    expected = copy.deepcopy(t5).generate(x, max_new_tokens=5)
    assert torch.equal(deepspeed.init_inference(t5, dtype="fp32").generate(x, max_new_tokens=5), expected)


def test_gpt2_in_fewer_bits():
    """Its layers are Conv1D, whose weights are turned."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100, n_positions=64)).eval()
    expected = copy.deepcopy(model)(ids(1, 8)).logits
    engine = deepspeed.init_inference(model, dtype="fp32", quant={"weight": {"num_bits": 8}})
    assert len(engine._prepared.packed) == 8
    torch.testing.assert_close(engine(ids(1, 8)).logits, expected, atol=0.05, rtol=0)
    assert model.transformer.h[0].attn.c_attn.weight.shape == (64, 192)


class Pipe:
    """The shape of a pipeline of Diffusers."""

    def __init__(self):
        self.unet, self.vae, self.name = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.Linear(4, 4), "pipe"

    @property
    def components(self):
        return {"unet": self.unet, "vae": self.vae, "scheduler": object()}

    def __call__(self, x):
        return self.vae(self.unet(x))


def test_a_pipeline_object():
    pipe = Pipe()
    x = torch.randn(2, 4)
    expected = pipe(x)
    assert deepspeed.init_inference(pipe, dtype="fp32", replace_with_kernel_inject=True) is pipe
    torch.testing.assert_close(pipe(x), expected)
    assert not pipe.unet.training
    with pytest.raises(UsageError, match="found dict without any"):
        deepspeed.init_inference({})


def test_times():
    engine = deepspeed.init_inference(nn.Linear(2, 2), dtype="fp32")
    with pytest.raises(UsageError, match=r"call profile_model_time\(\)"):
        engine.model_times()
    engine.profile_model_time()
    engine(torch.ones(1, 2))
    assert len(engine.model_times()) == 1
    assert engine.model_times() == []


def test_transformers_pipeline():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({f"w{i}": i for i in range(100)}, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="w0", eos_token="w2")
    made = pipeline("text-generation", model=llama(), tokenizer=tokenizer, device="cpu")
    options = {"max_new_tokens": 5, "do_sample": False}
    expected = made("w5 w9 w20", **options)
    made.model = deepspeed.init_inference(made.model, dtype="fp32")
    assert made("w5 w9 w20", **options) == expected
    assert made.model._paged._llm is not None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"keep_module_on_host": True}, "keep_module_on_host: layers that stream"),
        ({"zero": {"stage": 3, "offload_param": {"device": "cpu"}}}, r"zero\.offload_param: layers that stream"),
        ({"ragged": {"memory": {"device": "1GB"}}}, r"ragged\.memory: layers that stream"),
    ],
)
def test_what_is_not_there_yet(keys, message):
    with pytest.raises(FeatureUnavailable, match=message):
        deepspeed.init_inference(llama(), dtype="fp32", **keys)


def test_what_cannot_be():
    with pytest.raises(UsageError, match="set_empty_params, and no checkpoint gives them values"):
        deepspeed.init_inference(llama(), dtype="fp32", set_empty_params=True)
    with pytest.raises(UsageError, match="has no layer down; its layers are"):
        deepspeed.init_inference(llama(), dtype="fp32", injection_policy={type(llama().model.layers[0]): ("down",)})
    with pytest.raises(ValueError, match="groups of a row have 128 columns"):
        deepspeed.init_inference(llama(), dtype="fp32", quant={"weight": {"q_groups": 4}})
