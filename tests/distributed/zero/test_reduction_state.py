"""Reductions that remember something: checkpoints carry it, and engines close them."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.zero import build
from tests.harness import shared_ranks, store_path


class Remembering:
    """A reduction that counts what it reduced."""

    made: ClassVar[list[Remembering]] = []

    def __init__(self, plain):
        self._plain, self.count, self.closed = plain, torch.zeros(1), False
        Remembering.made.append(self)

    def __getattr__(self, name):
        return getattr(self._plain, name)

    def start(self, send, share):
        self.count += 1
        return self._plain.start(send, share)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count.copy_(state["count"])

    def close(self):
        self.closed = True


@pytest.mark.parametrize("stage", [0, 1, 3])
@shared_ranks(2)
def test_what_a_reduction_remembers_is_in_checkpoints(stage):
    plain = build.make_reduction
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "make_reduction", lambda *given: Remembering(plain(*given)))
        counts = []
        for again in (False, True):
            Remembering.made.clear()
            engine, *_ = deepspeed.initialize(model=nn.Linear(3, 2), config=config)
            (reduction,) = Remembering.made
            if again:
                engine.load_checkpoint(store_path())
                counts.append(float(reduction.count))
            else:
                for _ in range(3):
                    engine.backward(engine(torch.ones(1, 3)).sum())
                    engine.step()
                counts.append(float(reduction.count))
                engine.save_checkpoint(store_path())
            engine.destroy()
            assert reduction.closed
    assert counts[0] >= 3
    assert counts[0] == counts[1]
