"""`init_inference` on one rank: results are those of the model, whatever computes them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from accelerate import init_empty_weights
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
from deepspeed.errors import CheckpointError, DeepSpeedConfigError, UsageError


def llama(**keys):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 256}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "pad_token_id": 0, "eos_token_id": 2, **keys})).eval()


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


_ON_HOST = {"stage": 3, "offload_param": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("keys", "tiers"),
    [
        ({"keep_module_on_host": True}, {"host"}),
        ({"zero": _ON_HOST, "keep_module_on_host": True, "dtype": "int8"}, {"host"}),
        ({"zero": {"stage": 3, "offload_param": {"device": "nvme", "max_in_cpu": 0}}}, {"disk"}),
        ({"ragged": {"memory": {"device": "200KB", "host": "150KB", "disk": "1GB"}}}, {"device", "host", "disk"}),
        ({"ragged": {"memory": {"device": "1GB"}}, "kernel_inject": True}, {"device"}),
        ({"ragged": {"memory": {"device": 0}, "quantization": {"quantization_mode": "w8a16"}}}, {"host"}),
    ],
)
def test_weights_that_stream(tmp_path, monkeypatch, keys, tiers):
    """Of a module whose values are there, and of one that gets them from files; forwards and generate."""
    folder, plain = tmp_path / "model", llama()
    plain.save_pretrained(folder)
    for section, name in ((keys.get("zero", {}).get("offload_param"), "nvme_path"), (keys.get("ragged"), "path")):
        memory = section.get("memory", section) if section else {}
        if memory.get("device") == "nvme" or memory.get("disk"):
            memory[name] = str(tmp_path)
    keys, said = {"dtype": "fp32", "enable_cuda_graph": True, **keys}, []
    monkeypatch.setattr("deepspeed.inference.engine.log_dist", said.append)
    within = 0.02 if keys["dtype"] == "int8" or "quantization" in keys.get("ragged", {}) else 1e-5
    expected = plain(ids(2, 9)).logits
    for model, more in ((llama(), {}), (empty(), {"checkpoint": str(folder)})):
        engine = deepspeed.init_inference(model, **keys, **more)
        stream = engine._prepared.stream
        found = {unit.tier for unit in stream.units if unit.modules and unit.rest is not None} if stream else set()
        assert found == tiers - {"device"}
        assert any("weights that stream" in line for line in said) is (stream is not None)
        said.clear()
        for _ in range(2):
            torch.testing.assert_close(engine(ids(2, 9)).logits.float(), expected, atol=within, rtol=0)
        if within < 0.01:
            assert torch.equal(
                engine.generate(ids(2, 9), max_new_tokens=4), plain.generate(ids(2, 9), max_new_tokens=4)
            )
            assert engine._paged._llm is not None
        engine.destroy()
        torch.testing.assert_close(model(ids(2, 9)).logits.float(), expected, atol=within, rtol=0)


def empty():
    with init_empty_weights(include_buffers=False):
        return type(llama())(llama().config)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ragged": {"memory": {"device": 0}}, "zero": _ON_HOST}, "both say where weights live"),
        ({"keep_module_on_host": True, "save_mp_checkpoint_path": "x"}, "save_mp_checkpoint_path is not possible with"),
        ({"keep_module_on_host": True, "moe": {"ep_size": 2}}, "moe.ep_size is not possible with keep_module_on_host"),
        ({"ragged": {"memory": {"device": 0, "host": 1000}}}, r"memory: .* a rank may use device 0 B \(0 B taken\)"),
    ],
)
def test_weights_that_cannot_stream(keys, message):
    with pytest.raises(DeepSpeedConfigError, match=message):
        deepspeed.init_inference(llama(), dtype="fp32", **keys)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_what_cannot_be():
    with pytest.raises(UsageError, match="set_empty_params, and no checkpoint gives them values"):
        deepspeed.init_inference(llama(), dtype="fp32", set_empty_params=True)
    with pytest.raises(UsageError, match="has no layer down; its layers are"):
        deepspeed.init_inference(llama(), dtype="fp32", injection_policy={type(llama().model.layers[0]): ("down",)})
    engine = deepspeed.init_inference(
        llama(), dtype="fp32", min_out_tokens=65, ragged={"state_manager": {"memory_config": _TWO_BLOCKS}}
    )
    with pytest.raises(UsageError, match=r"min_out_tokens is 65, but ragged\.state_manager has room .* of 64 tokens"):
        engine.generate(ids(1, 4), max_new_tokens=2)


_TWO_BLOCKS = {"mode": "allocate", "size": 2}


@pytest.mark.parametrize(
    ("quant", "scales", "kept"),
    [
        ({"weight": {"q_groups": 1}}, 1, ()),
        ({"weight": {"q_groups": 3}}, 3, ()),
        ({"weight": {"q_groups": 99}}, 3, ()),
        ({"weight": {"num_bits": 4}}, 3, ()),
        ({"weight": {"post_init_quant": {"down_proj": {"num_bits": 4, "group_size": 256}}}}, 2, ()),
        ({"weight": {}, "qkv": {"enabled": False}}, 1, ("q_proj", "k_proj", "v_proj")),
        ({"weight": {"enabled": False}}, 0, ("up_proj", "o_proj", "down_proj")),
        ({"enabled": False, "weight": {}}, 0, ("up_proj",)),
    ],
)
def test_what_quant_says(quant, scales, kept):
    """How many scales a row of 300 numbers has, and which layers keep their weights."""
    model = llama(intermediate_size=300)
    deepspeed.init_inference(model, dtype="fp32", quant=quant)
    layers = {name.rpartition(".")[2]: each for name, each in model.model.layers[0].named_modules()}
    held = {
        name: each._buffers["packed_scales"].shape[1]
        for name, each in layers.items()
        if "packed_scales" in each._buffers
    }
    assert held.get("down_proj", 0) == scales
    assert not held.keys() & set(kept)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"quant": {"weight": {"post_init_quant": {"dwn": {}}}}}, "post_init_quant.dwn: no module of the model has"),
        ({"moe": {"ep_size": 2}}, "moe.ep_size is 2: "),
    ],
)
def test_what_does_not_suit_the_model(keys, message):
    with pytest.raises(DeepSpeedConfigError, match=message):
        deepspeed.init_inference(llama(), dtype="fp32", **keys)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_model_on_the_meta_device(tmp_path):
    """Its parameters come from files; buffers are computed, or refused where the model does not say how."""
    llama().save_pretrained(tmp_path)
    with deepspeed.OnDevice(dtype=torch.float32, device="meta"):
        model, plain = type(llama())(llama().config), nn.BatchNorm1d(4)
    engine = deepspeed.init_inference(model, dtype="fp32", checkpoint=str(tmp_path))
    torch.testing.assert_close(engine(ids(2, 9)).logits, llama()(ids(2, 9)).logits, atol=1e-6, rtol=0)
    with pytest.raises(UsageError, match=r"the buffer 0\.running_mean is on the meta device"):
        deepspeed.init_inference(nn.Sequential(plain), dtype="fp32", checkpoint=str(tmp_path))


def test_files_of_other_programs(tmp_path):
    """Ranks of Megatron and of DeepSpeed, torch's own files, and those that say too little."""
    expected, state = llama()(ids(2, 9)).logits, llama().state_dict()
    rows = ("o_proj.weight", "down_proj.weight")

    def of(rank, name, tensor):
        if tensor.dim() == 1 or "embed" in name or "lm_head" in name:
            return tensor
        return tensor.chunk(2, 1 if name.endswith(rows) else 0)[rank].clone()

    for name, parts in (("one.bin", ()), ("mp_rank_0{}_model_states.pt", (0, 1)), ("mp_rank_0{}/model_rng.pt", (0, 1))):
        folder = tmp_path / name.partition("/")[0]
        for rank in parts or (0,):
            file = folder / (name.format(rank) if parts else "pytorch_model.bin")
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"model": {k: of(rank, k, v) for k, v in state.items()} if parts else state}, file)
        engine = deepspeed.init_inference(empty(), dtype="fp32", checkpoint=str(folder))
        torch.testing.assert_close(engine(ids(2, 9)).logits, expected, atol=1e-5, rtol=0)
    torch.save({"h.0.attention.attn_qkvw": torch.ones(2, 2)}, tmp_path / "tp_00.pt")
    with pytest.raises(CheckpointError, match="written by DeepSpeed's injected kernels"):
        deepspeed.init_inference(
            empty(), dtype="fp32", checkpoint={"checkpoints": ["tp_00.pt"], "base_dir": str(tmp_path)}
        )
    (tmp_path / "mp_rank_00").mkdir()
    for checkpoint, message in (
        (str(tmp_path), r"mp_rank_00 has no file model\*"),
        (str(tmp_path / "nothing"), "neither a folder nor a JSON file"),
        ({"checkpoints": []}, "'checkpoints' is"),
        ({"checkpoints": {"other": []}}, "expected 'tp' and 'non_tp'"),
        ({"checkpoints": ["gone.safetensors"]}, "there is no file"),
    ):
        with pytest.raises((UsageError, CheckpointError), match=message):
            deepspeed.init_inference(empty(), dtype="fp32", checkpoint=checkpoint)
