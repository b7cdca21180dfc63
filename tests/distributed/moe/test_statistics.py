"""Numbers about routers are those of all ranks, whichever kind of layer they belong to."""

from __future__ import annotations

import copy
import shutil
from functools import partial

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.events import ExpertsUsed
from deepspeed.moe.show import read
from deepspeed.moe.statistics import RouterStatistics
from tests.distributed.moe.models import EXPERTS, TOKENS, Model, StackedModel, batches
from tests.distributed.moe.test_expert_checkpoints import shared_folder
from tests.harness import shared_ranks


def trained(model, folder, **sections):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0}},
        "csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": type(model).__name__},
        **sections,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for micro in range(4):
        engine.backward(engine(batches(0, micro)[dist.get_rank()]))
        engine.step()
    engine.eval()
    engine(batches(0, 9)[dist.get_rank()])
    copied = copy.deepcopy(model.experts) if isinstance(model, StackedModel) else None
    engine.destroy()
    dist.barrier()
    return read(folder / type(model).__name__), copied


@shared_ranks(2)
def test_numbers_are_those_of_all_ranks():
    folder = shared_folder("statistics")
    torch.manual_seed(0)
    model = StackedModel()
    plain = copy.deepcopy(model)
    layers, copied = trained(model, folder, expert_parallel={"enabled": True, "autoep_size": 2})
    assert list(layers) == ["experts"]
    assert copied.listener is None
    for step in range(2):
        counts = torch.zeros(EXPERTS)
        for micro in (2 * step, 2 * step + 1):
            for batch in batches(0, micro):
                chosen = plain.gate(batch).topk(2).indices
                counts += torch.bincount(chosen.view(-1), minlength=EXPERTS)
        assert counts.sum() == 2 * 2 * TOKENS * 2
        expected = counts / counts.mean()
        samples = 4 * (step + 1)
        found = [layers["experts"].loads[number][samples] for number in range(EXPERTS)]
        torch.testing.assert_close(torch.tensor(found), expected)
        assert layers["experts"].dropped[samples] == 0
    layers, _ = trained(Model(2, 1, k=1, capacity_factor=0.5), folder)
    assert list(layers) == ["first", "second"]
    assert all(0.33 < share < 1 for history in layers.values() for share in history.dropped.values())
    assert len(layers["second"].dropped) == 2, "both steps, the last one told at the end"
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


class Checkpointed(Model):
    """Its first layer of experts runs again in backward; `again` is a way of activation checkpointing."""

    def __init__(self, again):
        super().__init__()
        self._again = again

    def forward(self, tokens):
        hidden, one = self._again(lambda hidden: self.first(hidden)[:2], torch.tanh(self.inward(tokens)))
        hidden, two, _ = self.second(torch.tanh(self.between(hidden)))
        return self.outward(hidden).square().mean() + 0.1 * (one + two)


@shared_ranks(1)
def test_a_layer_that_runs_again_in_backward_counts_once():
    ways = [partial(checkpoint, use_reentrant=reentrant) for reentrant in (True, False)]
    for again in (*ways, deepspeed.checkpointing.checkpoint):
        torch.manual_seed(0)
        optimizer = {"type": "AdamW", "params": {"lr": 0.0}}
        config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "optimizer": optimizer}
        engine, *_ = deepspeed.initialize(model=Checkpointed(again), config=config)
        uses = []
        with engine.events.subscribe(ExpertsUsed, lambda event, uses=uses: uses.append(event.layers)):
            statistics = RouterStatistics(engine.module, engine._parts.layout.samples).attach(engine.events)
            for micro in range(2):
                engine.backward(engine(batches(0, micro)[0]))
                engine.step()
            statistics.close()
        engine.destroy()
        ((first, second),) = [layers.values() for layers in uses]
        assert sum(first.counts) == sum(second.counts) == 2 * TOKENS
