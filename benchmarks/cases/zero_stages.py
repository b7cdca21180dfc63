"""ZeRO stages 1, 2 and 3 on two ranks against real DeepSpeed and FSDP2: a GPT of 14M parameters, fp32 on the CPU.

With `offload` states live in another tier: "cpu", "nvme", or "cpu+param", where chunks of parameters live there, too.
The device is the host here, so that nothing has to move to the first of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

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
    parameters=(
        {"stage": 1},
        {"stage": 2},
        {"stage": 3},
        SHARDED,
        {"stage": 1, "offload": "cpu"},
        {"stage": 2, "offload": "cpu"},
        {"stage": 3, "offload": "cpu"},
        {"stage": 3, "offload": "cpu+param"},
        {"stage": 3, "offload": "nvme"},
    ),
    rounds=3,
    timeout_s=600.0,
)

PAIRS = 30


def offloaded(offload: str, folder: str) -> dict[str, Any]:
    """Keys of `zero_optimization` that send states, and parameters, to a tier."""
    device, _, more = offload.partition("+")
    tier = {"device": device, **({"nvme_path": folder} if device == "nvme" else {})}
    return {"offload_optimizer": tier, **({"offload_param": tier} if more else {})}


def measure(job: Job) -> dict[str, float]:
    """Ratio and time of a step; FSDP2 shards parameters too, so it only takes part at stage 3, and offloads nothing."""
    zero = dict(job.parameters)
    offload = zero.pop("offload", "")
    if job.flavour == "fsdp2" and (zero["stage"] < 3 or offload):
        return {}
    if offload:
        zero.update(offloaded(offload, job.folder))

    from benchmarks.training import compare, small_gpt

    return compare(dataclasses.replace(job, parameters=zero), *small_gpt(job), pairs=PAIRS)
