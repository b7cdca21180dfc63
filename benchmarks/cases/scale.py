"""Rank 0 of 8 to 16,384 ranks, alone in its process: host time, collectives, bytes and memory of a training step."""

from __future__ import annotations

from benchmarks.case import Case, Job, Measure, Target, Value

WORLDS = (8, 64, 1024, 16384)
ZERO: tuple[dict[str, Value], ...] = (
    {"stage": 1},
    {"stage": 2},
    {"stage": 3},
    {"stage": 3, "persistent": 0},  # nothing stays whole
    {"stage": 3, "persistent": 0, "bucket": 789_760},  # of one block, as large models have them: many collectives
)
KINDS = {
    "all-gather": "all-gathers",
    "reduce-scatter": "reduce-scatters",
    "all-reduce": "all-reduces",
    "reduce": "reduces to one rank",
    "other": "other operations",
}
THEIRS = (Target(1.0, than="deepspeed"), Target(1.0, than="torch:fsdp2", where={"stage": 3}))

CASE = Case(
    name="scale",
    title="one step of an 8M-parameter GPT as rank 0 of many on torch's fake group, fp32, AdamW, clipping; a "
    "collective is one copy, whose time is subtracted",
    file=__file__,
    measures=(
        Measure("ratio", "host time of a step ÷ plain PyTorch's", "×", targets=THEIRS),
        Measure("step_ms", "host time of a step", "ms"),
        Measure("init_ms", "initialize", "ms", targets=THEIRS),
        Measure("first_ms", "the first step", "ms", targets=THEIRS),
        *(
            measure
            for kind, title in KINDS.items()
            for measure in (
                Measure(f"{kind} calls", title, ""),
                Measure(f"{kind} mib", "  sent by a rank", "MiB"),
            )
        ),
        Measure("agreements", "agreements of hosts", ""),
        Measure("agreement_ms", "  waiting for them, computed", "ms"),
        Measure("kept_mib", "memory between steps", "MiB"),
        Measure("peak_mib", "peak of a step", "MiB", targets=THEIRS),
        Measure("backward_mib", "peak of backward over its start", "MiB"),
    ),
    contenders=("ours", "deepspeed", "torch:fsdp2"),
    parameters=tuple({"world": world, **zero} for world in WORLDS for zero in ZERO),
    rounds=2,
    timeout_s=900.0,
)


def measure(job: Job) -> dict[str, float]:
    """Everything, of this contender; FSDP2 shards parameters, so it only takes part at stage 3."""
    if job.flavour == "fsdp2" and job.parameters["stage"] < 3:
        return {}

    from benchmarks.rank_zero import measure_rank

    return measure_rank(job)
