"""A layer of experts on two ranks, forward and backward, at every gate, beside a dense layer in the same processes."""

from __future__ import annotations

from benchmarks.case import Case, Job, Measure, Target

CASE = Case(
    name="expert_layer",
    title="a layer of 8 experts of 256 × 512 on 2 ranks (gloo), 1,024 tokens each, fp32, forward and backward",
    file=__file__,
    measures=(
        Measure(
            "ratio",
            "step ÷ a dense layer's beside it",
            "×",
            targets=(Target(1.0, than="deepspeed"),),
        ),
        Measure("step_ms", "one step", "ms"),
    ),
    contenders=("ours", "deepspeed"),
    ranks=(2,),
    parameters=tuple({"k": k, "drop_tokens": drops} for k in (1, 2, 3) for drops in (True, False)),
    rounds=3,
    timeout_s=300.0,
)

WIDTH, INNER, EXPERTS, TOKENS = 256, 512, 8, 1024
PAIRS, WARM_UP = 20, 4


def measure(job: Job) -> dict[str, float]:
    """Median ratio of pairs of steps, and median time of the layer's."""
    import statistics
    import time

    import torch
    import torch.distributed as dist
    from torch import nn

    import deepspeed
    from deepspeed.moe.layer import MoE

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    expert = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))
    dense = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))
    layer = MoE(WIDTH, expert, EXPERTS, ep_size=2, **job.parameters)
    layer.set_deepspeed_parallelism()
    tokens = torch.randn(TOKENS, WIDTH, requires_grad=True)

    def of_experts() -> None:
        out, loss, _ = layer(tokens)
        (out.square().mean() + loss).backward()

    def of_dense() -> None:
        dense(tokens).square().mean().backward()

    def timed(step: object) -> float:
        dist.barrier()
        began = time.perf_counter()
        step()  # type: ignore[operator]
        dist.barrier()
        return time.perf_counter() - began

    pairs = []
    for number in range(WARM_UP + PAIRS):
        order = (of_experts, of_dense) if number % 2 else (of_dense, of_experts)
        found = {step: timed(step) for step in order}
        pairs.append((found[of_experts], found[of_dense]))
    pairs = pairs[WARM_UP:]
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    return {"ratio": ratio, "step_ms": 1e3 * statistics.median(ours for ours, _ in pairs)}
