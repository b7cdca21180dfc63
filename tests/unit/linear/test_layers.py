"""Linear layers over frozen weights: what they compute, what trains, what they refuse; adapters in PEFT's files."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from deepspeed import comm
from deepspeed.comm.codec import block_codec
from deepspeed.errors import CheckpointError, UsageError
from deepspeed.linear import (
    Init,
    LoRAConfig,
    LoRAOptimizedLinear,
    OptimizedLinear,
    QuantizationConfig,
    QuantizedLinear,
    QuantizedParameter,
    init_lora,
    load_adapters,
    save_adapters,
)
from deepspeed.linear.optimized_linear import _fingerprint
from deepspeed.linear.quantization import WeightCodes

FORMS = {
    "fp8_e4m3": QuantizationConfig(group_size=64),
    "fp8_e5m2": QuantizationConfig(mantissa_bits=2, group_size=64),
    "fp6": QuantizationConfig(q_bits=6, group_size=64),
    "int8": QuantizationConfig(q_dtype=torch.int8, group_size=64),
    "int4": QuantizationConfig(q_bits=4, q_dtype=torch.int8, group_size=64),
}


def rounded(weight, form, group=64):
    codec, flat = block_codec(form, group), weight.detach().reshape(1, -1)
    return codec.decode(codec.encode(flat), torch.empty_like(flat)).view_as(weight)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 16)
        self.q_proj, self.o_proj = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.lm_head = nn.Linear(16, 7, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        return self.lm_head(self.o_proj(torch.tanh(self.q_proj(self.embed(ids)))))


@pytest.mark.parametrize("form", list(FORMS))
def test_codes_say_what_is_computed(form):
    """Forward and the gradient of the input are those of the widened weight; autograd keeps codes, not the weight."""
    torch.manual_seed(0)
    with Init(quant_config=FORMS[form]):
        layer = nn.Linear(32, 16)
    torch.manual_seed(0)
    plain = nn.Linear(32, 16)
    assert isinstance(layer, QuantizedLinear)
    assert FORMS[form].form == form
    plain.weight.data = rounded(plain.weight, form)
    x = torch.randn(3, 32, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        found = layer(x)
    assert [each.dtype for each in kept] == [torch.uint8]
    expected = plain(x)
    torch.testing.assert_close(found, expected)
    (mine,), (theirs,) = torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(mine, theirs)
    assert layer.weight.nbytes == FORMS[form].codec.nbytes(32 * 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
    layer.bfloat16()
    assert layer.full_weight().dtype is torch.bfloat16
    assert layer.weight.dtype is torch.uint8
    values = {"weight": torch.randn(16, 32), "bias": torch.zeros(16)}
    layer.load_state_dict(values)
    torch.testing.assert_close(layer.full_weight(), rounded(values["weight"], form).bfloat16())


def test_the_factory_makes_what_is_asked_for():
    assert type(OptimizedLinear(4, 8)) is nn.Linear
    assert type(OptimizedLinear(64, 8, quantization_config=QuantizationConfig())) is QuantizedLinear
    layer = OptimizedLinear(64, 8, bias=True, lora_config=LoRAConfig(lora_r=2), dtype=torch.float32)
    assert type(layer) is LoRAOptimizedLinear
    x = torch.randn(3, 64)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    layer(x).sum().backward()
    assert {name for name, param in layer.named_parameters() if param.grad is not None} == {
        "lora_weight_1.weight",
        "lora_weight_2.weight",
    }


def test_the_number_of_a_weight_that_is_no_parameter(monkeypatch):
    """It does not depend on how ranks share the weight, nor on what lies between codes and scales."""
    weight, config = torch.randn(16, 16), FORMS["int8"]
    monkeypatch.setattr(comm, "all_reduce", lambda tensor, group: None)

    def number(ranks, between):
        codes, total = WeightCodes(config.codec, weight.shape, ranks), 0
        for rank, part in enumerate(weight.view(ranks, -1)):
            message = torch.full((1, config.codec.nbytes(part.numel())), between, dtype=torch.uint8)
            held = config.codec.encode(part.view(1, -1), message).view(-1)
            total += _fingerprint(held, SimpleNamespace(rank=rank, group=None), codes)
        return total % 2**64

    assert len({number(1, 7), number(1, 9), number(2, 7), number(4, 7)}) == 1


def test_a_parameter_of_codes():
    value = torch.randn(8, 64, dtype=torch.bfloat16)
    param = QuantizedParameter(value, quantization_config=FORMS["int8"])
    torch.testing.assert_close(param.dequantized(), rounded(value, "int8"))
    assert isinstance(param, nn.Parameter)
    wide = copy.deepcopy(param).to(torch.float32)
    assert (wide.dtype, wide.dequantized().dtype) == (torch.uint8, torch.float32)
    param.offload()
    param.offload(revert=True)
    assert torch.equal(param, wide)


def test_weights_are_loaded_before_adapters_come():
    """As `from_pretrained` does: built without values, filled, and finished by `init_lora`."""
    torch.manual_seed(0)
    plain = Block()
    with Init(LoRAConfig(lora_r=2, delay_lora_init=True, target_mods=["q_proj"]), FORMS["int4"]):
        with torch.device("meta"):
            model = Block()
        model.to_empty(device="cpu")
        model.load_state_dict(plain.state_dict())
    with pytest.raises(UsageError, match="the layer has adapters"):
        layer = OptimizedLinear(64, 8, lora_config=LoRAConfig(lora_r=2))
        layer.disable()
    init_lora(model)
    init_lora(model)  # harmless
    torch.testing.assert_close(model.q_proj.full_weight(), rounded(plain.q_proj.weight, "int4"))
    assert type(model.o_proj) is nn.Linear
    assert {name for name, param in model.named_parameters() if param.requires_grad} == {
        "q_proj.lora_weight_1.weight",
        "q_proj.lora_weight_2.weight",
    }
    with pytest.raises(UsageError, match="meta device and has no values"), torch.device("meta"):
        OptimizedLinear(64, 8, lora_config=LoRAConfig(lora_r=2))


def test_tied_weights_stay():
    with Init(quant_config=FORMS["int8"]):
        model = Block()
    assert isinstance(model.q_proj, QuantizedLinear)
    assert type(model.lm_head) is nn.Linear


def adapted(**given):
    torch.manual_seed(0)
    with Init(LoRAConfig(**{"lora_r": 2, "lora_alpha": 6.0, "target_mods": ["q_proj", "o_proj"], **given})):
        return Block()


def test_files_of_peft(tmp_path):
    """PEFT computes the same with the adapter that is written here, and what it writes is loaded."""
    peft = pytest.importorskip("peft")
    model = adapted()
    for layer in (model.q_proj, model.o_proj):
        nn.init.normal_(layer.lora_weight_2.weight)
    save_adapters(model, tmp_path / "ours")
    ids = torch.arange(5)
    torch.manual_seed(0)
    theirs = peft.PeftModel.from_pretrained(Block(), tmp_path / "ours", is_trainable=True)
    torch.testing.assert_close(theirs(ids), model(ids))
    for name, param in theirs.named_parameters():
        if "lora_" in name:
            param.data.add_(1)
    expected = theirs(ids)
    theirs.save_pretrained(tmp_path / "theirs")
    load_adapters(model, tmp_path / "theirs")
    torch.testing.assert_close(model(ids), expected)
    with pytest.raises(CheckpointError, match=r"lora_A.weight has the shape \(2, 16\) there and \(4, 16\) in the mod"):
        load_adapters(adapted(lora_r=4), tmp_path / "ours")
    with pytest.raises(CheckpointError, match=r"o_proj.lora_A.weight is not in the model; .* and 1 more|o_proj"):
        load_adapters(adapted(target_mods=["q_proj"]), tmp_path / "ours")
    with pytest.raises(CheckpointError, match=r"lora_alpha 6.0 there and 7.0"):
        load_adapters(adapted(lora_alpha=7.0), tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["o_proj", "q_proj"]
    for change, said in (
        ({"use_dora": True}, "asks for use_dora"),
        ({"kasa_config": {"beta": 1}}, "asks for kasa_config"),
        ({"alora_invocation_tokens": [1]}, "asks for alora_invocation_tokens"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4', by which PEFT changes the frozen"),
        ({"alpha_pattern": {"q_.*": 3.0}}, r"alpha_pattern has 'q_\.\*', with which no name of a layer ends"),
        ({"alpha_pattern": {"q_proj": 3.0}}, "q_proj has lora_alpha 3.0 there and 6.0 in the model"),
    ):
        (tmp_path / "ours" / "adapter_config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(CheckpointError, match=said):
            load_adapters(model, tmp_path / "ours")
    with pytest.raises(CheckpointError, match="has no adapter in the format of PEFT"):
        load_adapters(model, tmp_path)
    with pytest.raises(UsageError, match="save_adapters: the model has no layer with adapters"):
        save_adapters(Block(), tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LoRAConfig(lora_r=0), "lora_r is 0"),
        (lambda: LoRAConfig(base_weight_sharding=0), "base_weight_sharding is 0"),
        (lambda: LoRAConfig(offload=True), r"offload_ratio is 0.0; expected a share in \(0, 1\]"),
        (lambda: LoRAConfig(offload=True, offload_ratio=1.5), "offload_ratio is 1.5"),
        (lambda: LoRAConfig(offload_ratio=0.5), "offload_ratio is 0.5 and offload is false"),
        (lambda: QuantizationConfig(q_bits=5), "QuantizationConfig: 5 bits"),
        (lambda: QuantizationConfig(q_bits=6, q_dtype=torch.int8), "q_bits is 6 and q_dtype torch.int8"),
        (lambda: QuantizationConfig(q_dtype=torch.float16), "q_dtype torch.float16"),
        (lambda: QuantizationConfig(q_bits=6, group_size=30), "group_size is 30; expected a multiple of 4"),
        (lambda: QuantizedLinear(16, 16), r"512, which does not divide the 256 elements of \(16, 16\).* such as 256"),
        (lambda: QuantizedParameter(torch.ones(4, dtype=torch.uint8)), "data is torch.uint8"),
        (lambda: QuantizedParameter(torch.ones(512), requires_grad=True), "requires_grad is true"),
        (lambda: Init(), "neither lora_config nor quant_config"),
        (lambda: init_lora(Block()), "the model has no LoRAOptimizedLinear"),
        (lambda: adapted(target_mods=["qq_proj"]), r"target_mods \['qq_proj'\] match none of the 2 .*q_proj"),
        (lambda: adapted(base_weight_sharding=2), "base_weight_sharding is 2, but this process is alone"),
    ],
)
def test_what_is_wrong(make, message):
    with pytest.raises(UsageError, match=message):
        make()
