"""MiCS: shards over groups of ranks, equal ones on the rest, with the numbers, bytes and files of one training."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed import comm
from deepspeed.comm.operations import ReduceOp
from deepspeed.comm.records import CollectiveFinished
from deepspeed.errors import DeepSpeedConfigError, LayoutError, UsageError
from tests.closeness import assert_same_training
from tests.covering import pairs
from tests.distributed.zero.test_zero_parity import ADAMW, DTYPES, train, train_plainly
from tests.harness import shared_ranks
from tests.models import batches, make, share
from tests.user_models import whole

CASES = pairs((1, 2, 3), list(DTYPES), (1, 3), (0.0, 0.3))


@shared_ranks(4)
def test_trains_as_one_process():
    for stage, precision, accumulation, clip in CASES:
        plain = train_plainly(precision, accumulation=accumulation, clip=clip)
        found = train(stage, precision, accumulation=accumulation, clip=clip, mics_shard_size=2)
        assert_same_training(found, plain)


def engine_of(stage, *, accumulation=1, model=None, shard_size=2, **options):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "mics_shard_size": shard_size}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": ADAMW,
        "zero_optimization": zero,
        **options,
    }
    return deepspeed.initialize(model=make() if model is None else model, config=config)[0]


def step(engine, seed=1, passes=1):
    for batch in batches(passes, 8, seed=seed):
        engine.backward(engine(*share(batch, dist.get_rank(), 4)))
        engine.step()


def same_on_all(engine):
    for value in whole(engine).values():
        least, most = value.clone(), value.clone()
        comm.all_reduce(least, op=ReduceOp.MIN)
        comm.all_reduce(most, op=ReduceOp.MAX)
        if not torch.equal(least, most):
            return False
    return True


@shared_ranks(4)
def test_copies_are_summed_once_per_step():
    """An all-reduce of 2Ψ/L bytes, which moves 4Ψ/L·(N−1)/N a rank, and nothing else between groups but numbers."""
    for stage in (2, 3):
        engine = engine_of(stage, accumulation=3, bf16={"enabled": True})
        assert (engine.mics_shard_size(), engine.zeropp_loco_param(), engine.sparse_gradients_enabled()) == (
            2,
            None,
            False,
        )
        step(engine, passes=3)
        seen = []
        with comm.dispatcher.events.subscribe(CollectiveFinished, seen.append):
            step(engine, passes=3)
        sums = [event.bytes for event in seen if (event.label or "").startswith("gradients of equal shards")]
        others = [event.bytes for event in seen if event.group_size == 4]
        mine = sum(piece.master.numel() for group in engine._parts.states.groups for piece in group.pieces)
        assert sum(sums) == 2 * mine
        total = sum(param.ds_numel if stage == 3 else param.numel() for param in engine.module.parameters())
        assert abs(mine - total / 2) < 16
        assert max(others) < 200  # what hosts tell each other, and the norm
        engine.destroy()


@shared_ranks(4)
def test_gathers_between_nodes_first(monkeypatch):
    """On two pretended nodes a group of four gathers in two hops of two ranks each, and nothing else changes."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for keys in ({}, {"zero_quantized_weights": True}, {"allgather_sequential": True}):
        found, between = [], []
        for hops in (False, True):
            zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "mics_shard_size": 4}
            zero |= {"mics_hierarchical_params_gather": hops, **keys}
            engine = engine_of(3, model=make(), zero_optimization=zero)
            step(engine)
            seen = []
            with comm.dispatcher.events.subscribe(CollectiveFinished, seen.append):
                step(engine, seed=2)
            gathers = [event for event in seen if "all_gather" in event.op and event.bytes > 64]
            assert {event.group_size for event in gathers} == ({2} if hops else {4})
            between.append(sum(event.links.between for event in gathers))
            found.append(whole(engine))
            engine.destroy()
        assert between[1] == pytest.approx(between[0] * 2 / 3)  # two chunks come to a node instead of three
        for name, value in found[0].items():
            assert torch.equal(found[1][name], value), (keys, name)


@shared_ranks(4)
def test_files_have_one_copy_and_load_at_any_size(tmp_path):
    for stage, kind in ((1, "safetensors"), (3, "deepspeed")):
        folder = tmp_path / f"{stage}{kind}"
        engine = engine_of(stage, checkpoint={"format": kind})
        step(engine)
        engine.save_checkpoint(str(folder), tag="one")
        names = [path.name for path in (folder / "one").iterdir()]
        assert sum("optim_states" in name or name.startswith("fragments_") for name in names) == 2, names
        assert sum("rank_state" in name or "optim_states" in name for name in names) == 4, names
        step(engine, seed=2)
        expected = whole(engine)
        engine.destroy()
        for size, other in ((2, stage), (-1, 2), (4, 3)):
            loaded = engine_of(other, model=make(seed=7), shard_size=size, checkpoint={"format": kind})
            loaded.load_checkpoint(str(folder))
            step(loaded, seed=2)
            for name, value in whole(loaded).items():
                torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
            assert same_on_all(loaded)
            loaded.destroy()


@shared_ranks(4)
def test_models_are_born_over_their_groups():
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "mics_shard_size": 2, "stage3_param_persistence_threshold": 0},
    }
    with deepspeed.zero.MiCS_Init(config_dict_or_path=config):
        model = make(seed=dist.get_rank())  # the values of the first rank count
    assert model.up.weight.ds_tensor.numel() == make().up.weight.numel() // 2
    engine = engine_of(3, model=model)
    assert same_on_all(engine)
    expected = {name: value.detach() for name, value in make().named_parameters()}
    for name, value in whole(engine).items():
        assert torch.equal(value, expected[name])
    for modifier in (0, 3):
        with deepspeed.zero.GatheredParameters(engine.module.up.weight, modifier_rank=modifier):
            engine.module.up.weight.data.fill_(dist.get_rank())
        assert torch.equal(whole(engine)["up.weight"], torch.full_like(expected["up.weight"], modifier))
    step(engine)
    assert same_on_all(engine)
    engine.destroy()


@shared_ranks(4)
def test_what_does_not_fit_is_refused():
    with pytest.raises(LayoutError, match=r"mics_shard_size is 3, and 4 ranks .* \(2, 4\)"):
        engine_of(3, shard_size=3)
    with pytest.raises(LayoutError, match="mics_shard_size is 8"):
        engine_of(1, shard_size=8)
    with pytest.raises(UsageError, match=r"does not give zero_optimization\.mics_shard_size"):
        deepspeed.zero.MiCS_Init()
    for keys in ({"zero_hpz_partition_size": 2}, {"zero_quantized_gradients": True}):
        with pytest.raises(DeepSpeedConfigError, match=r"mics_shard_size|hpZ|qgZ"):
            deepspeed.initialize(
                model=make(),
                config={"train_batch_size": 8, "zero_optimization": {"stage": 3, "mics_shard_size": 2, **keys}},
            )
