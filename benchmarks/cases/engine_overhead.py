"""What the engine adds to a plain PyTorch loop: GPT-2 small (124M parameters) on one rank, in fp32 on the CPU."""

from __future__ import annotations

from benchmarks.case import Case, Job, Measure, Target

CASE = Case(
    name="engine_overhead",
    title="one step of a 124M-parameter GPT on one rank, fp32, AdamW, clipping",
    file=__file__,
    measures=(
        Measure("ratio", "step ÷ PyTorch's beside it", "×", targets=(Target(1.02), Target(1.0, than="deepspeed"))),
        Measure("step_ms", "one step", "ms"),
    ),
    rounds=3,
    timeout_s=900.0,
)

LENGTH = 64
PAIRS = 24


def measure(job: Job) -> dict[str, float]:
    """Ratio and time of a step."""
    import torch

    from benchmarks.training import GPT, compare

    torch.manual_seed(0)
    model = GPT(layers=12, width=768, heads=12, vocabulary=50257, length=1024)
    batch = (torch.randint(50257, (1, LENGTH)), torch.randint(50257, (1, LENGTH)))
    return compare(job, model, batch, pairs=PAIRS, warm_up=2)
