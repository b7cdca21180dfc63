"""What the planner says of the job: memory of a rank at its peak, held against what is free on every one."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed.comm.discover import discover
from deepspeed.comm.init import DEFAULT_PORT
from deepspeed.config.memory import size_text
from deepspeed.launcher import processes
from deepspeed.preflight.check import (
    CheckFinding,
    Level,
    PreflightCheck,
    RankFact,
    ThisRank,
    by_host,
    finding,
    name_ranks,
    passed,
)
from deepspeed.preflight.checks.machine import available_memory, free_on_device

_MOST_SECONDS = 300.0
_PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_FIRST = 3


@dataclass(frozen=True, slots=True)
class PlanFact:
    """Bytes that are free, and on rank 0 the plan as `ds_plan --json` prints it, or why there is none."""

    device_free: int | None = None
    """None where ranks compute on cores."""
    host_free: int = 0
    plan: dict[str, Any] | None = None
    error: str = ""


class PlanCheck(PreflightCheck[PlanFact]):
    """The job of `--model` fits at its peak."""

    name = "plan"
    fact = PlanFact

    def gather(self, here: ThisRank) -> PlanFact:
        if here.options.model is None or here.schema is None:
            return PlanFact()
        device_free = free_on_device(here.local_rank)
        free = device_free, available_memory()
        if here.rank:
            return PlanFact(*free)
        own = discover(dict(here.environ), port=DEFAULT_PORT).local_size or here.world
        plan, error = _planned(here, own, device_free or max(free[1] // own, 1))
        return PlanFact(*free, plan, error)

    def judge(self, told: Sequence[RankFact[PlanFact]]) -> list[CheckFinding]:
        first = told[0].fact
        if first.error:
            return [finding(Level.WARNING, f"the job cannot be planned: {first.error}", told[:1], "see ds_plan --help")]
        if first.plan is None:
            return [passed("without --model and a config there is no plan")]
        peak = int(first.plan["memory"]["peak"])
        return [*_short(told, first.plan)] or [passed(f"a rank needs {size_text(peak)} at its peak, {_at(first.plan)}")]


def _planned(here: ThisRank, per_node: int, free: int) -> tuple[dict[str, Any] | None, str]:
    """The plan of a process of its own, which is no rank of the job, or why there is none."""
    config: Any = here.config
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(config.raw, file)
        file.flush()
        words = [str(here.options.model), file.name, "--world", str(here.world), "--per-node", str(per_node)]
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "deepspeed.planning", *words, "--memory", str(free), "--json"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env={name: value for name, value in here.environ.items() if name not in _PLACES},
                timeout=_MOST_SECONDS,
                check=False,
                preexec_fn=processes.end_with_parent(),
            )
        except subprocess.TimeoutExpired:
            return None, f"it took more than {_MOST_SECONDS:.0f} s"
    try:
        plan: dict[str, Any] = json.loads(ended.stdout)
    except ValueError:
        said = (ended.stderr.strip() or "it said nothing").splitlines()[-1]
        return None, said.removeprefix("ds_plan: error: ")
    return plan, ""


def _at(plan: dict[str, Any]) -> str:
    memory = plan["memory"]
    module = "" if memory["module"] is None else f" of {memory['module'] or 'the model'}"
    return f"in {memory['phase']}{module}"


def _short(told: Sequence[RankFact[PlanFact]], plan: dict[str, Any]) -> Iterator[CheckFinding]:
    """Devices and hosts with too little; states that are offloaded count for the host."""
    peak, away = int(plan["memory"]["peak"]), sum(plan["memory"]["host"].values())
    changes = "; or ".join(str(each["change"]) for each in plan["proposals"][:_FIRST])
    advice = f"what fits: {changes}" if changes else "use more ranks: ds_plan says how many"
    few = [each for each in told if each.fact.device_free is not None and each.fact.device_free < peak]
    if few:
        least = size_text(min(each.fact.device_free or 0 for each in few))
        what = (
            f"{name_ranks(few)}: a rank needs {size_text(peak)} at its peak, {_at(plan)}; as little as {least} is free"
        )
        yield finding(Level.PROBLEM, what, few, advice)
    for host, some in by_host(told).items():
        needed = sum(away + (peak if each.fact.device_free is None else 0) for each in some)
        free = min(each.fact.host_free for each in some)
        if needed > free:
            what = f"host {host}: its ranks need {size_text(needed)} of its memory, of which {size_text(free)} are free"
            yield finding(Level.PROBLEM, what, some, advice)
