"""ZeRO stages 1, 2 and 3 on two ranks against real DeepSpeed and FSDP2: a GPT of 14M parameters, fp32 on the CPU."""

from __future__ import annotations

from benchmarks.case import Case, Job, Measure, Target

SHARDED = {"stage": 3, "stage3_param_persistence_threshold": 0}  # nothing stays whole

CASE = Case(
    name="zero_stages",
    title="one step of a 14M-parameter GPT at ZeRO stages 1, 2, 3 (gloo), fp32, AdamW, clipping",
    file=__file__,
    measures=(
        Measure(
            "ratio",
            "step ÷ DDP's beside it",
            "×",
            targets=(Target(1.0, than="deepspeed"), Target(1.0, than="torch:fsdp2", where={"stage": 3})),
        ),
        Measure("step_ms", "one step", "ms"),
    ),
    contenders=("ours", "deepspeed", "torch:fsdp2"),
    ranks=(2,),
    parameters=({"stage": 1}, {"stage": 2}, {"stage": 3}, SHARDED),
    rounds=3,
    timeout_s=600.0,
)

PAIRS = 30


def measure(job: Job) -> dict[str, float]:
    """Ratio and time of a step; FSDP2 shards parameters too, so it only takes part at stage 3."""
    if job.flavour == "fsdp2" and job.parameters["stage"] < 3:
        return {}

    from benchmarks.training import compare, small_gpt

    return compare(job, *small_gpt(job), pairs=PAIRS)
