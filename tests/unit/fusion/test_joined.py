"""Packed layers of one input hold views of one weight: the same logits, names, and weights that can be replaced."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from deepspeed.fusion import streamed
from deepspeed.fusion.build import find, put
from deepspeed.fusion.packed_linear import WeightPacking, pack_layers
from deepspeed.fusion.streamed import find_streams
from deepspeed.generate import weights
from tests.unit.generate.families import tiny


@torch.no_grad()
@pytest.mark.parametrize(("mode", "symmetric"), [("w8a16", False), ("w4a16", True), ("wf6af16", True), ("fp8", True)])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_joined_products(monkeypatch, kind, mode, symmetric):
    widths = []

    def counted(x, packed, bias=None):
        widths.append(packed.shape[0])
        return weighed(x, packed, bias)

    weighed = streamed.packed_linear
    monkeypatch.setattr(streamed, "packed_linear", counted)
    model, other = tiny(kind), tiny(kind, seed=1)
    for each in (model, other):
        pack_layers(each, WeightPacking(mode, symmetric=symmetric, exclude=("lm_head",)))
    few, many = torch.arange(5)[None], torch.arange(100)[None]
    before, names = [model(ids).logits for ids in (few, many)], list(model.state_dict())
    found = [(name, swap) for name, _, swap in find_streams(model, joins=True) if "joined" in swap.kernel]
    assert [name.rpartition(".")[2] for name, _ in found] == ["self_attn", "mlp"] * 2
    undone = [swap.put() for _, swap in found]
    for ids, expected in zip((few, many), before, strict=True):
        torch.testing.assert_close(model(ids).logits, expected)
    assert widths == [64, 128] * 2, "q, k and v in one product, gate and up in another; many rows one by one"
    assert list(model.state_dict()) == names
    weights.update(model, tiny(kind, seed=1).state_dict(), None)
    torch.testing.assert_close(model(few).logits, other(few).logits)
    assert len(widths) == 8
    layer = model.model.layers[0].self_attn.q_proj
    layer._buffers["packed_data"] = layer._buffers["packed_data"].clone()  # as what moves weights does
    torch.testing.assert_close(model(few).logits, other(few).logits)
    assert len(widths) == 11, "layers that were moved multiply by their own weights"
    for undo in undone:
        undo()
    torch.testing.assert_close(model(few).logits, other(few).logits)
    assert len(widths) == 11


def test_unlike_weights_are_left_alone():
    model = tiny("llama", num_hidden_layers=1)
    pack_layers(model, WeightPacking("w8a16"), own={"q_proj": WeightPacking("w4a16"), "up_proj": WeightPacking("fp8")})
    assert not [swap for _, _, swap in find_streams(model, joins=True) if "joined" in swap.kernel]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_many_rows_take_one_product_of_plain_weights_that_lie_together(monkeypatch, kind):
    heights = []

    def counted(x, weight, bias=None):
        heights.append(len(weight))
        return product(x, weight, bias)

    product = streamed.functional.linear
    model, ids = tiny(kind), torch.arange(100)[None]
    before, names = model(ids).logits, list(model.state_dict())
    with ExitStack() as stack:
        put(list(find(model, ("mlp",), serves="infer")), stack)
        for _, _, swap in find_streams(model, joins=True):
            stack.callback(swap.put())
        monkeypatch.setattr(streamed.functional, "linear", counted)
        torch.testing.assert_close(model(ids).logits, before)
        joined = {64, 128}
        assert [height for height in heights[:-1] if height in joined] == [64, 128] * 2, "and the head"
        weights.update(model, tiny(kind, seed=1).state_dict(), None)
        torch.testing.assert_close(model(ids).logits, tiny(kind, seed=1)(ids).logits)
        layer, expected = model.model.layers[0].self_attn.q_proj, model(ids).logits
        layer.weight.data = layer.weight.data.clone()  # as what moves weights does
        heights.clear()
        torch.testing.assert_close(model(ids).logits, expected)
        assert [height for height in heights[:-1] if height in joined] == [128, 64, 128]
    assert list(model.state_dict()) == names


@torch.no_grad()
def test_kernels_are_looked_for_again_where_modules_have_changed(monkeypatch):
    searches = []
    monkeypatch.setattr(weights, "find", lambda *given, **keys: searches.append(1) or find(*given, **keys))
    model, ids = tiny("llama"), torch.arange(9)[None]
    expected, repeated = model(ids).logits, weights.RepeatedInjection(model)
    for _ in range(3):
        with ExitStack() as stack:
            repeated.put(stack)
            assert "forward" in vars(model.model.layers[0].mlp)
            torch.testing.assert_close(model(ids).logits, expected)
        assert not any("forward" in vars(each) for each in model.modules())
    assert len(searches) == 1
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *_: None)
    for turns in (2, 2):
        with ExitStack() as stack:
            repeated.put(stack)
            torch.testing.assert_close(model(ids).logits, expected)
        assert len(searches) == turns
