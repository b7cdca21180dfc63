"""Models with something put in their modules: copied, pickled, and given to a second engine."""

import copy
import pickle
from contextlib import ExitStack

import pytest
import torch

from deepspeed.fusion import fp8_linear
from deepspeed.fusion.build import KINDS, find, find_feed_forwards8, find_products, put
from deepspeed.transformers.replacement import Swap

transformers = pytest.importorskip("transformers")

IDS = torch.arange(18).view(2, 9)
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
FAMILIES = {
    "LlamaConfig": SMALL,
    "GPT2Config": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97, "attn_pdrop": 0, "embd_pdrop": 0,
                   "resid_pdrop": 0},
}  # fmt: skip


def model_of(family):
    torch.manual_seed(0)
    config = getattr(transformers, family)(**FAMILIES[family])
    return transformers.AutoModelForCausalLM.from_config(config).train()


def outcome(model):
    loss = model(input_ids=IDS, labels=IDS).loss
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_what_a_copy_computes_is_its_own(way, family):
    model = model_of(family)
    expected = outcome(model)
    with ExitStack() as undo:
        put(findings := list(find(model, KINDS)), undo)
        copied = way(model)
        with torch.no_grad():  # of the original nothing is left in it
            for param in model.parameters():
                param.zero_()
    torch.testing.assert_close(outcome(copied), expected, rtol=1e-4, atol=1e-5)
    if way is not copy.deepcopy:
        again = [each for each in find(copied, KINDS) if each.kind != "loss"]
        assert [(each.kind, each.name, type(each.result)) for each in again] == [
            (each.kind, each.name, type(each.result)) for each in findings if each.kind != "loss"
        ], "what is loaded can be replaced again"


def test_products_of_8_bits_of_what_was_pickled():
    model = model_of("LlamaConfig")
    put(findings := list(find_products(model, "tensor")), ExitStack())
    loaded = pickle.loads(pickle.dumps(model))
    assert [type(each.result) for each in find_products(loaded, "tensor")] == [type(each.result) for each in findings]


def test_nothing_is_put_twice():
    model = model_of("LlamaConfig")
    first, second = ExitStack(), ExitStack()
    put(list(find(model, KINDS)), first)
    put(again := list(find(model, KINDS)), second)
    assert not [each for each in again if isinstance(each.result, Swap)]
    first.close()  # in any order
    second.close()
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("born", [torch.inference_mode, torch.enable_grad])
def test_what_serves_inference(born, family):
    """Layers made under inference_mode, or run under it, compute by what serves inference; nothing else is put."""
    with born():
        model = model_of(family).eval()
    with torch.inference_mode():
        expected = model(input_ids=IDS).logits
    with ExitStack() as undo:
        put(found := list(find(model, KINDS, serves="infer")), undo)
        assert {each.kind for each in found if isinstance(each.result, Swap)} >= {"norm", "sum", "mlp"}
        assert not {"loss", "inputs"} & {each.kind for each in found if isinstance(each.result, Swap)}
        with torch.inference_mode():
            torch.testing.assert_close(model(input_ids=IDS).logits, expected)
        if born is torch.enable_grad:
            torch.testing.assert_close(model(input_ids=IDS).logits, expected)


def test_inference_tensors_go_through_products_as_one(monkeypatch):
    seen, real = [], fp8_linear.compute
    monkeypatch.setattr(fp8_linear, "compute", lambda *args: seen.append(args[1].is_inference()) or real(*args))
    model = model_of("LlamaConfig").eval()
    with ExitStack() as undo:
        put(list(find(model, ["mlp"], serves="infer")), undo)
        put(list(find_products(model, "tensor", ["lm_head"])), undo)
        put(list(find_feed_forwards8(model)), undo)
        with torch.no_grad():
            expected = model(input_ids=IDS).logits
        with torch.inference_mode():
            found = model(input_ids=IDS).logits
    assert seen == [False, False, True, True]
    torch.testing.assert_close(found, expected)
