"""What is recognised in models of Transformers and in plain modules, and that it computes the same."""

import copy
import weakref
from collections import Counter
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from deepspeed.config.schema import Schema
from deepspeed.errors import UsageError
from deepspeed.fusion import build
from deepspeed.fusion.build import KINDS, find, lines, missed, put
from deepspeed.fusion.head import LazyLogits
from deepspeed.fusion.recompute import recomputed_input
from deepspeed.transformers.replacement import Refused, Swap

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SMALL, "num_key_value_heads": 2, "vocab_size": 97}

# The class of the config, its numbers, and how many modules of which kind are replaced.
FAMILIES = {
    "LlamaConfig": (GROUPED, {"mask": 1, "norm": 5, "sum": 2, "mlp": 2, "rotary": 2, "inputs": 4}),
    "Qwen3Config": ({**GROUPED, "head_dim": 8}, {"mask": 1, "norm": 9, "sum": 2, "mlp": 2, "rotary": 2, "inputs": 4}),
    "GemmaConfig": ({**GROUPED, "head_dim": 8}, {"mask": 1, "norm": 5, "sum": 2, "mlp": 2, "rotary": 2, "inputs": 4}),
    "Gemma2Config": (
        {**GROUPED, "head_dim": 8, "final_logit_softcapping": 3.0},
        {"mask": 1, "norm": 9, "sum": 2, "mlp": 2, "rotary": 2, "inputs": 4},
    ),
    "Phi3Config": ({**GROUPED, "pad_token_id": 0}, {"mask": 1, "norm": 5, "sum": 2, "mlp": 2, "rotary": 2}),
    "GPTNeoXConfig": ({**SMALL, "vocab_size": 97, "rotary_pct": 0.5}, {"mask": 1, "norm": 5, "mlp": 2, "rotary": 2}),
    "GPT2Config": (
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97},
        {"mask": 1, "norm": 5, "sum": 2, "mlp": 2},
    ),
    "MixtralConfig": ({**GROUPED, "num_local_experts": 4}, {"mask": 1, "norm": 5, "sum": 2, "rotary": 2, "inputs": 2}),
    "OPTConfig": ({**GROUPED, "ffn_dim": 48, "word_embed_proj_dim": 32}, {"norm": 5, "inputs": 2}),
}


def model_of(family, numbers):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, family)(**numbers)
    for name in ("attention_dropout", "dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    return transformers.AutoModelForCausalLM.from_config(config).train()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_loss_and_gradients(family):
    numbers, expected = FAMILIES[family]
    model = model_of(family, numbers)
    plain = copy.deepcopy(model)
    findings = list(find(model, KINDS))
    assert Counter(each.kind for each in findings if isinstance(each.result, Swap)) == {**expected, "loss": 1}
    missing = {each.kind for _, each in missed(model, KINDS, [each for each in findings if each.kind == "loss"])}
    assert missing == set(expected) - {"inputs"}, "what a release that hides them would be told of"
    assert list(missed(model, KINDS, findings)) == []
    ids = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = torch.cat((torch.full((2, 3), -100), ids[:, 3:]), 1)
    with ExitStack() as undo:
        put(findings, undo)
        found, other = model(input_ids=ids, labels=labels), plain(input_ids=ids, labels=labels)
        assert isinstance(found.logits, LazyLogits)
        assert not found.logits.computed
        found.loss.backward()
        other.loss.backward()
        torch.testing.assert_close(found.loss, other.loss, rtol=1e-5, atol=1e-6)
        for (name, one), two in zip(model.named_parameters(), plain.parameters(), strict=True):
            if two.grad is not None:
                torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-6, msg=name)
        torch.testing.assert_close(found.logits + 0, other.logits, rtol=1e-4, atol=1e-6)
        items = torch.tensor(11)
        counted = [each(input_ids=ids, labels=labels, num_items_in_batch=items).loss for each in (model, plain)]
        torch.testing.assert_close(*counted)
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits), "everything was taken back"


def test_logits_that_somebody_looks_at_have_their_gradients():
    model = model_of("LlamaConfig", GROUPED)
    plain = copy.deepcopy(model)
    ids = torch.randint(0, 97, (2, 9))
    with ExitStack() as undo:
        put(list(find(model, ("loss",))), undo)
        for each in (model, plain):
            logits = each(input_ids=ids).logits
            nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float() / 0.7, ids[:, 1:].flatten()).backward()
        for one, two in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one.grad, two.grad)


@pytest.mark.parametrize("hidden", ["by a decorator", "by other code"])
def test_what_a_release_has_hidden_is_told(hidden, monkeypatch, capsys):
    model, logged = model_of("LlamaConfig", GROUPED), []
    layer = type(model.model.layers[0])
    original = {"forward": layer.forward}

    def forward(self, *args, **kwargs):
        return original["forward"](self, *args, **kwargs)

    if hidden == "by a decorator":
        forward.__wrapped__ = layer.forward
    monkeypatch.setattr(layer, "forward", forward)
    monkeypatch.setattr(build, "log_dist", lambda message, level: logged.append(message))
    for section in ({}, {"norm": False}, {"exclude": ["model.layers"]}):
        schema = Schema(train_batch_size=1, fused_kernels={"enabled": True, **section})
        with ExitStack() as undo:
            build.fuse(schema, model, undo)
    assert len(logged) == 2, "without norms there are no sums, and what is excluded is there"
    reason = "hide what they call" if hidden == "by a decorator" else "may have changed it"
    assert all("'sum'" in text and "'llama'" in text and reason in text for text in logged)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sum ")]
    assert all("itself: " in row and reason in row for row in rows)
    assert len(rows) == (1 if hidden == "by a decorator" else 2)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


def test_what_would_lose_the_gradient_is_an_error():
    model = model_of("LlamaConfig", GROUPED)
    with ExitStack() as undo:
        put(list(find(model, ("loss",))), undo)
        logits = model(input_ids=torch.tensor([[1, 2, 3]])).logits
        assert (logits.shape, logits.dtype, logits.dim(), logits.size(-1)) == ((1, 3, 97), torch.float32, 3, 97)
        assert logits.requires_grad
        with pytest.raises(UsageError, match="fused_kernels"):
            Doubled.apply(logits).sum().backward()


class OtherRMSNorm(nn.Module):
    """Looks like one, and divides by the mean of the magnitudes."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x):
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)


class OtherMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x):
        return self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x))


def test_what_computes_something_else_stays_and_is_told():
    model = nn.Sequential(OtherRMSNorm(), OtherMlp(), nn.LayerNorm((2, 4)), nn.LayerNorm(8), nn.RMSNorm(8))
    findings = list(find(model, [kind for kind in KINDS if kind != "inputs"]))
    fates = {each.name: each.result for each in findings}
    assert {name for name, fate in fates.items() if isinstance(fate, Refused)} == {"0", "1", "2"}
    assert "OtherRMSNorm computes something else" in fates["0"].reason
    assert "OtherMlp computes something else" in fates["1"].reason
    text = lines(findings)
    assert text[0].split() == ["kind", "module", "count", "first", "of", "them", "now", "computed", "by"]
    assert any("itself: OtherMlp computes" in line for line in text)
    x = torch.randn(3, 8)
    expected = model[3](x), model[4](x)
    with ExitStack() as undo:
        put(findings, undo)
        torch.testing.assert_close((model[3](x), model[4](x)), expected)
        assert "forward" not in model[0].__dict__


class GatedRMSNorm(nn.Module):
    """An RMS norm for whoever calls it with one input."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x, gate=None):
        x = x if gate is None else x * torch.sigmoid(gate)
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class HeadsRMSNorm(GatedRMSNorm):
    """One weight for each of several heads."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 8))

    def forward(self, x):
        return super().forward(x)


class DroppedMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.RMSNorm((2, 4)), "several dims"),
        (HeadsRMSNorm(), "several dims"),
        (GatedRMSNorm(), "other inputs"),
        (DroppedMlp().train(), "something else"),
        (DroppedMlp().eval(), "something else"),
    ],
)
def test_what_computes_more_than_one_call_shows_stays(module, reason):
    training = [each.training for each in module.modules()]
    (finding,) = find(module, ("norm", "mlp"))
    assert isinstance(finding.result, Refused)
    assert reason in finding.result.reason
    assert [each.training for each in module.modules()] == training


class NamedRMSNorm(GatedRMSNorm):
    def forward(self, states):
        return super().forward(states)


class ScaledMlp(DroppedMlp):
    def forward(self, states, scale=1.0):
        return scale * self.down_proj(nn.functional.silu(self.gate_proj(states)) * self.up_proj(states))


@pytest.mark.parametrize(
    ("module", "args", "names"),
    [
        (NamedRMSNorm(), 0, {"states": 1.0}),
        (nn.LayerNorm(8), 0, {"input": 1.0}),
        (ScaledMlp(), 0, {"states": 1.0}),
        (ScaledMlp(), 1, {"scale": 3.0}),
        (ScaledMlp(), 2, {}),
    ],
)
def test_arguments_are_those_of_the_class(module, args, names):
    x = torch.randn(3, 8)
    args, names = (x, 2.0)[:args], {name: x if value == 1.0 else value for name, value in names.items()}
    expected = module(*args, **names)
    (finding,) = find(module, ("norm", "mlp"))
    assert isinstance(finding.result, Swap)
    with ExitStack() as undo:
        put([finding], undo)
        torch.testing.assert_close(module(*args, **names), expected)
        if isinstance(module, ScaledMlp):
            with pytest.raises(TypeError):
                module()


def test_names_that_are_excluded_are_left_alone():
    model = model_of("LlamaConfig", GROUPED)
    names = {each.name for each in find(model, KINDS, ["model.layers.0", "lm_head"])}
    assert names == {
        *(f"model.layers.1.{part}" for part in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")),
        "model.norm",
        "model",  # its mask
        "model.layers.1",  # the sum before its second norm
    }
    assert list(find(model, ())) == []


def test_a_wrapped_module_is_left_alone():
    norm, wrapped = nn.LayerNorm(8), nn.LayerNorm(8)
    wrapped.forward = lambda x: x
    assert isinstance(next(iter(find(wrapped, KINDS))).result, Refused)
    linear = model_of("LlamaConfig", GROUPED).model.norm
    linear.forward = lambda x: x
    assert isinstance(next(iter(find(nn.Sequential(linear), KINDS))).result, Refused)
    assert isinstance(next(iter(find(norm, KINDS))).result, Swap)


def test_lora_inside_feed_forward_layers_and_beside_the_head():
    peft = pytest.importorskip("peft")
    model = model_of("LlamaConfig", GROUPED)
    options = peft.LoraConfig(r=2, target_modules=["gate_proj", "down_proj", "q_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(model, options)
    plain = copy.deepcopy(tuned)
    ids = torch.randint(0, 97, (2, 9))
    with ExitStack() as undo:
        findings = list(find(tuned, KINDS))
        assert Counter(each.kind for each in findings if isinstance(each.result, Swap))["loss"] == 1
        put(findings, undo)
        losses = [each(input_ids=ids, labels=ids).loss for each in (tuned, plain)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
        for one, two in zip(tuned.parameters(), plain.parameters(), strict=True):
            assert (one.grad is None) == (two.grad is None)
            if two.grad is not None:
                torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-6)


def test_the_results_of_norms_are_not_kept_for_the_backward():
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    ids = torch.arange(18).view(2, 9)

    def alive(checkpoints):
        model = LlamaForCausalLM(config).train()
        if checkpoints:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        stack = ExitStack()
        put(list(find(model, ("norm", "mlp", "rotary"))), stack)
        seen = []
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.register_forward_hook(lambda module, args, out: seen.append(weakref.ref(out)))
        loss = model(input_ids=ids, labels=ids).loss
        left = sum(ref() is not None for ref in seen)
        loss.backward()
        assert all(param.grad is not None for param in model.parameters())
        stack.close()
        return left

    assert alive(checkpoints=False) == 0
    assert alive(checkpoints=True) == 0


def test_an_input_that_changed_meanwhile_is_told():
    norm, layer = nn.RMSNorm(8), nn.Linear(8, 8)
    put(list(find(nn.ModuleList([norm]), ("norm",))), ExitStack())
    x = torch.randn(3, 8, requires_grad=True) * 1
    y = norm(x)
    with recomputed_input(y, layer):
        out = layer(y)
    x.data.add_(1)  # a change that autograd does not see
    x.add_(0)
    with pytest.raises((UsageError, RuntimeError), match=r"changed in place|modified by an inplace"):
        out.sum().backward()


class Grown(nn.Module):
    """A norm whose result is changed in place, by itself or by who reads it."""

    def __init__(self, where):
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(8), OtherMlp()
        self.mlp.__class__ = {"before": SiluMlp, "inside": InPlaceMlp}[where]
        self.where = where

    def forward(self, x):
        y = self.norm(x)
        return self.mlp(y.mul_(3.0) if self.where == "before" else y)


class SiluMlp(OtherMlp):
    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class InPlaceMlp(OtherMlp):
    def forward(self, x):
        x.mul_(3.0)
        return self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("where", ["before", "inside"])
def test_results_of_norms_that_were_changed_in_place_are_kept(where):
    torch.manual_seed(0)
    model, x = Grown(where), torch.randn(2, 3, 8)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    put(list(find(model, ("norm", "mlp"))), ExitStack())
    if where == "inside":  # a module of which the result of the norm is not kept, whatever it does
        inner = model.mlp.forward

        def forward(y):
            with recomputed_input(y, model.mlp):
                return inner(y)

        model.mlp.forward = forward
    found = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    torch.testing.assert_close(found, expected)


def test_a_weight_that_changed_meanwhile_is_told():
    """As autograd does: the gradients would be those of the new weight."""
    model = nn.Sequential(nn.RMSNorm(8), SiluMlp())
    put(list(find(model, ("norm", "mlp"))), ExitStack())
    out = model(torch.randn(3, 8))
    with torch.no_grad():
        model[1].up_proj.weight.add_(1)
    with pytest.raises(UsageError, match="changed in place after the forward"):
        out.sum().backward()
