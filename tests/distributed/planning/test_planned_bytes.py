"""The collectives of a plan are those that real ranks record in a step, one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.comm.dispatch import DEFAULT
from deepspeed.comm.records import read
from deepspeed.pipe import PipelineModule
from deepspeed.planning import DeviceCeilings, plan
from deepspeed.planning.trace import Collective
from tests.harness import ranks
from tests.pipelines import LENGTH, VOCABULARY, pipeline
from tests.unit.planning.planned import Decoder, config, example_batch

PER_NODE = 2  # of four ranks: two nodes
AGREE = ("agreement.py",)  # words of ranks on what comes next: pretended ranks agree without a message
CASES = [
    (0, 1, {}),
    (1, 2, {}),
    (2, 1, {}),
    (3, 2, {}),
    (3, 1, {"zero_hpz_partition_size": 2}),
    (3, 2, {"zero_hpz_partition_size": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True}),
    (2, 1, {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 16}}),
    (1, 2, {"mics_shard_size": 2}),
    (3, 2, {"mics_shard_size": 2}),
    (2, 2, {"contiguous_gradients": False}),
]

HOST = DeviceCeilings("cpu", 1 << 40, 1e12, 1e12, 1e10, 1e9, 1e9, "this test")


def recorded(model: nn.Module, values: dict, steps: int) -> Counter:
    engine = deepspeed.initialize(model=model, config=values)[0]
    for _ in range(3):
        with DEFAULT.recorded() as entries:
            if isinstance(model, PipelineModule):
                engine.train_batch(iter([words(2)] * steps))
            for _micro in range(0 if isinstance(model, PipelineModule) else steps):
                engine.backward(engine(*example_batch(2)))
                engine.step()
    engine.destroy()
    records = [read(entry) for entry in entries]
    return Counter((each.op, each.ranks, each.bytes) for each in records if not each.file.endswith(AGREE))


@ranks(2, 4)
def test_collectives_are_those_that_ranks_record(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(PER_NODE))
    world = deepspeed.comm.get_world_size()
    real = []
    for stage, steps, keys in CASES:
        values = config(stage, steps)
        values["zero_optimization"] |= keys
        real.append((values, recorded(Decoder(), values, steps)))
    rank = deepspeed.comm.get_rank()
    deepspeed.comm.destroy_process_group()
    for values, found in real if rank == 0 else ():
        planned = plan(Decoder, values, world=world, per_node=PER_NODE, inputs=example_batch, device=HOST)
        assert told(planned.collectives) == found, values


def told(collectives: Iterable[Collective]) -> Counter:
    found: Counter = Counter()
    for each in collectives:
        found[each.op, each.ranks, each.size] += each.count
    return found


def words(batch: int, sequence: int | None = None) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(1, VOCABULARY, (batch, LENGTH))
    return tokens, tokens


@pytest.mark.parametrize("stage", [0, 3])
@ranks(2)
def test_stages_of_a_pipeline_send_what_is_planned(stage):
    values, steps = config(stage, 3), 3

    def model() -> PipelineModule:
        return pipeline(2, example_input=words(2)[0])

    real: list = [None, None]
    rank = deepspeed.comm.get_rank()
    deepspeed.comm.all_gather_object(real, recorded(model(), values, steps))
    deepspeed.comm.destroy_process_group()
    for found in plan(model, values, world=2, inputs=words, device=HOST).traces if rank == 0 else ():
        assert told(found.collectives) == real[found.place.rank], found.stage
