"""Models as they come against themselves in one piece: losses and gradients, of all families."""

from __future__ import annotations

import torch.distributed as dist

from tests.distributed.tensor_parallel.families import FAMILIES, assert_close, make, start, tokens, whole
from tests.harness import ranks

NAMES = list(FAMILIES)


def compare(name, **options):
    model, plain = make(name)
    labels = tokens().clone()
    labels[0, :3] = -100
    expected = plain(input_ids=tokens(), labels=labels)
    expected.loss.backward()
    engine = start(model, dist.get_world_size(), tensor_parallel=options)
    found = engine(input_ids=tokens(), labels=labels)
    engine.backward(found.loss)
    assert abs(found.loss.item() - expected.loss.item()) < 1e-5, name
    local = {path: param.grad for path, param in engine.module.named_parameters() if param.grad is not None}
    wanted = {path: param.grad for path, param in plain.named_parameters() if param.grad is not None}
    assert_close(whole(engine, local), wanted)
    engine.destroy()


def sample(world):
    """Every family; the output layer as the model's plan says, split, and whole, by turns that ranks shift."""
    for place, name in enumerate(NAMES):
        head = (None, True, False)[(place + world // 2) % 3]
        overlap = (place + world // 4) % 2 == 0
        yield name, {"vocab_parallel_lm_head": None if name == "bert" else head, "tp_overlap_comm": overlap}


@ranks(2, 4, timeout=300)
def test_losses_and_gradients():
    for name, options in sample(dist.get_world_size()):
        compare(name, **options)
