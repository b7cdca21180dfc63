"""Steps of an engine beside the same steps of the model in one piece."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.tensor_parallel.families import assert_close, parameters, tokens


def momentum(**options):
    """Not Adam, whose first steps have the size of the learning rate, however small a gradient is."""
    return {"optimizer": {"type": "SGD", "params": {"lr": 0.2, "momentum": 0.9}}, **options}


def zero(stage):
    section = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"zero_optimization": section, "zero_allow_untested_optimizer": True}


class Reference:
    """The same steps in one process."""

    def __init__(self, model, ranks, accumulation=1, clip=0.0, optimizer=None):
        self.model, self.ranks, self.accumulation, self.clip = model, ranks, accumulation, clip
        trained = [param for param in model.parameters() if param.requires_grad]
        self.optimizer = optimizer(trained) if optimizer else torch.optim.SGD(trained, lr=0.2, momentum=0.9)

    def step(self, batches):
        """Loss and norm of a step; each batch is that of all data-parallel ranks."""
        total = 0.0
        for batch in batches:
            for part in batch.chunk(self.ranks):
                loss = self.model(input_ids=part, labels=part).loss / self.ranks / self.accumulation
                loss.backward()
                total += loss.item()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, float(norm)


def train(engine, plain, accumulation=1, steps=3, clip=0.0, tolerance=2e-5, optimizer=None):
    """Train both; losses, norms and parameters are the same."""
    axis = engine._parts.layout["dp"]
    reference = Reference(plain, axis.size, accumulation, clip, optimizer)
    for step in range(steps):
        batches = [tokens(2 * axis.size, seed=10 * step + micro) for micro in range(accumulation)]
        expected, norm = reference.step(batches)
        total = torch.zeros(())
        for batch in batches:
            own = batch.chunk(axis.size)[axis.rank]
            loss = engine(input_ids=own, labels=own).loss
            total += loss.detach().float() / accumulation
            engine.backward(loss)
            engine.step()
        dist.all_reduce(total)
        assert total.item() / dist.get_world_size() == pytest.approx(expected, abs=tolerance)
        assert float(engine.get_global_grad_norm()) == pytest.approx(norm, rel=10 * tolerance)
    wanted = {name: param.detach() for name, param in plain.named_parameters()}
    assert_close(parameters(engine), wanted, 10 * tolerance)
