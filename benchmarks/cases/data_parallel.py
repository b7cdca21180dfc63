"""Stage 0 on two ranks against DistributedDataParallel: a GPT of 14M parameters, in fp32 on the CPU."""

from __future__ import annotations

from benchmarks.case import Case, Job, Measure, Target

CASE = Case(
    name="data_parallel",
    title="one step of a 14M-parameter GPT, stage 0 (gloo), fp32, AdamW, clipping",
    file=__file__,
    measures=(
        Measure("ratio", "step ÷ DDP's beside it", "×", targets=(Target(1.0), Target(1.0, than="deepspeed"))),
        Measure("step_ms", "one step", "ms"),
    ),
    ranks=(2,),
    rounds=3,
    timeout_s=600.0,
)

VOCABULARY = 8192
BATCH, LENGTH = 1, 64
PAIRS = 30


def measure(job: Job) -> dict[str, float]:
    """Ratio and time of a step."""
    import torch

    from benchmarks.training import GPT, compare

    torch.manual_seed(0)
    model = GPT(layers=6, width=384, heads=6, vocabulary=VOCABULARY, length=LENGTH)
    torch.manual_seed(1 + job.rank)
    batch = (torch.randint(VOCABULARY, (BATCH, LENGTH)), torch.randint(VOCABULARY, (BATCH, LENGTH)))
    return compare(job, model, batch, pairs=PAIRS)
