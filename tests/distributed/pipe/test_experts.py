"""Experts in a pipeline: spread over the replicas of their stage, saved, and loaded into another number of stages."""

from pathlib import Path

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm
from deepspeed.checkpoint.formats.universal.convert import convert
from deepspeed.errors import UsageError
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.harness import ranks, store_path

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.3,
    "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
    "zero_allow_untested_optimizer": True,
}


class First(nn.Module):
    """Experts that hand on their output alone."""

    def __init__(self, ep_size):
        super().__init__()
        self.inner = MoE(8, nn.Linear(8, 8), num_experts=2, ep_size=ep_size, capacity_factor=4.0, min_capacity=0)

    def forward(self, x):
        return x + self.inner(x)[0]


def experts(ep_size, seed=3):
    torch.manual_seed(seed)
    return First(ep_size)


def start(ep_size, stage, stages=2, **options):
    """Four layers of experts, the same on any number of ranks."""
    layers = [experts(ep_size, seed) for seed in range(4)]
    method = {"partition_method": "uniform", **options}
    module = PipelineModule(layers, num_stages=stages, loss_fn=nn.functional.mse_loss, **method)
    return deepspeed.initialize(model=module, config={**CONFIG, "zero_optimization": {"stage": stage}})[0]


def samples(replica, count=2):
    generator = torch.Generator().manual_seed(replica)
    return iter([tuple(torch.rand(2, 8, generator=generator) for _ in range(2)) for _ in range(count)])


def train(engine, steps):
    """All replicas have the same data, so that their number does not matter."""
    return [float(engine.train_batch(samples(7))) for _ in range(steps)]


def compare(found, expected):
    assert {*found} == {*expected}
    for name, value in found.items():
        assert torch.allclose(value, expected[name], atol=1e-6, rtol=0), name


@ranks(4)
def test_experts_are_spread_over_the_replicas_of_their_stage():
    """As the same experts that every replica has, at the stages that split gradients, states and weights."""
    engine = start(1, 0)
    place = engine.module.mpu().get_data_parallel_rank()
    expected = [float(engine.train_batch(samples(place))) for _ in range(3)]
    own = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    engine.destroy()
    for stage, schedule in ((0, "1f1b"), (1, "zb-h1"), (2, "1f1b"), (3, "1f1b")):
        engine = start(2, stage, schedule=schedule)
        losses = [float(engine.train_batch(samples(place))) for _ in range(3)]
        assert losses == pytest.approx(expected, abs=1e-6), stage
        for name, param in engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([param]):
                assert torch.allclose(param, own[engine._parts.name_of(name)], atol=1e-6), name
        engine.destroy()
    with pytest.raises(UsageError, match="rank 0 has experts over 2 ranks, that of rank 2 over no"):
        row = PipelineModule([experts(2), nn.Linear(8, 8)], num_stages=2, partition_method="uniform")
        deepspeed.initialize(model=row, config=CONFIG)


@ranks(4)
def test_checkpoints_go_to_any_number_of_stages():
    for stage in (0, 1, 3):
        path = Path(f"{store_path()}-{stage}")
        engine = start(2, stage)
        train(engine, 2)
        engine.save_checkpoint(str(path), tag="t")
        whole = engine.zero3_consolidated_16bit_state_dict()
        after = train(engine, 2)
        engine.destroy()
        if comm.get_rank() == 0:
            compare(get_fp32_state_dict_from_zero_checkpoint(str(path), "t"), whole)
            convert(path / "t", path / "universal")
        comm.barrier()
        for stages, ep_size, zero, tag in ((2, 2, stage, "t"), (1, 2, 3 - stage, "universal"), (4, 1, stage, "t")):
            engine = start(ep_size, zero, stages)
            engine.load_checkpoint(str(path), tag=tag)
            found = engine.zero3_consolidated_16bit_state_dict()
            if comm.get_rank() == 0:
                compare(found, whole)
            assert train(engine, 2) == pytest.approx(after, abs=2e-6), (stage, stages, tag)
            engine.destroy()
