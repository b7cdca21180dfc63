"""What a ZeRO stage costs where there is nobody to share with: one rank, each stage beside stage 0."""

from __future__ import annotations

from benchmarks.case import Case, Job, Measure, Target

CASE = Case(
    name="zero_one_rank",
    title="one step of a 14M-parameter GPT on one rank, each stage beside stage 0, fp32, AdamW, clipping",
    file=__file__,
    measures=(
        Measure("ratio", "step ÷ own stage 0's beside it", "×", targets=(Target(1.02),)),
        Measure("step_ms", "one step", "ms"),
    ),
    contenders=("ours", "deepspeed"),
    parameters=tuple({"stage": stage} for stage in (0, 1, 2, 3)),  # stage 0 beside itself is the resolution
    rounds=3,
    timeout_s=600.0,
)

PAIRS = 40


def measure(job: Job) -> dict[str, float]:
    """Ratio and time of a step."""
    import copy

    import torch.distributed as dist

    from benchmarks.training import Engine, contest, small_gpt

    dist.init_process_group("gloo")
    model, batch = small_gpt(job, samples=2)
    reference = Engine(copy.deepcopy(model), 2, stage=0)
    contender = Engine(model, 2, **job.parameters)
    return contest(contender, reference, batch, pairs=PAIRS, warm_up=3)
