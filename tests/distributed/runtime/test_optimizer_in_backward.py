"""The optimizer in backward: the same training as with ordinary steps, and gradients that never exist all at once."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError
from deepspeed.runtime.step import in_backward
from tests.harness import shared_ranks

WIDTH, LAYERS, STEPS = 16, 6, 4


class Model(nn.Module):
    """Tied weights, a parameter that is never used, one that is used now and then, one that is frozen."""

    def __init__(self, reentrant=None, layers=LAYERS):
        super().__init__()
        self.reentrant = reentrant
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.unused, self.sometimes = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x, number=0):
        x = self.first(x) * self.frozen
        for layer in self.inner:
            x = torch.tanh(layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant))
        return self.last(self.sometimes(x) if number % 2 else x)


def build(enabled, *, reentrant=None, optimizer=None, given=None, clip=0.0, **config):
    torch.manual_seed(1)
    model = Model(reentrant)
    groups = [
        {"params": list(model.inner.parameters()), "lr": 3e-3},
        {"params": [p for n, p in model.named_parameters() if not n.startswith("inner")], "lr": 1e-2},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": clip,
        "optimizer_in_backward": {"enabled": enabled, "clip_by_last_norm": enabled and clip > 0},
        **config,
    }
    if given is None:
        config["optimizer"] = optimizer or {"type": "AdamW", "params": {"weight_decay": 0.1}}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=groups, config=config, optimizer=None if given is None else given(groups)
    )
    return engine


def train(engine, steps=STEPS, start=0):
    norms, micro = [], engine.gradient_accumulation_steps()
    dtype = engine.module.frozen.dtype
    for step in range(start, start + steps):
        for number in range(micro):
            x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + number))
            engine.backward(engine(x.to(dtype), step).float().square().mean())
            engine.step()
        assert engine.was_step_applied()
        norms.append(engine.get_global_grad_norm())
    return norms


def weights(engine):
    return {name: param.detach().float().clone() for name, param in engine.module.named_parameters()}


def assert_alike(mine, theirs, tolerance=1e-6):
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=tolerance, atol=tolerance, msg=name)


CASES = [
    {},
    {"bf16": {"enabled": True}},
    {"bf16": {"enabled": True}, "gradient_accumulation_steps": 3, "data_types": {"grad_accum_dtype": "fp32"}},
    {"gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}},
    {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "reentrant": True},
    {"reentrant": False, "zero_optimization": {"stage": 1}},
    {"reentrant": True, "optimizer": {"type": "Lion", "params": {}}},
    {"optimizer": {"type": "Lamb", "params": {}}},
    {"optimizer": {"type": "Muon", "params": {}}},
    {"given": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9)},
]


@shared_ranks(1)
def test_the_same_training_as_with_ordinary_steps(monkeypatch):
    monkeypatch.setattr(in_backward, "_TOGETHER", 300)
    for case in CASES:
        found = []
        for enabled in (True, False):
            engine = build(enabled, **case)
            found.append((train(engine), weights(engine)))
            engine.destroy()
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-4), case
        assert_alike(found[0][1], found[1][1], 2e-2 if "bf16" in case else 1e-6)


def live_gradients(engine):
    """Bytes of gradients, wherever they are held."""
    masters = [param for group in engine.basic_optimizer.param_groups for param in group["params"]]
    held = {id(param): param for param in [*engine.module.parameters(), *masters]}
    return sum(param.grad.nbytes for param in held.values() if param.grad is not None)


@shared_ranks(1)
def test_gradients_never_exist_all_at_once(monkeypatch):
    monkeypatch.setattr(in_backward, "_TOGETHER", 1)
    for case in ({}, {"bf16": {"enabled": True}}, {"reentrant": False}):
        peaks = []
        for enabled in (True, False):
            engine, seen = build(enabled, **case), []
            for param in engine.module.parameters():
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(lambda _, e=engine, s=seen: s.append(live_gradients(e)))
            train(engine, 1)  # the first step already
            peaks.append(max(seen))
            assert live_gradients(engine) == 0
            engine.destroy()
        # two layers of eight: one that has just come, and the tied one that waits in the first backward
        assert peaks[0] < 0.45 * peaks[1], (case, peaks)
    gc.collect()


@shared_ranks(1)
def test_clipping_by_the_last_norm(monkeypatch, tmp_path):
    monkeypatch.setattr(in_backward, "_TOGETHER", 300)
    engine = build(True, clip=0.05)
    norms = train(engine, 3)
    engine.save_checkpoint(str(tmp_path))
    norms += train(engine, 2, start=3)
    other = build(True, clip=0.05)
    other.load_checkpoint(str(tmp_path))
    assert train(other, 2, start=3) == pytest.approx(norms[3:], rel=1e-6)
    assert_alike(weights(other), weights(engine))

    torch.manual_seed(1)
    model = Model()
    tied = [p for n, p in model.named_parameters() if not n.startswith("inner") and p.requires_grad]
    groups = [{"params": list(model.inner.parameters()), "lr": 3e-3}, {"params": tied, "lr": 1e-2}]
    plain, last = torch.optim.AdamW(groups, weight_decay=0.1), None
    for step in range(5):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step))
        model(x, step).square().mean().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))
        if last is not None:
            torch._foreach_mul_(grads, float((0.05 / (last + 1e-6)).clamp(max=1.0)))
        plain.step()
        plain.zero_grad()
        last = norm
        assert float(norm) == pytest.approx(norms[step], rel=1e-4)
    found = weights(engine)
    for name, param in model.named_parameters():
        torch.testing.assert_close(found[name], param.detach(), rtol=1e-5, atol=1e-6)
    engine.destroy()
    other.destroy()


@shared_ranks(1)
def test_what_is_refused():
    engine = build(True)
    x = torch.randn(2, WIDTH)
    engine.backward(engine(x).square().mean())
    with pytest.raises(DeepSpeedError, match=r"optimizer_in_backward\.enabled: gradients are used up"):
        deepspeed.utils.safe_get_full_grad(engine.module.first.weight)
    loss = engine(x).square().mean()
    with pytest.raises(DeepSpeedError, match=r"optimizer_in_backward\.enabled: .*before engine\.step\(\)"):
        engine.backward(loss)
    engine.step()
    with engine.no_sync():
        engine.backward(engine(x).square().mean())
    assert deepspeed.utils.safe_get_full_grad(engine.module.first.weight) is not None
    before = weights(engine)
    engine.step()  # what no backward has updated is updated now
    assert any(not torch.equal(value, before[name]) for name, value in weights(engine).items())
    engine.step()
    assert not engine.was_step_applied()
    engine.destroy()
    for config, text in (
        ({"clip": 1.0, "optimizer_in_backward": {"enabled": True}}, "gradient_clipping"),
        ({"fp16": {"enabled": True}}, r"fp16\.enabled"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer"),
        ({"given": lambda groups: torch.optim.LBFGS(groups[0]["params"])}, "LBFGS"),
    ):
        with pytest.raises(DeepSpeedConfigError, match=rf"optimizer_in_backward\.enabled.*{text}"):
            build(True, **config)
