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

PAIRS = 30


def measure(job: Job) -> dict[str, float]:
    """Ratio and time of a step."""
    from benchmarks.training import compare, small_gpt

    return compare(job, *small_gpt(job), pairs=PAIRS)
