"""Parameters that lie on a part of the ranks, with equal copies on the rest: the same numbers as one process."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.config import DeepSpeedConfig
from deepspeed.parallel import ParallelLayout
from deepspeed.precision.policy import Precision
from deepspeed.zero.agreement import RankAgreement
from deepspeed.zero.build import make_block_gather, make_reduction
from deepspeed.zero.gradients.reducer import GradientReducer, ReductionSettings
from deepspeed.zero.placement import Placement
from deepspeed.zero.states.groups import BlockGroup
from deepspeed.zero.states.norm import NormRanks
from deepspeed.zero.states.planner import GroupPlanner
from deepspeed.zero.states.states import OptimizerStates
from tests.harness import shared_ranks

WIDTH = 6


@pytest.mark.parametrize("accumulation", [1, 2])
@shared_ranks(4)
def test_shards_over_a_part_of_the_ranks_and_copies_over_the_rest(accumulation):
    """As MiCS does for all parameters; here for one of two layers, beside one that lies on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    plain = copy.deepcopy(model)
    layout = ParallelLayout.build()
    world = layout["dp", "sp"]
    inter, intra = world.split(size=2)
    everywhere, part = Placement(world), Placement(intra, replicate=inter)
    parts = {id(param) for param in model[2].parameters()}
    config = DeepSpeedConfig(
        {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, "reduce_bucket_size": 20}}
    )
    schema = config.schema
    precision = Precision.from_config(schema)
    names = {id(param): name for name, param in model.named_parameters()}
    planner = GroupPlanner(
        schema,
        lambda param: part if id(param) in parts else everywhere,
        precision,
        names,
        {},
        partial(make_reduction, schema),
        partial(BlockGroup, gather=make_block_gather(schema)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states = OptimizerStates(optimizer, planner.groups, NormRanks(world, None, lambda _: False, all_used=False))
    ways, agreement = ReductionSettings(every_backward=True, limit=20, strict=True), RankAgreement(world)
    reducer = GradientReducer(lambda: states.groups, planner.reduction_of, ways, agreement, registered=model.parameters)
    states.reducer = reducer
    expected = torch.optim.SGD(plain.parameters(), lr=0.1)
    with ExitStack() as stack:
        stack.callback(reducer.close)
        for step in range(3):
            batches = torch.randn(accumulation, 4, 2, WIDTH, generator=torch.Generator().manual_seed(step))
            for micro in range(accumulation):
                reducer.arm()
                (model(batches[micro, dist.get_rank()]).square().mean() / accumulation).backward()
                reducer.settle()
            reducer.conclude()
            states.take_gradients()
            sum(plain(batch).square().mean() for batch in batches.flatten(0, 1)).div(4 * accumulation).backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
            torch.testing.assert_close(states.norm.wait(), norm, rtol=1e-5, atol=1e-6)
            states.update(optimizer)
            states.publish()
            states.zero_grad()
            reducer.forget()
            expected.step()
            expected.zero_grad()
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
