"""Variables that change how ranks talk and compute: the same everywhere, and none that cannot work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deepspeed.launcher import variables
from deepspeed.preflight.check import Check, Here
from deepspeed.preflight.finding import Finding, Level, Told, among, counted, odd_ones, who

__all__ = ["Environment", "EnvironmentFact"]

# What a launcher gives each rank or each host as its own.
_OWN = ("RANK", "SIZE", "MASTER_", "SLURM_", "PMI_", "PMIX_", "OMPI_", "MV2_COMM", "TORCHELASTIC_", "VISIBLE_DEVICES")
_OWN_NAMES = ("ZE_AFFINITY_MASK", "OMP_NUM_THREADS", "PDSH_RCMD_TYPE", "DEEPSPEED_RELAY", "CONDA_PREFIX")


@dataclass(frozen=True, slots=True)
class EnvironmentFact:
    """Variables as ds_report shows them, with secrets masked; and what is wrong with them."""

    variables: dict[str, str]
    warnings: list[str] = field(default_factory=list)


class Environment(Check[EnvironmentFact]):
    """Ranks were started with the same settings."""

    name = "environment"
    about = "variables of NCCL, gloo, torch and this package are equal"
    fact = EnvironmentFact

    def gather(self, here: Here) -> EnvironmentFact:
        shared = {name: value for name, value in variables.relevant(here.environ).items() if not _is_own(name)}
        return EnvironmentFact(shared, variables.warnings(here.environ))

    def judge(self, told: Sequence[Told[EnvironmentFact]]) -> list[Finding]:
        found = []
        for name in sorted({name for each in told for name in each.fact.variables}):
            usual, others = odd_ones({each.rank: each.fact.variables.get(name) for each in told})
            for value, ranks in others.items():
                here, there = ("not set" if text is None else text for text in (value, usual))
                what = f"{name} is {here} for {who(among(told, ranks))}, and {there} for the others"
                advice = "set it for all: a line in .deepspeed_env goes to every host"
                found.append(Finding(Level.WARNING, what, tuple(ranks), advice))
        for warning in dict.fromkeys(warning for each in told for warning in each.fact.warnings):
            found.append(Finding(Level.WARNING, warning, advice="correct or unset it"))
        count = counted(len(told[0].fact.variables), "relevant variable")
        return found or [Finding(Level.OK, f"{count}, the same everywhere")]


def _is_own(name: str) -> bool:
    return name in _OWN_NAMES or any(part in name for part in _OWN)
