"""Parameters that travel as codes, and those that neighbours keep: trainings, bytes, and who has to know of edits."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed import comm
from deepspeed.zero import GatheredParameters
from tests.covering import pairs
from tests.harness import shared_ranks

WIDTH = 64


class Net(nn.Module):
    """Two blocks of matrices that are worth a code, with biases and norms that are not."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, y, checkpointed=False):
        for block in self.blocks:
            more = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
            x = x + more
        return nn.functional.mse_loss(self.head(x).float(), y.float())


def engine_of(stage, precision="fp32", *, accumulation=1, clip=0.0, **zero):
    torch.manual_seed(0)
    sections = {} if precision == "fp32" else {precision: {"enabled": True}}
    if precision == "fp16":
        sections["fp16"]["loss_scale"] = 128.0
    if precision == "torch_autocast":
        sections["torch_autocast"]["dtype"] = "bfloat16"
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100, **zero},
        **sections,
    }
    return deepspeed.initialize(model=Net(), config=config)[0]


def data(rank, count):
    made = torch.Generator().manual_seed(rank)
    weight = torch.linspace(-1, 1, WIDTH)[:, None]
    for _ in range(count):
        x = torch.randn(4, WIDTH, generator=made)
        yield x, x @ weight


def losses(engine, steps=4, checkpointed=False):
    told = []
    dtype = next(engine.module.parameters()).dtype
    for x, y in data(dist.get_rank(), steps * engine.gradient_accumulation_steps()):
        loss = engine(x.to(dtype), y, checkpointed)
        engine.backward(loss)
        engine.step()
        told.append(loss.item())
    return torch.tensor(told)


def whole(engine):
    with GatheredParameters(list(engine.module.parameters())):
        return torch.cat([param.detach().float().flatten() for param in engine.module.parameters()])


def same_everywhere(values):
    all_of_them = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, values)
    assert all(torch.equal(values, other) for other in all_of_them)


CLOSE = {"int8": 0.01, "fp8": 0.03, "int4": 0.15}
CASES = pairs(
    (1, 2, 3),
    tuple(CLOSE),
    ("fp32", "bf16", "torch_autocast"),
    ((1, 0.0), (2, 0.5)),
    (("none", 1), ("none", 2), ("cpu", 2)),
)


@pytest.mark.parametrize("stage", [1, 2, 3])
@shared_ranks(4)
def test_trains_like_uncoded(stage):
    for each, form, precision, (accumulation, clip), (offload, near) in CASES:
        if each != stage:
            continue
        options = {"accumulation": accumulation, "clip": clip}
        where = "offload_param" if stage == 3 else "offload_optimizer"
        away = {} if offload == "none" else {where: {"device": offload}}
        plain = engine_of(stage, precision, **options, **away)
        expected = losses(plain, steps=2)
        plain.destroy()
        zero = {"zero_quantized_weights": True, "zero_quantized_weights_format": form, **away}
        if stage == 3:
            zero["zero_hpz_partition_size"] = near
        engine = engine_of(stage, precision, **options, **zero)
        before = whole(engine)
        found = losses(engine, steps=2)
        assert not torch.equal(found, expected), (form, "nothing was rounded")
        torch.testing.assert_close(found, expected, rtol=CLOSE[form], atol=CLOSE[form])
        assert not torch.equal(whole(engine), before)
        same_everywhere(whole(engine))
        engine.destroy()


@contextlib.contextmanager
def counted():
    """Bytes that this rank's gathers receive from others, by the size of the group."""
    seen: dict[int, int] = {}
    real = {name: getattr(comm, name) for name in ("all_gather_into_tensor",)}

    def note(out, mine, group=None, async_op=False):
        size = dist.get_world_size(group)
        seen[size] = seen.get(size, 0) + mine.nbytes * (size - 1)
        return real["all_gather_into_tensor"](out, mine, group=group, async_op=async_op)

    comm.all_gather_into_tensor = note
    try:
        yield seen
    finally:
        comm.all_gather_into_tensor = real["all_gather_into_tensor"]


@shared_ranks(4)
def test_bytes_of_gathers():
    matrices = 4 * WIDTH * 2 * WIDTH  # elements that travel as codes
    seen = {}
    for name, zero in {
        "plain": {},
        "coded": {"zero_quantized_weights": True},
        "near": {"zero_quantized_weights": True, "zero_hpz_partition_size": 2},
    }.items():
        engine = engine_of(3, "bf16", **zero)
        losses(engine, steps=2)  # passes are planned
        with counted() as seen[name]:
            losses(engine, steps=1)
        engine.destroy()
    share = 3 / 4
    assert seen["plain"][4] >= 2 * 2 * matrices * share  # two gathers of two bytes
    saved = seen["plain"][4] - seen["coded"][4]
    assert saved == pytest.approx(2 * matrices * share, rel=0.04)  # one byte less in both, but for scales
    assert seen["near"][4] == pytest.approx(seen["coded"][4] - matrices * share, rel=0.04)
    assert seen["near"][2] == pytest.approx(2 * matrices / 2, rel=0.02)  # backward, among two; biases, too


@shared_ranks(4)
def test_copies_of_neighbours_change_nothing():
    expected = None
    for near, checkpointed in ((1, False), (2, False), (2, True), (1, True)):
        engine = engine_of(3, "bf16", accumulation=2, zero_hpz_partition_size=near)
        found = losses(engine, steps=3, checkpointed=checkpointed)
        expected = found if expected is None else expected
        assert torch.equal(found, expected)
        engine.destroy()


@shared_ranks(4)
def test_edits_outdate_copies():
    """Also those that one rank makes alone, and those between forward and backward."""
    results = []
    for near in (1, 2):
        engine = engine_of(3, "bf16", zero_hpz_partition_size=near)
        weight = engine.module.blocks[0][1].weight
        told = [losses(engine, steps=1)]
        with GatheredParameters([weight], modifier_rank=0):
            if dist.get_rank() == 0:
                weight.data.mul_(0.5)
        told.append(losses(engine, steps=1))
        deepspeed.utils.safe_set_full_fp32_param(weight, torch.full(weight.ds_shape, 0.01))
        told.append(losses(engine, steps=1))
        x, y = next(iter(data(dist.get_rank(), 1)))
        loss = engine(x.bfloat16(), y)
        deepspeed.utils.safe_set_full_fp32_param(weight, torch.full(weight.ds_shape, 0.02))
        engine.backward(loss)
        engine.step()
        told.append(losses(engine, steps=1))
        engine.empty_partition_cache()
        told.append(losses(engine, steps=1))
        results.append(torch.cat(told))
        engine.destroy()
    assert torch.equal(*results)


@shared_ranks(4)
def test_copies_are_freed_and_come_back():
    engine = engine_of(3, "bf16", zero_hpz_partition_size=2)
    copies = next(shard.near.copies for shard in _shards(engine) if shard.near is not None)
    first = losses(engine, steps=1)
    assert copies.nbytes >= 2 * 4 * WIDTH * 2 * WIDTH // 2  # 2 Ψ / size
    engine.offload_states()
    assert copies.nbytes == 0
    engine.reload_states()
    assert losses(engine, steps=1).isfinite().all()
    assert copies.nbytes > 0
    engine.empty_partition_cache()
    assert copies.nbytes == 0
    assert losses(engine, steps=1).isfinite().all()
    assert first.isfinite().all()
    engine.destroy()


def _shards(engine):
    from deepspeed.zero.parameters.shard import shards_of

    return shards_of(engine.module.parameters())


@shared_ranks(4)
def test_bad_sizes():
    for size, said in ((3, "3 does not divide the 4 ranks.*Use one of 2, 4"), (8, "8 does not divide the 4 ranks")):
        with pytest.raises(deepspeed.errors.DeepSpeedConfigError, match=said):
            engine_of(3, zero_hpz_partition_size=size)
