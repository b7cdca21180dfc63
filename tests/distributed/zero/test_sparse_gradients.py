"""Gradients of embeddings that come to their owners as touched rows: the bits of dense ones, and few bytes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed import comm
from deepspeed.zero import GatheredParameters
from tests.covering import pairs
from tests.harness import shared_ranks

ROWS, WIDTH = 101, 5


class Words(nn.Module):
    """Two embeddings, of which one is long for its rows, and a layer between them."""

    def __init__(self, *, sparse):
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.types = nn.EmbeddingBag(3, WIDTH, mode="sum")
        self.unused = nn.Embedding(7, WIDTH, sparse=sparse)

    def forward(self, tokens):
        hidden = self.layer(self.words(tokens)) + self.types(tokens.reshape(-1, 1) % 3).view(*tokens.shape, WIDTH)
        return hidden.float().square().mean()


def tokens(step):
    """Some that several ranks have, some of one rank; one rank repeats a word, and sometimes has only one."""
    rank = dist.get_rank()
    return torch.tensor([[0, 100, 3 * step + rank, 50]]) if rank != 1 or step % 3 else torch.tensor([[100, 100]])


def train(stage, precision, accumulation, more, *, sparse, rows, steps=3):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "sparse_gradients": rows,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **more},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    engine = deepspeed.initialize(model=Words(sparse=sparse), config=config)[0]
    for step in range(steps * accumulation):
        engine.backward(engine(tokens(step)))
        engine.step()
    with GatheredParameters(list(engine.module.parameters())):
        values = torch.cat([param.detach().float().reshape(-1) for param in engine.module.parameters()])
    engine.destroy()
    return values


OPTIONS = {
    "plain": {},
    "offload": {"offload_optimizer": {"device": "cpu"}},
    "small buckets": {"reduce_bucket_size": 16},
    "MiCS": {"mics_shard_size": 2},
}
CASES = pairs(
    (1, 2, 3),
    ("fp32", "bf16"),
    (1, 2),
    tuple(OPTIONS),
    ((True, False), (False, True), (True, True)),
)


@pytest.mark.parametrize("stage", [1, 2, 3])
@shared_ranks(2, 4)
def test_the_bits_of_dense_gradients(stage):
    for case, precision, accumulation, name, (sparse, rows) in CASES:
        if case == stage:
            more = OPTIONS[name]
            dense = train(stage, precision, accumulation, more, sparse=False, rows=False)
            found = train(stage, precision, accumulation, more, sparse=sparse, rows=rows)
            assert torch.equal(found, dense), (name, precision, accumulation, sparse, rows)


@pytest.mark.parametrize("stage", [1, 2, 3])
@shared_ranks(3)
def test_touched_rows_travel(stage, monkeypatch):
    sent, real = [], comm.all_to_all_single

    def note(out, given, *args, **options):
        if given.is_floating_point():
            sent.append(given.numel())
        return real(out, given, *args, **options)

    monkeypatch.setattr(comm, "all_to_all_single", note)
    apart = {"reduce_bucket_size": 1}
    train(stage, "fp32", 1, apart, sparse=True, rows=False, steps=1)
    least = 2 * WIDTH  # a slice may begin inside of a row
    assert any(0 < numel <= 4 * least for numel in sent), sent
    assert max(sent) < ROWS * WIDTH / 2, sent
    sent.clear()
    train(stage, "fp32", 1, apart, sparse=False, rows=False, steps=1)
    assert max(sent) > ROWS * WIDTH / 2, sent


@shared_ranks(2)
def test_an_engine_has_the_calls():
    """The mean of sparse gradients over a group, one by one and in place; rows of any number from each rank."""
    engine = deepspeed.initialize(model=nn.Linear(2, 2), config={"train_micro_batch_size_per_gpu": 1})[0]
    rank, group = dist.get_rank(), engine.data_parallel_group
    made = torch.sparse_coo_tensor([[0, 3] if rank else [3]], torch.full((1 + rank, 2), 2.0), (5, 2)).coalesce()
    mean = engine.sparse_allreduce(made, group)
    assert mean.is_sparse
    assert mean.to_dense()[:, 0].tolist() == [1.0, 0.0, 0.0, 2.0, 0.0]
    assert engine.sparse_allreduce_bucket([made], group, dp_world_size=1)[0].to_dense()[3, 1] == 4.0
    engine.sparse_allreduce_no_retain([made], group)
    assert torch.equal(made.to_dense(), mean.to_dense())
    assert [len(each) for each in engine.sparse_all_gather(torch.ones(1 + rank, 3), group)] == [1, 2]
    engine.destroy()
