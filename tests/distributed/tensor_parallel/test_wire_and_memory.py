"""What goes over the wire and what a rank holds are what docs/tensor_parallel.md says."""

from __future__ import annotations

from functools import partial

import pytest
import torch.distributed as dist

from deepspeed import comm
from deepspeed.config.parallel import TPTrainingConfig
from deepspeed.tensor_parallel import plan_model
from deepspeed.tensor_parallel.rules import SplitKind
from tests.distributed.tensor_parallel.families import make, start, tokens
from tests.harness import shared_ranks

BATCH, LENGTH, HIDDEN, LAYERS, VOCABULARY, INNER = 2, 8, 32, 2, 50, 48
ACTIVATION = BATCH * LENGTH * HIDDEN * 4


def sent(act):
    """What `act` returns, and by operation the number of calls and their bytes."""
    before = len(comm.recent_operations())
    result = act()
    found = {}
    for record in comm.recent_operations()[before:]:
        count, size = found.get(record.op, (0, 0))
        found[record.op] = count + 1, size + record.bytes
    return result, found


def split_embeddings(model, tp, **options):
    """How many embeddings are split: a version of Transformers whose plan has none leaves an untied one whole."""
    changes = plan_model(TPTrainingConfig(autotp_size=tp, **options), model, tp).changes
    return sum(change.kind is SplitKind.VOCABULARY for change in changes)


@shared_ranks(2)
def test_bytes_on_the_wire():
    """Per block two sums of a hidden state forward and two backward; embedding, output layer and loss once each."""
    tokens_ = BATCH * LENGTH
    for split_head, overlap, embedding in (
        (True, False, False),
        (False, False, False),
        (False, True, False),
        (True, False, True),
    ):
        model, plain = make("llama")
        options = {
            "vocab_parallel_lm_head": split_head,
            "tp_overlap_comm": overlap,
            "vocab_parallel_embedding": embedding,
        }
        embeddings = split_embeddings(plain, 2, **options)
        assert embeddings >= embedding
        engine = start(model, 2, tensor_parallel=options)
        batch = tokens(BATCH, LENGTH)
        engine(input_ids=batch, labels=batch)  # the first forward compares inputs, too
        loss, forward = sent(partial(engine, input_ids=batch, labels=batch))
        _, backward = sent(partial(engine.backward, loss.loss))
        sums = 2 * LAYERS
        halves = 2 if overlap else 1  # which together are as large
        entropy = 3 * tokens_ * 4 if split_head else 0
        calls = halves * sums + embeddings + (2 if split_head else 0)
        assert forward == {"all_reduce": (calls, (sums + embeddings) * ACTIVATION + entropy)}
        sums += split_head
        assert backward == {"all_reduce": (sums, sums * ACTIVATION)}
        engine.destroy()


@pytest.mark.parametrize("asked", [False, True])
@shared_ranks(4)
def test_parameters_of_a_rank(asked):
    model, plain = make("llama")  # 4 query heads, 2 key-value heads of 8
    options = {"vocab_parallel_lm_head": True, "vocab_parallel_embedding": asked}
    embeddings = split_embeddings(plain, 4, **options)
    assert embeddings >= asked
    start(model, 4, tensor_parallel=options)
    tp, rank = dist.get_world_size(), dist.get_rank()
    split = 2 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER
    head, norms = 2 * 8 * HIDDEN, 2 * HIDDEN  # a head of keys and values: fewer than ranks, of which each has one
    vocabulary = VOCABULARY // tp + (rank < VOCABULARY % tp)
    embedding = vocabulary if embeddings else VOCABULARY
    expected = LAYERS * (split // tp + head + norms) + (vocabulary + embedding) * HIDDEN + HIDDEN
    assert sum(param.numel() for param in model.parameters()) == expected
    whole = LAYERS * (split + 2 * head + norms) + (2 * VOCABULARY + 1) * HIDDEN
    assert sum(param.numel() for param in plain.parameters()) == whole
