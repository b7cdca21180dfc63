"""ZenFlow: what is updated at which step, against a run written out by hand; and that looking does not disturb it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param
from tests.distributed.zero.test_offload_parity import late_updates
from tests.harness import shared_ranks
from tests.user_models import whole

WIDTH, LR, STEPS = 12, 1e-2, 7


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1)
        self.unused = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).float().square().mean()


def build(zenflow, stage=2, *, bf16=False, offload=None, optimizer="AdamW", **config):
    params = {"lr": LR, **config.pop("params", {})}
    return deepspeed.initialize(
        model=Net(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": bf16},
            "gradient_clipping": 0.0,
            "optimizer": {"type": optimizer, "params": params},
            "zero_optimization": {
                "stage": stage,
                "stage3_param_persistence_threshold": WIDTH,
                "sub_group_size": 60,
                "overlap_comm": True,
                "offload_optimizer": offload or {"device": "cpu"},
                **({} if zenflow is None else {"zenflow": zenflow}),
            },
            **config,
        },
    )[0]


def data(steps=STEPS):
    return torch.randn(steps, 4, WIDTH, generator=torch.Generator().manual_seed(1))


def train(engine, batches, between=lambda: None):
    dtype = next(engine.module.parameters()).dtype
    for batch in batches:
        engine.backward(engine(batch.to(dtype)))
        engine.step()
        between()
    return whole(engine)


def by_hand(batches, *, share, update, select, warm_up=0):
    """The same on one rank with plain PyTorch: an Adam for the chosen columns, and one for all the others."""
    model = Net()
    params = dict(model.named_parameters())
    adam = {
        name: {key: {"m": torch.zeros_like(p), "v": torch.zeros_like(p), "t": 0} for key in ("quick", "rest")}
        for name, p in params.items()
    }
    owed = {name: torch.zeros_like(p) for name, p in params.items()}
    chosen, waiting, since = {}, 0, 0

    def update_part(name, grad, mask, which, others):
        state, p = adam[name][which], params[name]
        state["t"] += 1
        for key, beta, value in (("m", 0.9, grad), ("v", 0.999, grad * grad)):
            new = beta * state[key] + (1 - beta) * value
            for each in {which, *others}:
                adam[name][each][key][mask] = new[mask]
        m, v = state["m"] / (1 - 0.9 ** state["t"]), state["v"] / (1 - 0.999 ** state["t"])
        p.data[mask] -= (LR * m / (v.sqrt() + 1e-8))[mask]

    for step, batch in enumerate(batches):
        model.zero_grad()
        model(batch).backward()
        grads = {name: p.grad for name, p in params.items() if p.grad is not None}
        if step < warm_up:
            for name, grad in grads.items():
                update_part(name, grad, torch.ones_like(grad, dtype=bool), "rest", ["quick"])
                adam[name]["quick"]["t"] = adam[name]["rest"]["t"]
            continue
        waiting, since = waiting + 1, since + 1
        for name, grad in grads.items():
            if name not in chosen:
                mask = torch.ones_like(grad, dtype=bool)
                if grad.dim() > 1:
                    best = grad.square().sum(0).topk(max(round(share * grad.shape[1]), 1)).indices
                    mask = torch.zeros_like(mask)
                    mask[:, best] = True
                chosen[name] = mask
                adam[name]["quick"]["t"] = adam[name]["rest"]["t"]
            owed[name] += grad
            update_part(name, grad, chosen[name], "quick", ["rest"])
        if waiting == update:
            for name in grads:
                update_part(name, owed[name] / waiting, ~chosen[name], "rest", ["quick"])
                owed[name].zero_()
            waiting = 0
            if select is not None and since >= select:
                chosen, since = {}, 0
    return {name: p.detach() for name, p in params.items()}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("update", "select", "warm_up"), [(1, None, 0), (3, None, 0), (2, 2, 0), (2, 4, 2)])
@shared_ranks(1)
def test_as_by_hand(late, update, select, warm_up):
    chooses = {"select_strategy": "step", "select_interval": select} if select else {}
    zenflow = {"topk_ratio": 0.25, "update_interval": update, "full_warm_up_rounds": warm_up, **chooses}
    params = {"weight_decay": 0.0}
    with late_updates() if late else nullcontext():
        engine = build({**zenflow, "overlap_step": late}, params=params)
    found = train(engine, data())
    expected = by_hand(data(), share=0.25, update=update, select=select, warm_up=warm_up)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-4, atol=2e-6, msg=name)
    assert torch.equal(found["unused.weight"], Net().unused.weight)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("home", ["cpu", "nvme", "both", "selected on the host"])
@shared_ranks(1, 2)
def test_with_an_update_at_every_step_nothing_is_deferred(stage, home, tmp_path):
    offload = {"device": "nvme", "nvme_path": str(tmp_path)} if home == "nvme" else {"device": "cpu"}
    bf16 = home == "both"
    expected = train(build(None, stage, bf16=bf16, offload=offload, gradient_accumulation_steps=2), data(8))
    zenflow = {"topk_ratio": 0.3, "update_interval": 1, "offload": home == "selected on the host"}
    found = train(build(zenflow, stage, bf16=bf16, offload=offload, gradient_accumulation_steps=2), data(8))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


@shared_ranks(1, 2)
def test_looking_at_states_changes_nothing_and_shows_what_the_model_has():
    zenflow = {"topk_ratio": 0.25, "update_interval": 3}
    expected = train(build(zenflow), data())
    engine = build(zenflow)
    weight = engine.module.first.weight

    def look():
        assert torch.equal(safe_get_full_fp32_param(weight), weight)
        assert safe_get_full_optimizer_state(weight, "exp_avg").abs().sum() > 0

    found = train(engine, data(), look)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@shared_ranks(1)
def test_edits_count_for_chosen_columns_too():
    engine = build({"topk_ratio": 0.25, "update_interval": 3})
    train(engine, data(2))
    weight = engine.module.first.weight
    safe_set_full_fp32_param(weight, torch.full_like(weight, 5.0))
    train(engine, data(1))
    assert (weight - 5).abs().max() < 10 * LR
    with torch.no_grad():
        weight.fill_(-5)
    train(engine, data(1))
    assert (weight + 5).abs().max() < 10 * LR


@shared_ranks(2)
def test_a_checkpoint_after_an_update_goes_on(tmp_path):
    zenflow = {"topk_ratio": 0.25, "update_interval": 2}
    engine = build(zenflow)
    train(engine, data(4))
    engine.save_checkpoint(tmp_path)
    masters = whole(engine)
    train(engine, data(3))
    engine.load_checkpoint(tmp_path)
    for name, value in whole(engine).items():
        assert torch.equal(value, masters[name]), name
    train(engine, data(4))
    other = build(None, 3)
    other.load_checkpoint(tmp_path)
    for name, value in whole(other).items():
        torch.testing.assert_close(value, masters[name])


@shared_ranks(1, 2)
def test_without_an_interval_updates_come_when_enough_was_deferred():
    engine = build({"topk_ratio": 0.1, "auto_ratio": 0.5})
    before = {name: value.clone() for name, value in whole(engine).items()}
    moved = []

    def count():
        now = engine.module.first.weight.detach()
        moved.append(int((now != before["first.weight"]).any(0).sum()))

    found = train(engine, data(12), count)
    assert moved[0] < WIDTH  # not at the first step
    assert moved[-1] == WIDTH  # but in the end
    assert all(torch.isfinite(value).all() for value in found.values())


@shared_ranks(1)
def test_what_cannot_be_deferred_is_refused():
    with pytest.raises(DeepSpeedConfigError, match=r"zenflow: SGD does not update every element"):
        build({"update_interval": 2}, optimizer="SGD", params={"momentum": 0.9}, zero_allow_untested_optimizer=True)
    with pytest.raises(DeepSpeedConfigError, match=r"moment_bits is 8"):
        build({"update_interval": 2}, params={"moment_bits": 8})
    with pytest.raises(DeepSpeedConfigError, match="zenflow at stage 3 needs offload_optimizer"):
        build({}, 3, offload={"device": "none"})
