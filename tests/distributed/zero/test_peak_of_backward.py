"""What a backward allocates at most beyond what is there when it begins, counted from live tensors."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.zero.gradients.bucket import Bucket
from tests.harness import shared_ranks

WIDTH, LAYERS = 512, 10
LAYER = WIDTH * WIDTH
MODEL = LAYERS * LAYER * 4
LIMITS = {2: 0.7, 3: 0.4}  # of the model's size
STEPS = 3


class Layers(nn.Module):
    """Linear layers without biases; with `scales`, a small parameter before each, as norms are."""

    def __init__(self, *, scales=False, unused=False, recompute=None):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        self.scales = nn.ParameterList([torch.ones(WIDTH) for _ in range(LAYERS)]) if scales else None
        self.unused = nn.Linear(WIDTH, WIDTH, bias=False) if unused else None
        self.recompute = recompute

    def forward(self, x):
        for place, layer in enumerate(self.layers):
            if self.scales is not None:
                x = x * self.scales[place]
            if self.recompute is None:
                x = torch.tanh(layer(x))
            else:
                x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=self.recompute)
        return x.square().mean()


def groups(model):
    """Decayed and not decayed, as the Trainer of Transformers makes them."""
    decayed = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() < 2]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def alive():
    """Bytes of all tensors that Python knows, each memory once."""
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def peaks(stage, monkeypatch, *, accumulation=1, **options):
    """Of each backward, in sizes of the model: what is there when a gradient arrives and when one is unpacked."""
    gc.freeze()  # what was there before need not be looked through every time
    torch.manual_seed(0)
    model = Layers(**options)
    seen = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: seen.append(alive()))
    unpack = Bucket.unpack
    monkeypatch.setattr(Bucket, "unpack", lambda *args: (seen.append(alive()), unpack(*args), seen.append(alive()))[1])
    engine = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups(model) if options.get("scales") else model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": accumulation,
            "zero_optimization": {
                "stage": stage,
                "reduce_bucket_size": LAYER,
                "stage3_param_persistence_threshold": 0,
            },
        },
    )[0]
    found = []
    size = MODEL + (LAYER * 4 if options.get("unused") else 0)
    for _ in range(STEPS):
        loss = engine(torch.randn(2, WIDTH, requires_grad=options.get("recompute") is not None))
        gc.collect()
        before = alive()
        seen.clear()
        engine.backward(loss)
        found.append((max(seen) - before) / size)
        engine.step()
    return found


CASES = {
    "one group": {},
    "two groups": {"scales": True},
    "an unused layer": {"unused": True},
    "two groups and an unused layer": {"scales": True, "unused": True},
    "reentrant checkpointing": {"recompute": True},
    "checkpointing": {"recompute": False},
    "accumulation": {"accumulation": 2},
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", list(CASES))
@shared_ranks(2)
def test_gradients_leave_as_they_arrive(name, stage):
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = peaks(stage, monkeypatch, **CASES[name])
    assert max(found) <= LIMITS[stage], found
