"""Experts beside tensor parallelism: dealt to its ranks with a part of the tokens each, or split over them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed.parallel import LayoutMpu, ParallelLayout
from deepspeed.parallel.regions import enter, leave
from deepspeed.utils import safe_get_full_fp32_param
from tests.distributed.moe.models import WIDTH, Model, batches, scrambled
from tests.harness import ranks


@dataclass(frozen=True)
class Case:
    """One way to spread and to route, on tp 2 × dp 2."""

    first: int
    second: int
    stage: int
    split: bool = False
    """The experts split their weights over tensor-parallel ranks."""
    options: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1


@dataclass(frozen=True)
class Shared:
    """An axis that copies of a module have in common."""

    axis: Any

    def __deepcopy__(self, _):
        return self


class SplitExpert(nn.Module):
    """Rows of the first weight and columns of the second, as Megatron's layers have them."""

    def __init__(self, axis) -> None:
        super().__init__()
        self.shared = Shared(axis)
        self.up = nn.Linear(WIDTH, 2 * WIDTH // axis.size, bias=False)
        self.down = nn.Linear(2 * WIDTH // axis.size, WIDTH, bias=False)
        for param in self.parameters():
            param.tensor_model_parallel = True

    def forward(self, rows):
        return leave(self.down(nn.functional.gelu(self.up(enter(rows, self.shared.axis)))), self.shared.axis)


def whole_expert():
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH, bias=False))


NAMES = {"up.weight": ("0.weight", 0), "down.weight": ("2.weight", 1)}


def counterparts(model, whole, layout, case):
    """(name, this rank's parameter, the same part of the whole model's)."""
    found, tensor = dict(whole.named_parameters()), layout["tp"]
    for name, param in model.named_parameters():
        if "deepspeed_experts" not in name:
            yield name, param, found[name]
            continue
        moe = getattr(model, name.split(".")[0])
        before, _, rest = name.partition("deepspeed_experts.")
        number, _, rest = rest.partition(".")
        first = layout.experts(moe.ep_size, fold_tp=not case.split)["ep"].rank * moe.num_local_experts
        whole_name, dim = NAMES[rest] if case.split else (rest, None)
        theirs = found[f"{before}deepspeed_experts.{first + int(number)}.{whole_name}"]
        yield name, param, theirs if dim is None else theirs.chunk(tensor.size, dim)[tensor.rank]


def check(case, layout):
    options = {**case.options, "enable_expert_tensor_parallelism": case.split}
    whole = scrambled(Model(expert=whole_expert() if case.split else None, **case.options))
    expert = SplitExpert(layout["tp"]) if case.split else None
    model = Model(case.first, case.second, expert=expert, **options)
    with torch.no_grad():
        for layer in (model.first, model.second):
            layer.join(layout)
        for _, mine, theirs in counterparts(model, whole, layout, case):
            mine.copy_(theirs)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}},
        "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": 20},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=LayoutMpu(layout))
    plain = torch.optim.AdamW(whole.parameters(), lr=0.01, weight_decay=0.0)
    data = layout["dp"]
    for step in range(2):
        for micro in range(case.accumulation):
            given = batches(step, micro)[: data.size]  # tensor-parallel ranks have the same one
            for batch in given:
                (whole(batch) / len(given) / case.accumulation).backward()
            engine.backward(engine(given[data.rank]))
            engine.step()
        norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        plain.step()
        plain.zero_grad()
        found = torch.tensor(engine.get_global_grad_norm())
        torch.testing.assert_close(found, norm, rtol=2e-5, atol=1e-6, msg=f"{found} is not {norm} in {case}")
    for name, mine, theirs in counterparts(model, whole, layout, case):
        value = safe_get_full_fp32_param(mine)
        torch.testing.assert_close(value, theirs.data, rtol=1e-4, atol=1e-6, msg=f"{name} in {case}")
    engine.destroy()


@ranks(4)
def test_four_ranks():
    """A sample that has every size beside every other and every stage, dealt and split."""
    with ParallelLayout.build(tp=2) as layout:
        for case in (
            Case(1, 2, 0, options={"k": 2}),
            Case(4, 1, 1, options={"k": 1, "use_residual": True}, accumulation=2),
            Case(2, 4, 2, options={"k": 2, "drop_tokens": False}),
            Case(4, 2, 3, options={"k": 3}),
            Case(1, 4, 3, options={"k": 1, "drop_tokens": False}, accumulation=2),
            Case(2, 1, 0, True, options={"k": 2}, accumulation=2),
            Case(1, 2, 1, True, options={"k": 3, "drop_tokens": False}),
            Case(2, 2, 2, True, options={"k": 1}),
            Case(2, 1, 3, True, options={"k": 2, "drop_tokens": False}, accumulation=2),
        ):
            check(case, layout)


@ranks(2)
def test_tensor_parallel_ranks_alone():
    """Without a further data-parallel rank there is nobody to shard dense parameters with."""
    with ParallelLayout.build(tp=2) as layout:
        for case in (Case(2, 1, 0), Case(1, 2, 1), Case(2, 1, 2), Case(1, 2, 3), Case(1, 1, 2, True)):
            check(case, layout)
