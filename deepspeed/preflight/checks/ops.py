"""Operations: every rank would run the same implementations, and none that should work fails to load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deepspeed.ops.registry import State, explain
from deepspeed.preflight.check import Check, Here
from deepspeed.preflight.finding import Finding, Level, Told, among, odd_ones, who

__all__ = ["Ops", "OpsFact"]

_HOST_STEP = {"native"}  # the implementations of a step over host memory that are made for it


@dataclass(frozen=True, slots=True)
class OpsFact:
    """Operation → the implementation that runs; operation → why a better one does not; whether states are offloaded."""

    chosen: dict[str, str]
    failed: dict[str, str] = field(default_factory=dict)
    offloaded: bool = False


class Ops(Check[OpsFact]):
    """What `ds_report` shows of operations is the same everywhere."""

    name = "ops"
    about = "implementations of operations are there, and equal"
    fact = OpsFact

    def gather(self, here: Here) -> OpsFact:
        lines = explain()
        failed = {f"{line.op}.{line.implementation}": line.reason for line in lines if line.state is State.FAILED}
        chosen = {line.op: line.implementation for line in lines if line.state is State.CHOSEN}
        config = here.config
        offloaded = config is not None and not isinstance(config, str)
        return OpsFact(chosen, failed, offloaded and config.schema.zero_optimization.offloads_optimizer)  # type: ignore[union-attr]

    def judge(self, told: Sequence[Told[OpsFact]]) -> list[Finding]:
        found = []
        for op in dict.fromkeys(op for each in told for op in each.fact.chosen):
            usual, others = odd_ones({each.rank: each.fact.chosen.get(op, "none") for each in told})
            for value, ranks in others.items():
                what = f"{who(among(told, ranks))}: {op} by {value}, elsewhere by {usual}"
                found.append(Finding(Level.WARNING, what, tuple(ranks), "ds_report tells there why"))
        reasons: dict[tuple[str, str], list[int]] = {}
        for each in told:
            for name, reason in each.fact.failed.items():
                reasons.setdefault((name, reason), []).append(each.rank)
        for (name, reason), ranks in reasons.items():
            what = f"{who(among(told, ranks))}: {name} failed to load: {reason}"
            found.append(Finding(Level.WARNING, what, tuple(ranks), "mend what it names, or choose another by DS_OP_…"))
        slow = [each for each in told if each.fact.offloaded and each.fact.chosen.get("cpu_adam") not in _HOST_STEP]
        if slow:
            what = f"{who(slow)}: offloaded states would be updated without the compiled step"
            advice = "install a C++ compiler there (ds_report tells what is missing)"
            found.append(Finding(Level.WARNING, what, tuple(each.rank for each in slow), advice))
        return found or [Finding(Level.OK, f"{len(told[0].fact.chosen)} operations, the same everywhere")]
