"""How many elements a second a CPU AdamW step updates: one large tensor, and hundreds of tiny ones."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.case import Case, Job, Measure, Target

CASE = Case(
    name="optimizer_step",
    title="AdamW step on the CPU, fp32",
    file=__file__,
    measures=(
        Measure("step_ms", "one step", "ms", targets=(Target(1.1, than="torch:fused"),)),
        Measure("rate", "elements updated", "M/s", better="higher"),
    ),
    # real DeepSpeed compiles its CPU Adam for minutes at the first use
    contenders=("ours", "deepspeed", "torch:fused", "torch:foreach"),
    parameters=({"tensors": 1, "elements": 50_000_000}, {"tensors": 400, "elements": 4096}),
    rounds=5,
    timeout_s=900.0,
)

REPEATS = 5


def optimizer(job: Job, params: list[Any]) -> Any:
    """The contender's AdamW."""
    if job.contender == "torch":
        import torch

        return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01, **{job.flavour: True})
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, lr=1e-3, weight_decay=0.01)


def measure(job: Job) -> dict[str, float]:
    """The fastest of a few steps, after one that makes the state."""
    import torch

    count, elements = job.parameters["tensors"], job.parameters["elements"]
    params = [torch.nn.Parameter(torch.randn(elements)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn_like(param)
    adam = optimizer(job, params)
    adam.step()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        adam.step()
        times.append(time.perf_counter() - start)
    return {"step_ms": min(times) * 1e3, "rate": count * elements / min(times) / 1e6}
