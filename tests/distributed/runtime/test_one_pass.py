"""Steps in one pass: gradients are read as they arrived, and the optimizer writes what the model computes with."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.ops.adam import FusedAdam
from tests.harness import shared_ranks

STEPS = 4
CASES = [  # stage, precision, accumulation, dtype of sums, step that overflows
    (0, "bf16", 1, None, None),
    (0, "bf16", 2, "fp32", None),
    (0, "fp16", 1, None, 2),
    (0, "fp32", 1, None, 1),
    (1, "bf16", 1, "bf16", None),
    (2, "bf16", 2, "bf16", 2),
    (2, "fp16", 1, "fp16", 1),
    (3, "bf16", 1, "bf16", None),
    (3, "fp16", 2, None, 2),
]


def train(case, *, one_pass):
    stage, precision, accumulation, sums, bad = case
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True, **({"initial_scale_power": 6} if precision == "fp16" else {})}
    if sums is not None:
        config["data_types"] = {"grad_accum_dtype": sums}
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20), nn.LayerNorm(20), nn.Linear(20, 5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedAdam, "takes_one_pass", lambda self, device: one_pass)
        engine, *_ = deepspeed.initialize(model=model, config=config)
        generator = torch.Generator().manual_seed(7 + dist.get_rank())
        norms, applied = [], []
        for step, micro in itertools.product(range(STEPS), range(accumulation)):
            x = torch.randn(2, 12, generator=generator).to(next(iter(engine.module.parameters())).dtype)
            loss = engine(x).float().square().mean()
            engine.backward(loss * (float("inf") if (step, micro) == (bad, 0) else 1.0))
            engine.step()
            if micro == accumulation - 1:
                norms.append(engine.get_global_grad_norm())
                applied.append(engine.was_step_applied())
        counts = {state["step"] for state in engine.basic_optimizer.state.values()}
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            weights = [param.detach().float().clone() for param in engine.module.parameters()]
        masters = [deepspeed.utils.safe_get_full_fp32_param(param) for param in engine.module.parameters()]
        engine.destroy()
    return norms, applied, counts, weights, masters


@shared_ranks(1, 2)
def test_the_same_training_as_in_several_passes():
    for case in CASES:
        fast, slow = train(case, one_pass=True), train(case, one_pass=False)
        bad = case[-1]
        assert fast[1] == slow[1] == [step != bad for step in range(STEPS)], case
        assert fast[2] == slow[2] == {STEPS - (bad is not None)}, case
        finite = [step for step in range(STEPS) if step != bad]
        assert [fast[0][step] for step in finite] == pytest.approx([slow[0][step] for step in finite], rel=2e-2), case
        for mine, theirs in zip([*fast[3], *fast[4]], [*slow[3], *slow[4]], strict=True):
            assert torch.allclose(mine, theirs, rtol=2e-2, atol=2e-3), case
        for weight, master in zip(fast[3], fast[4], strict=True):
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[case[1]]
            assert torch.equal(weight, master.to(dtype).float()), f"{case}: the model is not what the masters say"


@shared_ranks(1)
def test_no_wide_copy_of_a_gradient_is_made():
    seen = []
    real = FusedAdam._apply

    def look(self, group, batch):
        seen.append((batch.grads[0].dtype, [out.dtype for out in batch.outs]))
        real(self, group, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedAdam, "_apply", look)
        train((0, "bf16", 1, None, None), one_pass=True)
    assert seen
    assert all(grad == torch.bfloat16 and set(outs) == {torch.bfloat16} for grad, outs in seen)
