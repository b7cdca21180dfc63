"""The engine on a GPU: the numbers of a plain loop, no wait for the device where none is needed, little overhead."""

from __future__ import annotations

import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from tests.models import PlainLoop, batches, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _one_rank():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def initialize(model, **config):
    config = {
        "train_micro_batch_size_per_gpu": 12,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        **config,
    }
    return deepspeed.initialize(model=model, config=config)[0]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_parity_with_a_plain_loop(precision, accumulation):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    section = (
        {}
        if precision == "fp32"
        else {precision: {"enabled": True, **({"loss_scale": 64.0} if dtype == torch.float16 else {})}}
    )
    engine = initialize(make(), gradient_accumulation_steps=accumulation, gradient_clipping=0.3, **section)
    loop = PlainLoop(
        make().cuda(),
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
        steps=accumulation,
        clip=0.3,
        param=dtype,
        scale=64.0 if dtype == torch.float16 else 1.0,
    )
    data = [tuple(part.cuda() for part in batch) for batch in batches(4 * accumulation, 12)]
    for step in range(4):
        window = data[step * accumulation : (step + 1) * accumulation]
        for batch in window:
            engine.backward(engine(*batch))
            engine.step()
        _, norm = loop.step(window)
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-4)
    for mine, theirs in zip(engine.module.parameters(), loop.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-5)
    engine.destroy()


def test_an_fp32_step_does_not_wait_for_the_device():
    engine = initialize(make(), gradient_clipping=1.0)
    batch = tuple(part.cuda() for part in batches(1, 12)[0])
    for _ in range(2):
        engine.backward(engine(*batch))
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.backward(engine(*batch))
        engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_torchs_fused_optimizer_skips_on_the_device(stage, precision):
    """Clipped and judged by the kernel itself: as plain steps, and a step with NaN changes and counts nothing."""

    def made(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    model = make()
    plain = make().cuda().to(torch.bfloat16 if precision == "bf16" else torch.float32)
    wide = [param.detach().float().clone().requires_grad_() for param in plain.parameters()]
    expected = torch.optim.AdamW(wide, lr=1e-2, fused=True)
    config = {
        "train_micro_batch_size_per_gpu": 12,
        "gradient_clipping": 0.3,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": precision == "bf16"},
    }
    engine = deepspeed.initialize(model=model, optimizer=made(model), config=config)[0]
    for number, (x, y) in enumerate(batches(5, 12)):
        factor = float("nan") if number == 2 else 1.0
        batch = x.cuda(), y.cuda()
        engine.backward(engine(*batch) * factor)
        engine.step()
        assert engine.was_step_applied() == (number != 2)
        if number == 2:
            continue
        plain(*batch).backward()
        for master, param in zip(wide, plain.parameters(), strict=True):
            master.grad, param.grad = param.grad.float(), None
        torch.nn.utils.clip_grad_norm_(wide, 0.3)
        expected.step()
        with torch.no_grad():
            for master, param in zip(wide, plain.parameters(), strict=True):
                param.copy_(master)
    torch.testing.assert_close(list(engine.module.parameters()), list(plain.parameters()), rtol=2e-3, atol=2e-3)
    assert {float(state["step"]) for state in engine.basic_optimizer.state.values()} == {4.0}
    engine.destroy()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def test_speed_and_memory_beside_a_plain_loop():
    """Prints the figures; fails only where memory is clearly worse, since times are for people to judge."""
    width, depth, tokens, count = 2048, 24, 8192, 20
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)

    def timed(step):
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for _ in range(count):
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / count * 1e3, torch.cuda.max_memory_allocated() / 2**30

    def plain():
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(width) for _ in range(depth))).cuda().bfloat16()
        masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
        optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)

        def step():
            model(x).float().square().mean().backward()
            for master, param in zip(masters, model.parameters(), strict=True):
                master.grad, param.grad = param.grad.float(), None
            torch.nn.utils.clip_grad_norm_(masters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                torch._foreach_copy_(list(model.parameters()), masters)

        return timed(step)

    def ours():
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(width) for _ in range(depth)))
        engine = initialize(model, bf16={"enabled": True}, optimizer={"type": "AdamW", "params": {"lr": 1e-4}})

        def step():
            engine.backward(engine(x).float().square().mean())
            engine.step()

        result = timed(step)
        engine.destroy()
        return result

    figures = {"plain": [], "ours": []}
    for _ in range(3):
        for name, run in (("plain", plain), ("ours", ours)):
            figures[name].append(run())
            torch.cuda.empty_cache()
    for name, runs in figures.items():
        sys.stdout.write(f"\n{name}: " + ", ".join(f"{ms:.2f} ms {gib:.2f} GiB" for ms, gib in runs))
    peak = {name: min(gib for _, gib in runs) for name, runs in figures.items()}
    assert peak["ours"] <= peak["plain"] * 1.02
