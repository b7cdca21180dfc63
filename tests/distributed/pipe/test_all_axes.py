"""Stages, replicas, shared sequences and split layers at once: the same numbers as one process."""

import pytest
import torch

import deepspeed
from deepspeed.pipe import PipelineModule
from tests.distributed.pipe.test_sequences import CONFIG, COUNT, batches, llama, trained
from tests.distributed.pipe.test_with_others import whole_weights
from tests.harness import ranks

pytestmark = pytest.mark.usefixtures("with_transformers")

# (sequence, slices, ZeRO stage, schedule, attention, batch, weights tied, what stays split) on 2 stages of 4 ranks
CASES = [
    (2, 2, 0, "1f1b", "ulysses", "padded", True),
    (2, 2, 1, "zb-h1", "ring", "plain", False),
    (2, 2, 3, "zbv", "ulysses", "packed", True),
    (2, 2, 2, "1f1b", "ring", "padded", True, {"sequence_parallel": True, "vocab_parallel_lm_head": True}),
    (2, 1, 0, "zbv", "ring", "padded", False),
    (2, 1, 1, "1f1b", "ulysses", "packed", True),
    (2, 1, 2, "zb-h1", "ring", "plain", True),
    (2, 1, 3, "gpipe", "ulysses", "padded", False),
]


def of_replica(kind, replica):
    """Other tokens for each replica, of the same form."""
    for each in batches(kind):
        tokens = (each["input_ids"] + 3 * replica - 1) % 22 + 1
        yield {**each, "input_ids": tokens, "labels": torch.where(each["labels"] < 0, each["labels"], tokens)}


def check(sequence, slices, stage, schedule, attention, kind, tie, split=None):
    replicas = 4 // (sequence * slices)

    def losses(model):
        for replica in range(replicas):
            for batch in of_replica(kind, replica):
                yield model(**batch, use_cache=False).loss / replicas

    first = float(sum(losses(llama(tie))) / COUNT)
    loss, end = trained(llama(tie), losses)
    module = PipelineModule(llama(tie), num_stages=2, partition_method="uniform", schedule=schedule)
    more = {
        "sequence_parallel_size": sequence,
        "sequence_parallel": {"attention": attention},
        "zero_optimization": {"stage": stage},
        **({"tensor_parallel": {"autotp_size": slices, **(split or {})}} if slices > 1 else {}),
    }
    engine, *_ = deepspeed.initialize(model=module, config={**CONFIG, **more})
    layout = engine._parts.layout
    assert layout.sizes == {"pp": 2, "dp": replicas, "sp": sequence, "tp": slices}
    mine = layout["dp"].rank
    assert float(engine.eval_batch(of_replica(kind, mine))) == pytest.approx(first, abs=1e-6)
    found = [float(engine.train_batch(of_replica(kind, mine))) for _ in range(2)]
    assert found == pytest.approx([first, loss], abs=1e-6), f"losses of {schedule} at stage {stage}"
    for name, value in whole_weights(engine).items():
        worst = float((value - end[name]).abs().max())
        assert worst < 1e-6, f"{name} is {worst} away with {schedule} at stage {stage}"
    engine.destroy()


@pytest.mark.parametrize("slices", [1, 2])
@ranks(8, timeout=400)
def test_the_same_as_one_process(slices):
    for case in CASES:
        if case[1] == slices:
            check(*case)
