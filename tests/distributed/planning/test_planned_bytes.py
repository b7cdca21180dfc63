"""The collectives of a plan are those that real ranks record in a step, one by one."""

from __future__ import annotations

from collections import Counter

import deepspeed
from deepspeed.comm.dispatch import DEFAULT
from deepspeed.comm.records import read
from deepspeed.planning import DeviceCeilings, plan
from tests.harness import ranks
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


def recorded(values: dict, steps: int) -> Counter:
    engine = deepspeed.initialize(model=Decoder(), config=values)[0]
    for _ in range(3):
        with DEFAULT.recorded() as entries:
            for _micro in range(steps):
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
        real.append((values, recorded(values, steps)))
    rank = deepspeed.comm.get_rank()
    deepspeed.comm.destroy_process_group()
    for values, found in real if rank == 0 else ():
        planned = plan(Decoder, values, world=world, per_node=PER_NODE, inputs=example_batch, device=HOST)
        told = Counter({(each.op, each.ranks, each.size): 0 for each in planned.collectives})
        for each in planned.collectives:
            told[each.op, each.ranks, each.size] += each.count
        assert told == found, values
