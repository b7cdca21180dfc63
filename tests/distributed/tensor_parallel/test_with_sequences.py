"""Ranks that share layers × ranks that share sequences, by one config, against the model in one piece."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers as hf

import deepspeed
from deepspeed.errors import LayoutError
from deepspeed.parallel import LayoutMpu, ParallelLayout
from tests.distributed.tensor_parallel.families import assert_close, make, parameters, start, tokens
from tests.distributed.tensor_parallel.training import momentum, train, zero
from tests.harness import ranks, store_path


def both(attention="auto", **sections):
    return {"sequence_parallel_size": 2, "sequence_parallel": {"attention": attention}, **momentum(**sections)}


CASES = [
    # family, attention, stage, accumulation, options of tensor_parallel
    ("llama", "ulysses", 0, 1, {"vocab_parallel_lm_head": True}),
    ("uneven", "ulysses", 1, 2, {"tp_overlap_comm": True}),
    ("qwen3", "ring", 3, 1, {"vocab_parallel_lm_head": True}),
    ("one key", "auto", 2, 2, {"sequence_parallel": True}),
    ("phi3", "ulysses", 0, 1, {}),  # its attention modules have configs of their own
]


@ranks(4, timeout=400)
def test_layers_and_sequences_are_shared():
    for name, attention, stage, accumulation, options in CASES:
        model, plain = make(name)
        sections = both(attention, gradient_accumulation_steps=accumulation, gradient_clipping=0.5, **zero(stage))
        engine = start(model, 2, tensor_parallel=options, **sections)
        layout = engine._parts.layout
        assert [layout[axis].size for axis in ("dp", "sp", "tp")] == [1, 2, 2]
        assert layout["tp"].ranks in ((0, 1), (2, 3)), "neighbours, which are on one node"
        assert engine.train_batch_size() == 2 * accumulation
        train(engine, plain, accumulation, clip=0.5)
        engine.destroy()
    two = hf.LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48)
    with pytest.raises(LayoutError, match="1 attention heads cannot be shared out over 2"):
        start(hf.LlamaForCausalLM(two), 2, **both("ulysses"))


@ranks(4, timeout=400)
def test_an_mpu_and_checkpoints():
    """The same numbers with groups of an mpu; what it writes loads where neither, or only one of both, is shared."""
    folder = Path(store_path()).parent / f"{Path(store_path()).name}-checkpoints"
    batch = tokens()
    outcomes = []
    for mpu in (None, LayoutMpu(ParallelLayout.build(tp=2, sp=2))):
        model, _ = make("llama")
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "tensor_parallel": {"autotp_size": 2},
            **both("ulysses", **zero(3)),
        }
        engine = deepspeed.initialize(model=model, config=config, mpu=mpu)[0]
        for _ in range(2):
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            engine.step()
        outcomes.append(loss.item())
    assert outcomes[0] == pytest.approx(outcomes[1], abs=1e-6)
    theirs = engine.mpu
    assert (theirs.get_tensor_model_parallel_world_size(), theirs.get_sequence_parallel_world_size()) == (2, 2)
    assert theirs.get_sequence_data_parallel_world_size() == 2
    engine.save_checkpoint(folder, tag="a")
    saved = parameters(engine)
    for tp, sections in ((4, momentum(**zero(1))), (1, both("ring", **zero(3))), (2, momentum(**zero(0)))):
        reader = start(make("llama")[0], tp, **sections)
        reader.load_checkpoint(folder, tag="a")
        assert_close(parameters(reader), saved, 1e-7)
        reader.destroy()


class Numbered(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, place):
        return tokens(1, seed=place)[0]


@ranks(4, timeout=400)
def test_ranks_of_a_replica_see_one_sample():
    for tp, sequence, replicas in ((2, 2, 1), (2, 1, 2)):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "sequence_parallel_size": sequence,
            "data_parallel_size": replicas,
            "tensor_parallel": {"autotp_size": tp},
        }
        model, _ = make("llama")
        engine, _, loader, _ = deepspeed.initialize(model=model, config=config, training_data=Numbered())
        seen = torch.cat(list(loader))
        parts = [torch.zeros_like(seen) for _ in range(4)]
        dist.all_gather(parts, seen)
        axis = engine._parts.layout["dp"]
        first = [part for rank, part in enumerate(parts) if rank % (4 // replicas) == 0]
        assert all(torch.equal(part, first[rank // (4 // replicas)]) for rank, part in enumerate(parts))
        assert sorted(map(tuple, torch.cat(first).tolist())) == sorted(
            tuple(tokens(1, seed=place)[0].tolist()) for place in range(8)
        )
        assert axis.size == replicas
        engine.destroy()
