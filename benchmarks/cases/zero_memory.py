"""Bytes of model states per rank at every ZeRO stage, counted from live tensors, beside the formula."""

from __future__ import annotations

from benchmarks.case import Case, Job, Measure, Target

CASE = Case(
    name="zero_memory",
    title="model states per rank of a 14M-parameter GPT, bf16 with fp32 masters, Adam",
    file=__file__,
    measures=(
        Measure("formula", "formula, with gradients", "MiB"),
        Measure("states", "counted after backward", "MiB"),
        Measure("kept_formula", "formula, without gradients", "MiB"),
        Measure("kept", "counted between steps", "MiB"),
        Measure("excess", "counted ÷ formula, the larger", "×", targets=(Target(1.01),)),
    ),
    contenders=("ours", "deepspeed"),
    ranks=(2,),
    parameters=(
        {"stage": 0},
        {"stage": 1},
        {"stage": 2},
        {"stage": 3, "stage3_param_persistence_threshold": 0},  # else small parameters stay whole
    ),
    rounds=1,  # bytes do not vary
)

MIB = 2**20


def measure(job: Job) -> dict[str, float]:
    """Counted and computed bytes, after the backward and after the step of the second step."""
    import torch.distributed as dist

    from benchmarks.states import live_bytes, zero_formula
    from benchmarks.training import Engine, small_gpt

    dist.init_process_group("gloo")
    model, batch = small_gpt(job)
    batch = tuple(part[:, :4] for part in batch)  # bf16 is slow on many CPUs, and bytes do not depend on it
    count = sum(param.numel() for param in model.parameters())
    others = live_bytes() - 4 * count  # the batch
    engine = Engine(model, 1, bf16=True, **job.parameters)
    engine(batch)
    engine.backward(engine.forward(batch))
    states = live_bytes() - others
    engine.update()
    kept = live_bytes() - others
    dist.destroy_process_group()
    expected = zero_formula(job.parameters["stage"], count, job.ranks)
    expected_kept = zero_formula(job.parameters["stage"], count, job.ranks, gradient=0)
    return {
        "formula": expected / MIB,
        "states": states / MIB,
        "kept_formula": expected_kept / MIB,
        "kept": kept / MIB,
        "excess": max(states / expected, kept / expected_kept),
    }
