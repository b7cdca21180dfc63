"""A model with sparse attention under engines: every stage computes what one plain process does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.ops.sparse_attention import BigBirdSparsityConfig, SparseSelfAttention
from tests.harness import shared_ranks
from tests.models import batches, make, share

STEPS = 3
SECTION = {"mode": "bigbird", "block": 4, "num_random_blocks": 1, "attention": "unidirectional"}


class Attending(nn.Module):
    """An embedding, a layer of sparse attention and a head."""

    def __init__(self, own: bool = False) -> None:
        super().__init__()
        pattern = BigBirdSparsityConfig(2, block=4, attention="unidirectional") if own else None
        self.embedding = nn.Embedding(17, 8)
        self.projection = nn.Linear(8, 24)
        self.attention = SparseSelfAttention(pattern, max_seq_length=24)
        self.head = nn.Linear(8, 17)

    def forward(self, tokens, labels):
        heads = self.projection(self.embedding(tokens)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        hidden = self.attention(*heads).transpose(1, 2).flatten(2)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def build(stage, section=SECTION, model=None, **config):
    config = {
        "train_micro_batch_size_per_gpu": 4 // dist.get_world_size(),
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "sparse_attention": section,
        **config,
    }
    return deepspeed.initialize(model=make(Attending) if model is None else model, config=config)[0]


@shared_ranks(2)
def test_every_stage_computes_what_one_process_does(tmp_path):
    model, expected = make(Attending, own=True), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in batches(STEPS, 4, length=21):
        loss = model(*batch)
        expected.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for stage in (0, 1, 2, 3):
        engine, losses = build(stage), []
        for batch in batches(STEPS, 4, length=21):
            loss = engine(*share(batch, dist.get_rank(), 2))
            engine.backward(loss)
            engine.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / 2)
        assert losses == pytest.approx(expected, rel=1e-5)
        if stage == 3:
            engine.save_checkpoint(tmp_path)
            again = build(1)  # has no layout yet: what an engine gives is not part of the model
            again.load_checkpoint(tmp_path, load_optimizer_states=False)
            torch.testing.assert_close(
                again.module.head.weight, engine.module_state_dict()["head.weight"], rtol=0, atol=0
            )
            again.destroy()
        engine.destroy()


@shared_ranks(1)
def test_who_asks_for_a_pattern_and_who_does_not():
    with pytest.raises(DeepSpeedConfigError, match="no module of the model is a SparseSelfAttention"):
        build(0, model=nn.Linear(2, 2))
    with pytest.raises(DeepSpeedConfigError, match="sparse_attention is not given, and 1 SparseSelfAttention"):
        build(0, section=None)
    with pytest.raises(DeepSpeedConfigError, match="num_local_blocks is 4 and num_global_blocks 3"):
        build(0, section={"num_global_blocks": 3})
    own = make(Attending, own=True)
    engine = build(0, section={"mode": "dense"}, model=own)
    assert isinstance(own.attention.sparsity_config, BigBirdSparsityConfig)  # its own goes first
    engine.destroy()
