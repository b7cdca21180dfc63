"""Layers that read one input: which are found, that they compute the same, and that nothing is kept."""

import copy
import gc
import weakref
from contextlib import ExitStack, nullcontext

import pytest
import torch
from torch import nn

from deepspeed.fusion import shared_input
from deepspeed.fusion.build import KINDS, find, find_products, lines, put
from deepspeed.fusion.fp8_linear import Fp8Products
from deepspeed.transformers.replacement import Refused, Swap
from tests.unit.ops.model.test_shared_input import Additions

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "use_cache": False,
}  # fmt: skip
IDS = torch.arange(18).view(2, 9)
EXACT = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture
def counted(monkeypatch):
    """How many layers were computed together, for each time that any were."""
    seen, real = [], shared_input.linears

    def linears(x, weights, biases):
        seen.append(len(weights))
        return real(x, weights, biases)

    monkeypatch.setattr(shared_input, "linears", linears)
    return seen


def model_of(family="Llama", **more):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **more})
    return getattr(transformers, f"{family}ForCausalLM")(config).train()


def swapped(model, kinds=("inputs",)):
    put(list(find(model, kinds)), stack := ExitStack())
    return stack


def step(model):
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach()


def assert_same(model, plain):
    torch.testing.assert_close(step(model), step(plain), **EXACT)
    for (name, one), other in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert (one.grad is None) == (other[1].grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other[1].grad, **EXACT)


@pytest.mark.parametrize("kinds", [("inputs",), KINDS])
@pytest.mark.parametrize("checkpoints", [None, False, True])
@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_the_same_loss_and_gradients(family, checkpoints, kinds, counted):
    model = model_of(family)
    if checkpoints is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpoints})
    plain = copy.deepcopy(model)
    stack = swapped(model, kinds)
    assert_same(model, plain)
    assert set(counted) == {2, 3}
    assert len(counted) == (8 if checkpoints is False else 4), "reentrant checkpoints run without gradients first"
    stack.close()
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_frozen_weights(counted):
    model = model_of("Qwen2")
    for name, param in model.named_parameters():
        param.requires_grad_("v_proj" in name or "up_proj" in name)
    plain = copy.deepcopy(model)
    swapped(model)
    assert_same(model, plain)
    assert counted == [2, 3, 2], "the first input has no gradient, so that there is nothing to sum"


def test_gradients_are_accumulated():
    model = model_of()
    plain = copy.deepcopy(model)
    swapped(model)
    for each in (model, plain):
        for _ in range(2):
            each(input_ids=IDS, labels=IDS).loss.backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, **EXACT)


def test_the_table():
    text = "\n".join(lines(list(find(model_of(), ("inputs",)))))
    assert "model.layers.0.self_attn  gradients of q_proj, k_proj, v_proj added by their products" in text
    assert "model.layers.0.mlp        gradients of gate_proj, up_proj added by their products" in text
    few = list(find(model_of(), ("inputs",), ["model.layers.0", "model.layers.1.mlp", "model.layers.1.self_attn.v"]))
    assert [each.name for each in few] == ["model.layers.1.self_attn"]
    assert "gradients of q_proj, k_proj added" in few[0].result.kernel


def test_additions_of_hidden_states_are_fewer():
    model = model_of()
    plain, counts = copy.deepcopy(model), []
    swapped(model)
    for each in (model, plain):
        loss = each(input_ids=IDS, labels=IDS).loss
        with Additions(torch.Size((2, 9, 32))) as additions:
            loss.backward()
        counts.append(additions.seen)
    assert counts[1] - counts[0] == 2 * (2 + 1), "in each layer two for queries, keys and values, one for gate and up"


def test_layers_of_8_bits_stay_so(counted):
    pair = [model_of(), model_of()]
    swapped(pair[0])
    for model in pair:
        put(list(find_products(model, "row", [r".*mlp", r".*k_proj", r".*v_proj"])), ExitStack())
    assert_same(*pair)
    assert counted == [2, 2, 2, 2], "keys and values, gate and up"


@pytest.mark.parametrize("scaling", ["tensor", "block"])
def test_layers_of_8_bits_together(monkeypatch, scaling):
    """Near what they compute apart, and put back as they were."""
    together, real = [], Fp8Products.several

    def several(self, input, weights, biases):
        together.append(len(weights))
        return real(self, input, weights, biases)

    monkeypatch.setattr(Fp8Products, "several", several)
    model, apart = model_of("Qwen2"), model_of("Qwen2")
    for each in (model, apart):
        put(list(find_products(each, scaling, ["lm_head", r".*o_proj", r".*mlp"])), ExitStack())
    own = [layer.self_attn.q_proj.__dict__["forward"] for layer in model.model.layers]
    text = "\n".join(lines(found := list(find(model, ("inputs",)))))
    assert "self_attn  gradients of q_proj, k_proj, v_proj in one product of 8 bits" in text
    put(found, ExitStack())
    torch.testing.assert_close(step(model), step(apart), rtol=1e-2, atol=0)
    assert sorted(together) == [1] * 6 + [3] * 2
    for (name, one), other in zip(model.named_parameters(), apart.parameters(), strict=True):
        assert (one.grad - other.grad).norm() <= 0.2 * other.grad.norm() + 1e-6, name
    assert [layer.self_attn.q_proj.__dict__["forward"] for layer in model.model.layers] == own
    together.clear()
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
    step(model)
    assert together == [1, 2, 3], "a layer that is watched is called alone"


@pytest.mark.parametrize(
    "register",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
     "register_full_backward_pre_hook"],
)  # fmt: skip
def test_a_layer_with_a_hook_is_left_alone(register, counted):
    model = model_of()
    plain = copy.deepcopy(model)
    swapped(model)
    calls = []
    for each in (model, plain):
        getattr(each.model.layers[1].self_attn.q_proj, register)(lambda *_: calls.append(1))
    assert_same(model, plain)
    assert len(calls) == 2
    assert counted == [3, 2, 2, 2]


def test_hooks_on_all_modules_see_every_layer(counted):
    model, seen = model_of(), []
    swapped(model)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(module))
    try:
        step(model)
    finally:
        handle.remove()
    assert sum(type(each) is nn.Linear for each in seen) == 2 * 7 + 1
    assert counted == []


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_computed_ahead(around, counted):
    model = model_of()
    plain = copy.deepcopy(model)
    swapped(model)
    with around():
        assert torch.equal(model(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    assert counted == []
    model.eval()
    plain.eval()
    assert_same(model, plain)
    assert len(counted) == 4


def test_autocast_and_other_dtypes_are_as_ever(counted):
    model = model_of()
    plain = copy.deepcopy(model)
    swapped(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(model, plain)
    assert counted == []
    model.bfloat16()
    plain.bfloat16()
    torch.testing.assert_close(step(model), step(plain))
    assert len(counted) == 4


class Attention(nn.Module):
    def __init__(self, values=True):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 8)
        self.values, self.between = values, nullcontext

    def forward(self, x):
        q = self.q_proj(x)
        k = self.k_proj(x)
        with self.between():
            pass
        if not self.values:
            return q.sin() + k.sum()
        v = self.v_proj(x)
        return q.sin() + v * k.sum()


def outcome(model, x):
    y = model(x * 1)
    grads = torch.autograd.grad(y.sum(), [x, *model.parameters()], allow_unused=True)
    return [y, *(grad for grad in grads if grad is not None)]


def pair_of(model):
    torch.manual_seed(0)
    plain = copy.deepcopy(model)
    return model, plain, swapped(model), torch.randn(2, 3, 8, requires_grad=True)


def test_results_that_nobody_takes_are_dropped(monkeypatch):
    model, plain, _, x = pair_of(Attention(values=False))
    refs, real = [], shared_input.linears

    def linears(*args):
        results = real(*args)
        refs.extend(map(weakref.ref, results))
        return results

    monkeypatch.setattr(shared_input, "linears", linears)
    gc.disable()
    try:
        y = model(x * 1)
        assert len(refs) == 3
        assert refs[2]() is None
    finally:
        gc.enable()
    assert y.requires_grad
    torch.testing.assert_close(outcome(model, x), outcome(plain, x))
    model.values = True
    before, model.between = len(refs), lambda: (_ for _ in ()).throw(ValueError("meanwhile"))
    with pytest.raises(ValueError, match="meanwhile"):
        model(x * 1)
    gc.collect()
    assert [ref() for ref in refs[before:]] == [None] * 3
    assert not any("forward" in layer.__dict__ for layer in model.children())


def test_other_results_are_taken_once(counted):
    """A layer that is called again, with the same input or another, is computed alone."""

    class Twice(Attention):
        def forward(self, x):
            q, again = self.q_proj(x), self.q_proj(x)
            y = x * 2
            k = self.k_proj(y)
            return q * again + self.v_proj(x) * k.sum()

    model, plain, _, x = pair_of(Twice())
    torch.testing.assert_close(outcome(model, x), outcome(plain, x))
    assert counted == [2]
    (found,) = find(plain, ("inputs",))
    assert "q_proj, v_proj added" in found.result.kernel


def test_an_input_that_changed_meanwhile_is_read_anew():
    class Changing(Attention):
        def forward(self, x):
            q = self.q_proj(x)
            with torch.no_grad():
                x.add_(1)
            return q * self.v_proj(x)

    model, plain, _, x = pair_of(Changing())
    torch.testing.assert_close(model(x * 1), plain(x * 1))


def test_gradients_switched_off_meanwhile(counted):
    class Detached(Attention):
        def forward(self, x):
            q = self.q_proj(x)
            torch.set_grad_enabled(False)
            k = self.k_proj(x)
            torch.set_grad_enabled(True)
            assert not k.requires_grad
            return q * k.sum()

    model, plain, _, x = pair_of(Detached())
    torch.testing.assert_close(outcome(model, x), outcome(plain, x))
    assert counted == [2]


def test_a_copy_has_weights_of_its_own():
    model, _, _, x = pair_of(Attention())
    other = copy.deepcopy(model)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(2)
    plain = Attention()
    plain.load_state_dict(other.state_dict())
    torch.testing.assert_close(outcome(other, x), outcome(plain, x))


def test_layers_that_are_exchanged_later_are_used(counted):
    model, plain, _, x = pair_of(Attention())
    for each in (model, plain):
        torch.manual_seed(1)
        each.q_proj = nn.Sequential(nn.Linear(8, 8))
    torch.testing.assert_close(outcome(model, x), outcome(plain, x))
    assert counted == [2]
    shared, same, _, x = pair_of(Attention())
    for each in (shared, same):
        each.v_proj = each.q_proj
    torch.testing.assert_close(outcome(shared, x), outcome(same, x))


def test_code_that_reads_other_inputs_is_left_alone():
    class Row(Attention):
        def forward(self, x):
            x = self.q_proj(x)
            x = self.v_proj(x)
            return x + 1

    class Either(Attention):
        def forward(self, x, y=None):
            z = x if y is None else y
            return self.q_proj(x) + (self.v_proj(x) if y is None else self.v_proj(z))

    assert [list(find(kind(), ("inputs",))) for kind in (Row, Either)] == [[], []]
    wrapped = Attention()
    wrapped.forward = lambda x: x
    (found,) = find(wrapped, ("inputs",))
    assert isinstance(found.result, Refused)
    (found,) = find(Attention(), ("inputs",))
    assert isinstance(found.result, Swap)


def test_transforms_of_functions_go_through():
    model, plain, _, x = pair_of(Attention())
    found, expected = (torch.func.grad(lambda y, each=each: each(y).sum())(x.detach()) for each in (model, plain))
    torch.testing.assert_close(found, expected)


def test_a_compiler_sees_the_class():
    model, plain, _, x = pair_of(Attention())
    model.between = plain.between = nullcontext
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), plain(x))
