"""Feed-forward layers of 8-bit products as one: when they are, when they are not, and that they compute the same."""

import copy
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from deepspeed.fusion import fp8_linear as feed_forward8
from deepspeed.fusion.build import find, find_feed_forwards8, find_products, lines, put
from tests.unit.fusion.test_inputs import IDS, model_of, step


@pytest.fixture
def counted(monkeypatch):
    """The shapes of inputs that were computed as one."""
    seen, real = [], feed_forward8.compute

    def compute(products, x, *args):
        seen.append(tuple(x.shape))
        return real(products, x, *args)

    monkeypatch.setattr(feed_forward8, "compute", compute)
    return seen


def eight(model, exclude=("lm_head",), *, scaling="tensor", joined=True):
    """(what takes everything back, what was found) of a model with kernels and 8-bit products."""
    undo = ExitStack()
    found = list(find(model, ["mlp"]))
    put(found, undo)
    put(products := list(find_products(model, scaling, exclude)), undo)
    put(wholes := list(find_feed_forwards8(model)) if joined else [], undo)
    inputs = list(find(model, ["inputs"]))
    put(inputs, undo)
    return undo, found + products + wholes + inputs


def gradients(model):
    loss = step(model)
    return loss, {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def assert_near(model, apart):
    (loss, grads), (other_loss, other_grads) = gradients(model), gradients(apart)
    torch.testing.assert_close(loss, other_loss, rtol=1e-2, atol=0)
    assert grads.keys() == other_grads.keys()
    for name, grad in grads.items():
        assert (grad - other_grads[name]).norm() <= 0.15 * other_grads[name].norm() + 1e-6, name


@pytest.mark.parametrize(
    ("checkpoints", "scaling"), [(None, "tensor"), (False, "tensor"), (True, "tensor"), (None, "row"), (False, "block")]
)
def test_near_what_the_layers_compute_apart(checkpoints, scaling, counted):
    model = model_of()
    if checkpoints is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpoints})
    apart = copy.deepcopy(model)
    undo, found = eight(model, scaling=scaling)
    eight(apart, joined=False, scaling=scaling)
    text = "\n".join(lines(found))
    assert "model.layers.0.mlp               gated silu between products" in text
    assert "gate_proj, up_proj" not in text, "these are no longer called"
    assert_near(model, apart)
    assert counted == [(2, 9, 32)] * (2 if checkpoints is None else 4)
    undo.close()
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_evaluation(counted):
    model, apart = model_of(), model_of()
    eight(model)
    eight(apart, joined=False)
    for around in (torch.no_grad, torch.inference_mode):
        with around():
            one, other = (each.eval()(input_ids=IDS).logits for each in (model, apart))
        assert (one - other).norm() < 0.05 * other.norm()
    assert len(counted) == 4, "tensors of inference mode are computed as one, too"


class Adapter(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x) * 1


def hook(mlp):
    mlp.down_proj.register_forward_hook(lambda *_: None)


def exchange(mlp):
    mlp.up_proj = Adapter(mlp.up_proj)


def widen(mlp):
    mlp.gate_proj.double()


def empty(mlp):
    """As parameters that are sharded are."""
    mlp.gate_proj.whole = mlp.gate_proj.weight.data
    mlp.gate_proj.weight.data = torch.empty(0)
    mlp.gate_proj.register_forward_pre_hook(lambda layer, _: setattr(layer.weight, "data", layer.whole))


@pytest.mark.parametrize("change", [hook, exchange, empty])
def test_layers_that_changed_are_called(change, counted):
    model, apart = model_of(), model_of()
    for each, joined in ((model, True), (apart, False)):
        eight(each, joined=joined)
        change(each.model.layers[0].mlp)
    assert_near(model, apart)
    assert counted == [(2, 9, 32)], "of the layer that nobody changed"


def test_who_watches_all_modules_sees_the_layers(counted):
    model, seen = model_of(), []
    eight(model)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(module))
    try:
        step(model)
    finally:
        handle.remove()
    assert sum(each is model.model.layers[0].mlp.down_proj for each in seen) == 1
    assert counted == []


def test_autocast_is_as_ever(counted):
    model = model_of()
    eight(model)
    with torch.autocast("cpu", torch.bfloat16):
        step(model)
    assert counted == []


@pytest.mark.parametrize(
    ("model", "exclude"),
    [({"mlp_bias": True}, ()), ({}, (r".*up_proj",)), ({"intermediate_size": 40}, ())],
    ids=["biases", "excluded", "sides"],
)
def test_layers_that_are_not_all_of_8_bits(model, exclude, counted):
    model = model_of(**{"intermediate_size": 48, **model})
    _, found = eight(model, exclude)
    assert "between products" not in "\n".join(lines(found))
    step(model)
    assert counted == []


def test_a_compiler_sees_the_layers(counted):
    model, apart = model_of(), model_of()
    eight(model)
    eight(apart, joined=False)
    torch._dynamo.reset()
    mlp, x = model.model.layers[0].mlp, torch.randn(2, 9, 32)
    torch.testing.assert_close(
        torch.compile(mlp, backend="aot_eager", fullgraph=True)(x), apart.model.layers[0].mlp(x), rtol=0.05, atol=1e-3
    )
    assert counted == []
