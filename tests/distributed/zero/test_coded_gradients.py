"""Gradients that travel as codes: sums, trainings, bytes, and the memory of what codes lost."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed import comm
from deepspeed.comm.codec import block_codec
from deepspeed.log import NOTICE
from deepspeed.parallel import ParallelLayout
from deepspeed.zero.gradients.coded import CodedReduction, ErrorMemory
from deepspeed.zero.gradients.reduction import EvenShares, OwnedShares, ReductionWeights, SharePart
from deepspeed.zero.placement import node_groups
from tests.covering import pairs
from tests.distributed.moe.models import Model as Experts
from tests.distributed.moe.models import scrambled
from tests.distributed.zero.test_coded_weights import data, engine_of, losses, same_everywhere, whole
from tests.harness import ranks, shared_ranks
from tests.told import Told


def reduction(monkeypatch, per_node, memory=None):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(per_node))
    layout = ParallelLayout.build()
    axis = layout.world
    weights = ReductionWeights(1.0, 1.0 / axis.size)
    codec, nodes = block_codec("int4", 64), node_groups(axis)
    return CodedReduction(axis, axis.group, weights, codec=codec, nodes=nodes, memory=memory)


def slices():
    """(share, the ranks' parts of what is sent) of slices that are alike, padded, and of some ranks."""
    alike = (SharePart("a", 0, 100), SharePart("b", 100, 37))
    yield EvenShares(137, (alike,)), {rank: slice(137 * rank, 137 * rank + 137) for rank in range(4)}, 4 * 137
    lying = tuple((SharePart(f"p{rank}", 0, 120 - rank),) for rank in range(4))
    yield EvenShares(120, lying), {rank: slice(120 * rank, 120 * rank + 120 - rank) for rank in range(4)}, 480
    owned = OwnedShares(((1, 50), (2, 90)), ((SharePart("x", 0, 50),), (SharePart("x", 0, 30), SharePart("y", 30, 60))))
    yield owned, {0: slice(0, 0), 1: slice(0, 50), 2: slice(50, 140), 3: slice(0, 0)}, 140


@shared_ranks(4)
def test_sums_come_to_their_owners(monkeypatch):
    rank = dist.get_rank()
    for per_node in (2, 4):
        way = reduction(monkeypatch, per_node)
        assert (way.nodes is not None) == (per_node == 2)
        for share, parts, numel in slices():
            sent = torch.randn(numel, generator=torch.Generator().manual_seed(rank)).bfloat16()
            mean = sent.float()
            dist.all_reduce(mean)
            found = way.start(sent.clone(), share).wait()
            expected = mean[parts[rank]] / 4
            assert found.dtype == torch.float32
            found = found[: len(expected)]
            torch.testing.assert_close(found, expected, rtol=0, atol=0.6 if len(expected) else 0)
            if len(expected):
                assert (found - expected).norm() < 0.2 * expected.norm()


@shared_ranks(4)
def test_a_sum_does_not_depend_on_its_bucket(monkeypatch):
    for per_node in (2, 4):
        way = reduction(monkeypatch, per_node)
        sent = torch.randn(4, 137, generator=torch.Generator().manual_seed(dist.get_rank()))
        a, b = SharePart("a", 0, 100), SharePart("b", 0, 37)
        whole_bucket = EvenShares(137, ((a, SharePart("b", 100, 37)),))
        together = way.start(sent.flatten(), whole_bucket).wait()
        alone = [
            way.start(part.contiguous().flatten(), EvenShares(part.shape[1], ((name,),))).wait()
            for part, name in zip(sent.split([100, 37], 1), (a, b), strict=True)
        ]
        assert torch.equal(together, torch.cat(alone))


@shared_ranks(4)
def test_errors_that_are_fed_back_sum_to_the_mean(monkeypatch):
    """Over time the sum of what arrives is the sum of what was sent, but for the last errors."""
    share = EvenShares(256, ((SharePart("a", 0, 256),),))
    for per_node in (2, 4):
        apart = {}
        for name, memory in {"fed back": ErrorMemory(0.0, 1 << 30), "lost": None}.items():
            way = reduction(monkeypatch, per_node, memory)
            made = torch.Generator().manual_seed(dist.get_rank())
            constant = torch.randn(4 * 256, generator=made)  # the worst case: the same error in each step
            mean = constant.clone()
            dist.all_reduce(mean)
            mine = mean.view(4, -1)[dist.get_rank()] / 4
            total = sum(way.start(constant.clone(), share).wait() for _ in range(40)) / 40
            apart[name] = ((total - mine).norm() / mine.norm()).item()
        assert apart["fed back"] < 0.02
        assert apart["lost"] > 3 * apart["fed back"]


@shared_ranks(2)
def test_what_is_not_finite_is_seen_and_not_remembered(monkeypatch):
    way = reduction(monkeypatch, 2, ErrorMemory(0.5, 3))
    share = EvenShares(64, ((SharePart("a", 0, 64),),))
    sent = torch.ones(128)
    if dist.get_rank() == 1:
        sent[64:] = float("inf")
    found = way.start(sent.clone(), share).wait()
    assert found.isfinite().all() == (dist.get_rank() == 0)
    assert way.start(torch.ones(128), share).wait().isfinite().all()
    kept = way.state_dict()
    assert set(kept) == {"steps", "1.a"}
    for _ in range(3):
        way.stepped()
    assert set(way.state_dict()) == {"steps"}  # forgotten
    way.load_state_dict(kept)
    assert torch.equal(way.state_dict()["1.a"], kept["1.a"])
    way.load_state_dict({"steps": torch.tensor(1), "1.a": torch.zeros(7, dtype=torch.uint8)})
    assert way.start(torch.ones(128), share).wait().isfinite().all()


LOCO = {"err_beta": 0.8, "reset_T": 1024}
CASES = pairs(
    ((1, "none"), (2, "none"), (3, "none"), (3, "cpu")),
    ("fp32", "bf16", "fp16"),
    ((1, 0.0), (2, 0.5)),
    (False, True),
    ((2, False), (4, True), (2, True)),
)


@pytest.mark.parametrize("stage", [1, 2, 3])
@shared_ranks(4)
def test_trains_like_uncoded(stage, monkeypatch):
    for (each, offload), precision, (accumulation, clip), loco, (per_node, weights) in CASES:
        if each != stage:
            continue
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(per_node))
        options = {"accumulation": accumulation, "clip": clip}
        away = {} if offload == "none" else {"offload_optimizer": {"device": offload}}
        plain = engine_of(stage, precision, **options, **away)
        expected = losses(plain, steps=2)
        plain.destroy()
        near = {"zero_hpz_partition_size": 2} if stage == 3 else {}
        zero = {"zero_quantized_gradients": True, "zero_quantized_weights": weights, **near, **away}
        zero["zeropp_loco_param"] = LOCO if loco else None
        engine = engine_of(stage, precision, **options, **zero)
        before, found = whole(engine), losses(engine, steps=2)
        assert not torch.equal(found, expected), "nothing was rounded"
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
        assert not torch.equal(whole(engine), before)
        same_everywhere(whole(engine))
        engine.destroy()


@shared_ranks(4)
def test_bytes_and_hops(monkeypatch):
    """Ψ/2 · (L−1)/L within a node, Ψ/2 / L · (N−1)/N between nodes, per rank and reduction; scales apart."""
    for per_node, hops in ((2, {("within"): 1 / 2, "across": 1 / 4}), (4, {"all": 3 / 4})):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(per_node))
        engine = engine_of(3, "bf16", zero_quantized_gradients=True)
        losses(engine, steps=1)
        numel = sum(param.ds_numel for param in engine.module.parameters())
        seen, real = [], comm.all_to_all_single

        def note(out, sent, outs, ins, group=None, async_op=False, seen=seen, real=real):
            seen.append((dist.get_process_group_ranks(group), sum(ins) - ins[dist.get_rank(group)]))
            return real(out, sent, outs, ins, group=group, async_op=async_op)

        monkeypatch.setattr(comm, "all_to_all_single", note)
        losses(engine, steps=1)
        monkeypatch.setattr(comm, "all_to_all_single", real)
        engine.destroy()
        found = {}
        for members, size in seen:
            nodes = {member // per_node for member in members}
            kind = "all" if len(members) == 4 else "within" if len(nodes) == 1 else "across"
            found[kind] = found.get(kind, 0) + size
        assert set(found) == set(hops)
        for kind, share in hops.items():
            assert found[kind] == pytest.approx(numel / 2 * share, rel=0.12)  # parts are small here: scales weigh


@shared_ranks(2)
def test_errors_are_part_of_checkpoints(tmp_path):
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    zero = {"zero_quantized_gradients": True, "zeropp_loco_param": LOCO}
    engine = engine_of(3, "bf16", **zero)
    losses(engine, steps=2)
    engine.save_checkpoint(folder[0])
    expected = losses(engine, steps=2)
    engine.destroy()
    other = engine_of(3, "bf16", **zero)
    other.load_checkpoint(folder[0])
    assert torch.equal(losses(other, steps=2), expected)
    model = other._parts.sharded
    assert len(model.reduction_states()["0"]) > 1
    for state in ({}, {"0": {"worker_error:weight": torch.zeros(3)}}):  # of other ranks, of another codec
        with Told() as lines:
            model.load_reduction_states(state)
        assert set(model.reduction_states()["0"]) == {"steps"}
        assert dist.get_rank() or any("no errors of codes for this number of ranks" in line for line in lines)
    other.destroy()


@ranks(2)
def test_hops_and_codes_are_told(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with Told(NOTICE) as lines:
        engine = engine_of(2, zero_quantized_gradients=True, zero_quantized_weights=True)
        x, y = next(iter(data(dist.get_rank(), 1)))
        engine.backward(engine(x, y))
        engine.step()
        engine.destroy()
    assert dist.get_rank() or any("one hop" in line for line in lines)
    said = "32,768 parameters travel as int8 codes, and 705 in vectors and small matrices as they are"
    assert dist.get_rank() or any(said in line for line in lines)


@pytest.mark.parametrize(
    ("zero", "said"),
    [
        ({"stage": 0, "zero_quantized_gradients": True}, "stage 0"),
        ({"stage": 0, "zero_quantized_weights": True}, "stage 0"),
        ({"stage": 2, "zero_hpz_partition_size": 2}, "found stage 2"),
        ({"stage": 3, "zeropp_loco_param": LOCO}, "error feedback needs quantised gradients"),
        ({"stage": 2, "zero_quantized_gradients": True, "reduce_scatter": False}, "reduce_scatter false"),
        ({"stage": 3, "zero_hpz_partition_size": 2, "mics_shard_size": 2}, "mics_shard_size"),
        (
            {"stage": 3, "zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 1.0, "reset_T": 9}},
            "less than 1",
        ),
        (
            {"stage": 3, "zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.1, "reset_T": 0}},
            "reset_T",
        ),
    ],
)
def test_bad_configs(zero, said):
    with pytest.raises(deepspeed.errors.DeepSpeedConfigError, match=said):
        deepspeed.DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": zero})


@shared_ranks(2)
def test_a_rank_with_another_codec_is_named():
    """Also where one of the ranks shards nothing."""
    signs = {"type": "OneBitAdam", "params": {"freeze_step": 2}}
    others = {
        "zero_quantized_gradients: rank 1": {"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}},
        "zero_optimization.stage: rank 1": {"zero_optimization": {"stage": 0}},
        "sparse_gradients: rank 1": {"sparse_gradients": True},
        "optimizer: rank 1": {"optimizer": signs},
    }
    for said, other in others.items():
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 2},
        }
        with pytest.raises(deepspeed.errors.DeepSpeedConfigError, match=f"{said} has another"):
            deepspeed.initialize(model=torch.nn.Linear(8, 8), config=config | (other if dist.get_rank() else {}))


@ranks(4)
def test_experts_and_tensor_parallel_layers(monkeypatch):
    """Experts lie on fewer ranks than the rest; with tensor parallelism the ranks of an axis are no neighbours."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    near = {"zero_hpz_partition_size": 2}
    for stage, tensor in ((2, 1), (3, 1), (2, 2)):
        told = []
        for zero in (
            {},
            {"zero_quantized_gradients": True, "zero_quantized_weights": True, **(near if stage == 3 else {})},
        ):
            model = scrambled(Experts(2, 2)) if tensor == 1 else _dense()
            config = {
                "train_micro_batch_size_per_gpu": 1,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
            }
            if tensor > 1:
                layers = {
                    "partition_config": {
                        "layer_specs": [
                            {"patterns": ["0.weight"], "partition_type": "column"},
                            {"patterns": ["2.weight"], "partition_type": "row"},
                        ]
                    }
                }
                config["tensor_parallel"] = {"autotp_size": tensor, **layers}
            engine = deepspeed.initialize(model=model, config=config)[0]
            found = []
            for step in range(3):
                made = torch.Generator().manual_seed(10 * step + dist.get_rank() // tensor)
                x = torch.randn(12, 8 if tensor == 1 else 64, generator=made)
                loss = engine(x) if tensor == 1 else engine(x).square().mean()
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
            told.append(torch.tensor(found))
            engine.destroy()
        assert not torch.equal(*told)
        torch.testing.assert_close(told[1], told[0], rtol=0.1, atol=0.05)


def _dense():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
