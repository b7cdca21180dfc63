"""`DeepSpeedTransformerLayer` beside a plain layer of BERT."""

import json
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional

import deepspeed
from deepspeed.errors import UsageError
from deepspeed.ops.transformer.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

HIDDEN, HEADS, INNER, EPS = 16, 4, 40, 1e-12
SHAPE = {"hidden_size": HIDDEN, "heads": HEADS, "intermediate_size": INNER, "num_hidden_layers": 2}
NO_DROPOUT = {"attn_dropout_ratio": 0.0, "hidden_dropout_ratio": 0.0, "initializer_range": 0.02}
MEMORY = ("normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint")


class Plain(nn.Module):
    """As the papers write it."""

    def __init__(self, first):
        super().__init__()
        torch.manual_seed(0)
        self.first = first
        sizes = [(HIDDEN, HIDDEN)] * 4 + [None, (HIDDEN, INNER), (INNER, HIDDEN), None]
        self.parts = nn.ModuleList(
            nn.LayerNorm(HIDDEN, eps=EPS) if size is None else nn.Linear(*size) for size in sizes
        )
        for part in self.parts:
            nn.init.normal_(part.weight, mean=0.3, std=0.3)
            nn.init.normal_(part.bias, std=0.3)

    def attention(self, x, mask):
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.parts[:3])
        scores = q @ k.transpose(-1, -2) / (HIDDEN // HEADS) ** 0.5
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        return self.parts[3]((weights @ v).transpose(1, 2).flatten(2))

    def inner(self, x):
        return self.parts[6](functional.gelu(self.parts[5](x), approximate="tanh"))

    def forward(self, x, mask=None):
        of_attention, other = self.parts[4], self.parts[7]
        if self.first:
            x = x + self.attention(other(x), mask)
            return x + self.inner(of_attention(x))
        x = of_attention(x + self.attention(x, mask))
        return other(x + self.inner(x))

    def gradients(self):
        """By the names of the fused layer."""
        names = ("attn_o", "attn_n", "inter_", "output_", "norm_")
        found = {}
        for ending, kind in (("w", "weight"), ("b", "bias")):
            grads = [getattr(part, kind).grad for part in self.parts]
            found["attn_qkv" + ending] = torch.cat(grads[:3])
            found.update({name + ending: grad for name, grad in zip(names, grads[3:], strict=True)})
        return found


def pair(first, dtype=torch.float32, **options):
    plain = Plain(first).to(dtype)
    config = DeepSpeedTransformerConfig(**SHAPE, **NO_DROPOUT, pre_layer_norm=first, **options)
    weights, biases = [part.weight for part in plain.parts], [part.bias for part in plain.parts]
    return plain, DeepSpeedTransformerLayer(config, weights, biases)


def numbers(*shape, dtype=torch.float32, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_and_gradients_are_those_of_a_plain_layer(first, dtype):
    mask = torch.zeros(2, 1, 1, 5)
    mask[1, ..., 3:] = -10000.0
    close = {torch.float32: 1e-5, torch.bfloat16: 0.15, torch.float16: 0.02}[dtype]
    for masked, on in product((None, mask), [(), *((name,) for name in MEMORY), MEMORY]):
        options = {**dict.fromkeys(on, True), "fp16": dtype is torch.float16}
        plain, layer = pair(first, dtype, **options)
        inputs = [numbers(2, 5, HIDDEN, dtype=dtype).requires_grad_() for _ in range(2)]
        found = layer(inputs[0], masked)
        expected = plain(inputs[1], None if masked is None else masked.to(dtype))
        torch.testing.assert_close(found, expected, rtol=close, atol=close)
        weight = numbers(2, 5, HIDDEN, dtype=dtype, seed=2)
        for out in (found, expected):
            (out * weight).sum().backward()
        scale = {name: grad.abs().max().clamp(min=1) for name, grad in plain.gradients().items()}
        for name, grad in plain.gradients().items():
            mine = layer.get_parameter(name).grad / scale[name]
            torch.testing.assert_close(mine, grad / scale[name], rtol=close, atol=close, msg=f"{name} {on}")
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=close, atol=10 * close)


def kept(layer):
    """Bytes that a forward keeps for its backward, each memory once."""
    seen = {param.untyped_storage().data_ptr() for param in layer.parameters()}
    alive, total = [], 0

    def pack(tensor):
        nonlocal total
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            alive.append(storage)
            total += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(numbers(4, 32, HIDDEN).requires_grad_())
    del out
    return total


@pytest.mark.parametrize("first", [True, False])
def test_options_of_memory_keep_less(first):
    whole = kept(pair(first)[1])
    for name in MEMORY:
        assert kept(pair(first, **{name: True})[1]) < whole, name


def test_dropout_draws_the_same_when_it_is_computed_again():
    results = []
    for on in ((), MEMORY):
        options = {**SHAPE, "attn_dropout_ratio": 0.3, "hidden_dropout_ratio": 0.2, "initializer_range": 0.5}
        torch.manual_seed(3)
        layer = DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**options, **dict.fromkeys(on, True)))
        x = numbers(2, 5, HIDDEN).requires_grad_()
        torch.manual_seed(4)
        out = layer(x)
        out.sum().backward()
        results.append((out.detach(), x.grad))
        assert not torch.equal(layer(x), out)
        layer.eval()
        assert torch.equal(layer(x), layer(x))
        assert layer.config.training is False
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two)


def test_weights_of_its_own_tuples_and_files(tmp_path):
    torch.manual_seed(0)
    options = {"hidden_size": 64, "heads": 4, "num_hidden_layers": 8, **NO_DROPOUT, "return_tuple": True}
    (tmp_path / "layer.json").write_text(json.dumps({**options, "intermediate_size": 256}))
    config = DeepSpeedTransformerConfig.from_json_file(str(tmp_path / "layer.json"))
    assert vars(config) == vars(DeepSpeedTransformerConfig(**options))
    assert vars(DeepSpeedTransformerConfig.from_dict(options)) == vars(config)
    layer = deepspeed.DeepSpeedTransformerLayer(config)
    assert layer.inter_w.shape == (256, 64)
    assert layer.inter_w.std().item() == pytest.approx(0.02, rel=0.1)
    assert layer.output_w.std().item() == pytest.approx(0.02 / 4, rel=0.1)
    assert (layer.norm_w == 1).all()
    assert (layer.attn_qkvb == 0).all()
    layer.init_transformer_weights()
    assert layer.output_w.std().item() == pytest.approx(0.02, rel=0.1)
    (out,) = layer(numbers(1, 3, 64))
    assert out.shape == (1, 3, 64)


def test_dropout_is_off_by_default():
    torch.manual_seed(0)
    layer = DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**SHAPE, initializer_range=0.02)).train()
    assert (layer.config.attn_dropout_ratio, layer.config.hidden_dropout_ratio) == (-1, -1)
    x = numbers(1, 3, HIDDEN)
    assert torch.equal(layer(x), layer(x))


def test_what_cannot_be_is_an_error_with_its_name():
    for wrong in (
        {"hidden_size": 0},
        {"hidden_size": 16.0},
        {"heads": 3},
        {"heads": "4"},
        {"attn_dropout_ratio": -0.5},
        {"hidden_dropout_ratio": None},
        {"initializer_range": -1},
        {"layer_norm_eps": -1.0},
    ):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**{**SHAPE, **NO_DROPOUT, **wrong}))
    plain, layer = pair(True)
    x = numbers(1, 3, HIDDEN)
    for name in ("head_mask", "past_key_value", "encoder_hidden_states", "grads"):
        with pytest.raises(UsageError, match=name):
            layer(x, **{name: x})
    for wrong in (numbers(3, HIDDEN), numbers(1, 3, HIDDEN + 4)):
        with pytest.raises(UsageError, match=r"hidden_states is of shape .* expected \[batch, tokens, 16\]"):
            layer(wrong)
    torch.testing.assert_close(layer(x, None, None, None, None, None, False), layer(x))
    with pytest.raises(UsageError, match="output_attentions"):
        layer(x, output_attentions=True)
    layer.config.fp16 = True
    with pytest.raises(UsageError, match=r"fp16 is true, but the parameters are torch\.float32"):
        layer(x)
    with pytest.raises(UsageError, match="given together"):
        DeepSpeedTransformerLayer(layer.config, [part.weight for part in plain.parts])
    wrong = [part.weight for part in reversed(plain.parts)]
    with pytest.raises((UsageError, RuntimeError)):
        DeepSpeedTransformerLayer(layer.config, wrong, [part.bias for part in plain.parts])


@pytest.mark.parametrize("first", [True, False])
def test_a_batch_without_samples_or_tokens(first):
    for shape in ((0, 5, HIDDEN), (2, 0, HIDDEN)):
        _, layer = pair(first, **dict.fromkeys(MEMORY, True))
        x = numbers(*shape).requires_grad_()
        out = layer(x)
        out.sum().backward()
        assert out.shape == x.grad.shape == shape
        assert all((param.grad == 0).all() for param in layer.parameters())


@pytest.mark.parametrize("first", [True, False])
def test_a_mask_of_bools_says_what_takes_part(first):
    _, layer = pair(first)
    x = numbers(2, 5, HIDDEN)
    takes_part = torch.tensor([[True] * 5, [True, True, True, False, False]]).view(2, 1, 1, 5)
    added = torch.zeros(2, 1, 1, 5).masked_fill(~takes_part, -10000.0)
    torch.testing.assert_close(layer(x, takes_part), layer(x, added))
