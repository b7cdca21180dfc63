"""Experts spread over ranks train as the whole model does in one process: every layout, stage and gate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.utils import safe_get_full_fp32_param
from tests.distributed.moe.models import Model, Normed, adopt, batches, counterparts, scrambled
from tests.harness import ranks


@dataclass(frozen=True)
class Case:
    """One way to spread and to route."""

    first: int
    second: int
    stage: int
    options: dict[str, Any] = field(default_factory=dict)
    data_first: bool = False
    accumulation: int = 1
    clip: float = 0.0
    uneven: bool = False
    client: bool = False
    """The optimizer is the script's own, with two groups."""
    in_backward: bool = False


def config(case):
    made = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clip,
        "use_data_before_expert_parallelism": case.data_first,
        "zero_optimization": {"stage": case.stage},
        "zero_allow_untested_optimizer": True,
    }
    if case.in_backward:
        made["optimizer_in_backward"] = {"enabled": True}
    if case.stage == 3:
        made["zero_optimization"]["stage3_param_persistence_threshold"] = 20
    return made if case.client else {**made, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}


def groups(model):
    """Two groups, each with dense parameters and those of experts."""
    halves: list[list[nn.Parameter]] = [[], []]
    for name, param in model.named_parameters():
        halves[name.startswith(("second", "outward"))].append(param)
    return [{"params": halves[0], "lr": 0.01}, {"params": halves[1], "lr": 0.02}]


def check(case: Case) -> None:
    whole = scrambled(Model(**case.options))
    model = Model(case.first, case.second, **case.options)
    adopt(model, whole, data_first=case.data_first)
    optimizer = torch.optim.AdamW(groups(model)) if case.client else None
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(case))
    plain = torch.optim.AdamW(groups(whole) if case.client else whole.parameters(), lr=0.01, weight_decay=0.0)
    if case.client:
        for group in (*plain.param_groups, *optimizer.param_groups):
            group["weight_decay"] = 0.01
    for step in range(3):
        for micro in range(case.accumulation):
            given = batches(step, micro, uneven=case.uneven)
            for batch in given:
                (whole(batch) / len(given) / case.accumulation).backward()
            engine.backward(engine(given[dist.get_rank()]))
            engine.step()
        norm = nn.utils.clip_grad_norm_(whole.parameters(), case.clip or 1e9)
        plain.step()
        plain.zero_grad()
        torch.testing.assert_close(torch.tensor(engine.get_global_grad_norm()), norm, rtol=2e-5, atol=1e-6)
        for name, mine, theirs in counterparts(model, whole, engine._parts.layout, data_first=case.data_first):
            found = safe_get_full_fp32_param(mine)
            torch.testing.assert_close(found, theirs.data, rtol=1e-4, atol=2e-6, msg=f"{name} in {case}, step {step}")
    engine.destroy()


@ranks(4)
def test_four_ranks():
    """A sample that has every size beside every other, every stage, gate, order of ranks."""
    for case in (
        Case(1, 2, 0, {"k": 1}, clip=0.3),
        Case(4, 2, 0, {"k": 2, "capacity_factor": 0.5}, accumulation=2, data_first=True),
        Case(2, 4, 1, {"k": 3}, accumulation=2, clip=0.3, uneven=True),
        Case(2, 2, 1, {"k": 2, "drop_tokens": False}, uneven=True, data_first=True),
        Case(4, 1, 2, {"k": 1, "capacity_factor": 0.5, "use_residual": True}, accumulation=2),
        Case(2, 4, 2, {"k": 1, "drop_tokens": False}, uneven=True, clip=0.3),
        Case(2, 2, 3, {"k": 2}, accumulation=2, clip=0.3),
        Case(4, 2, 3, {"k": 3, "drop_tokens": False}, uneven=True),
        Case(1, 4, 3, {"k": 1, "use_residual": True}, data_first=True, uneven=True),
        Case(2, 4, 2, {"k": 2}, client=True),
        Case(2, 1, 0, {"k": 2}, client=True, clip=0.3),
    ):
        check(case)


@ranks(2)
def test_two_ranks_with_experts_that_run_one_by_one():
    for case in (
        Case(2, 1, 0, {"k": 2, "expert": Normed()}),
        Case(1, 2, 2, {"k": 1, "expert": Normed(), "drop_tokens": False}, uneven=True),
        Case(2, 2, 3, {"k": 1, "expert": Normed()}, accumulation=2),
    ):
        check(case)


@ranks(2, 4)
def test_the_optimizer_in_backward():
    """Experts without a token on any rank among them: some ranks have gradients that others have not."""
    world = dist.get_world_size()
    cases = [Case(2, 1, stage, in_backward=True) for stage in range(4)]
    alone = {"k": 1, "drop_tokens": False, "expert": Normed()}
    cases += [Case(2, 1, stage, alone, in_backward=True, uneven=True) for stage in (0, 2, 3)]
    if world == 4:
        cases = [Case(2, 4, 0, in_backward=True), Case(4, 2, 1, in_backward=True, client=True)]
        cases += [Case(2, 2, stage, in_backward=True, accumulation=2, data_first=stage == 2) for stage in (2, 3)]
    for case in cases:
        check(case)
