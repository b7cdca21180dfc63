"""The optimizer in backward on several ranks: plain PyTorch's numbers, and gradients that never exist all at once."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedError
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.step import in_backward
from deepspeed.zero import build as planner
from deepspeed.zero.parameters.shard import shard_of
from tests.distributed.runtime.test_optimizer_in_backward import LAYERS, WIDTH, Model
from tests.harness import ranks, shared_ranks, store_path

STEPS, LR = 4, (3e-3, 1e-2)
BF16 = {"bf16": {"enabled": True}}


@contextmanager
def small_buckets():
    """Of about one layer, each updated by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_BUCKET", 1)
        patch.setattr(planner, "_BUCKET_PER_RANK", 1)
        patch.setattr(in_backward, "_TOGETHER", 1)
        yield


def groups_of(model):
    inner = [param for name, param in model.named_parameters() if name.startswith("inner")]
    others = [param for name, param in model.named_parameters() if not name.startswith("inner")]
    return [{"params": inner, "lr": LR[0]}, {"params": others, "lr": LR[1]}]


def build(stage, *, reentrant=None, layers=LAYERS, enabled=True, clip=0.0, optimizer="AdamW", **config):
    torch.manual_seed(1)
    model = Model(reentrant, layers)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        "optimizer": {"type": optimizer, "params": {"weight_decay": 0.1}},
        "optimizer_in_backward": {"enabled": enabled, "clip_by_last_norm": enabled and clip > 0},
        **config,
    }
    with small_buckets():
        return deepspeed.initialize(model=model, model_parameters=groups_of(model), config=config)[0]


def batch(step, micro, rank):
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(2, WIDTH, generator=generator)


def path(step, rank):
    """Which layers run: `sometimes` in steps 1 and 3, in step 3 on the first rank only."""
    return step % 2 and (step != 3 or rank == 0)


def train(engine, steps=STEPS, start=0):
    norms, dtype = [], engine.module.frozen.dtype
    for step in range(start, start + steps):
        for micro in range(engine.gradient_accumulation_steps()):
            x = batch(step, micro, dist.get_rank()).to(dtype)
            engine.backward(engine(x, path(step, dist.get_rank())).float().square().mean())
            engine.step()
        assert engine.was_step_applied()
        norms.append(float(engine.get_global_grad_norm()))
    return norms


def weights(engine):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: param.detach().float().clone() for name, param in engine.module.named_parameters()}


def plain(world, *, micros=1, clip=0.0):
    """The same training by plain PyTorch in float32: norms and weights."""
    torch.manual_seed(1)
    model = Model()
    optimizer, norms = torch.optim.AdamW(groups_of(model), weight_decay=0.1), []
    for step in range(STEPS):
        losses = [
            model(batch(step, micro, rank), path(step, rank)).square().mean()
            for micro in range(micros)
            for rank in range(world)
        ]
        (sum(losses) / len(losses)).backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        factor = min(clip / (norms[-1] + 1e-6), 1.0) if clip and norms else 1.0
        norms.append(float(torch.linalg.vector_norm(torch.stack([grad.norm() for grad in grads]))))
        torch._foreach_mul_(grads, factor)
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: param.detach() for name, param in model.named_parameters()}


def assert_alike(mine, theirs, tolerance):
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


CASES = [
    *({"stage": stage} for stage in range(4)),
    *({"stage": stage, **BF16} for stage in range(4)),
    {"stage": 0, "clip": 0.05, "gradient_accumulation_steps": 2},
    {"stage": 1, "gradient_accumulation_steps": 2},
    {"stage": 2, "clip": 0.05, "reentrant": True},
    {"stage": 3, "clip": 0.05, "gradient_accumulation_steps": 2, "reentrant": False},
    {"stage": 3, "reentrant": True, **BF16, "data_types": {"grad_accum_dtype": "fp32"}},
]


@shared_ranks(2, 3)
def test_the_numbers_of_plain_pytorch():
    world = dist.get_world_size()
    for case in CASES if world == 2 else [{"stage": 0, **BF16}, {"stage": 2}, {"stage": 3, "clip": 0.05}]:
        engine = build(**case)
        norms, found = train(engine), weights(engine)
        wanted_norms, wanted = plain(world, micros=case.get("gradient_accumulation_steps", 1), clip=case.get("clip", 0))
        assert norms == pytest.approx(wanted_norms, rel=3e-2 if "bf16" in case else 1e-4), case
        # a step of Adam moves a weight by its learning rate, of which bf16 may have the sign wrong near 0
        assert_alike(found, wanted, 3e-2 if "bf16" in case else 2e-5)
        mine = torch.cat([value.reshape(-1) for value in found.values()])
        theirs = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(theirs, mine)
        assert all(torch.equal(mine, other) for other in theirs), case
        engine.destroy()


@ranks(2)
def test_the_numbers_of_ordinary_steps():
    """In bf16 beside an engine of the same stage: what differs is when parameters are updated, and nothing else."""
    for case in ({"stage": 1}, {"stage": 2, "optimizer": "Lion"}, {"stage": 3}):
        found = []
        for enabled in (True, False):
            engine = build(enabled=enabled, **case, **BF16)
            found.append((train(engine), weights(engine)))
            engine.destroy()
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-4), case
        assert_alike(found[0][1], found[1][1], 1e-2)


def live(engine):
    """Bytes of gradients that wait somewhere: whole ones, this rank's parts, and those that the optimizer sees."""
    found = []
    for group in engine._parts.states.groups:
        found += [param.grad for param in group.params]
        found += [shard.gradient for shard in map(shard_of, group.params) if shard is not None]
        found += [each for piece in group.pieces for each in (piece.master.grad, piece.gradient)]
    return sum(grad.nbytes for grad in found if grad is not None)


@ranks(2)
def test_gradients_never_exist_all_at_once():
    for stage in range(4):
        peaks, updates = [], []
        for enabled in (True, False):
            engine, seen, inside, calls = build(stage, enabled=enabled, layers=20), [], [False], []
            for param in engine.module.parameters():
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(lambda _, e=engine, s=seen: s.append(live(e)))
            engine.basic_optimizer.register_step_post_hook(lambda *_, i=inside, c=calls: c.append(i[0]))
            for step in range(3):
                loss = engine(batch(step, 0, dist.get_rank())).square().mean()
                inside[0] = True
                engine.backward(loss)
                inside[0] = False
                engine.step()
            assert live(engine) == 0 or not enabled
            peaks.append(max(seen))
            updates.append(sum(calls))
            engine.destroy()
        assert peaks[0] < 0.55 * peaks[1], (stage, peaks)
        assert updates[0] > 10, (stage, updates)
        assert updates[1] == 0, (stage, updates)


@ranks(2)
def test_a_checkpoint_has_the_last_norm():
    for stage in (0, 1, 3):
        engine = build(stage, clip=0.05)
        train(engine, 2)
        folder = f"{store_path()}_{stage}"
        engine.save_checkpoint(folder)
        norms = train(engine, 2, start=2)
        other = build(stage, clip=0.05)
        other.load_checkpoint(folder)
        assert train(other, 2, start=2) == pytest.approx(norms, rel=1e-6)
        assert_alike(weights(other), weights(engine), 1e-6)
        engine.destroy()
        other.destroy()


@shared_ranks(2)
def test_ranks_that_do_different_things():
    """A backward on one rank alone, one inside no_sync, none at all; and what is refused."""
    engine, rank = build(2), dist.get_rank()
    if rank == 0:
        engine.backward(engine(batch(0, 0, 0)).square().mean())
    before = weights(engine)
    engine.step()
    assert engine.was_step_applied()
    with engine.no_sync():
        engine.backward(engine(batch(1, 0, rank)).square().mean())
    engine.step()
    after = weights(engine)
    assert not torch.equal(before["first.weight"], after["first.weight"])
    assert torch.equal(before["unused.weight"], after["unused.weight"])
    engine.step()
    assert not engine.was_step_applied()
    engine.backward(engine(batch(1, 0, rank)).square().mean())
    loss = engine(batch(1, 0, rank)).square().mean()
    with pytest.raises(DeepSpeedError, match=r"optimizer_in_backward\.enabled: .*before engine\.step\(\)"):
        engine.backward(loss)
    with pytest.raises(DeepSpeedError, match=r"optimizer_in_backward\.enabled: gradients are used up"):
        deepspeed.utils.safe_get_full_grad(engine.module.first.weight)
    engine.step()
    engine.destroy()


class Split(nn.Module):
    """A pair of layers that ranks share, with layers around it that all of them have."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.unused = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.up, self.down, self.last = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        x = self.frozen(self.norm(self.first(x)))
        return self.last(x + self.down(torch.tanh(self.up(x)))).square().mean()


def split_engine(stage, clip, *, enabled):
    torch.manual_seed(1)
    model = Split()
    specs = [
        {"patterns": [r".*up\.weight"], "partition_type": "column"},
        {"patterns": [r".*down\.weight"], "partition_type": "row"},
    ]
    inner = [*model.up.parameters(), *model.down.parameters()]
    others = [param for param in model.parameters() if not any(param is each for each in inner)]
    with small_buckets():
        return deepspeed.initialize(
            model=model,
            model_parameters=[{"params": inner, "lr": LR[0]}, {"params": others, "lr": LR[1]}],
            config={
                "train_micro_batch_size_per_gpu": 2,
                "gradient_clipping": clip,
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
                "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}},
                "optimizer_in_backward": {"enabled": enabled, "clip_by_last_norm": enabled and clip > 0},
                "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": specs}},
            },
        )[0]


@shared_ranks(2, 4)
def test_layers_that_ranks_share():
    """Norms and weights of ordinary steps, whose sizes follow from parts and from copies on all ranks."""
    group = dist.get_rank() // 2
    for stage in (0, 3) if dist.get_world_size() == 2 else range(4):
        found = []
        for enabled in (True, False):
            engine = split_engine(stage, 0.0, enabled=enabled)
            assert engine.module.up.weight.shape != (16, 8) or stage == 3, "the layer is split"
            norms = []
            for step in range(STEPS):
                x = torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + group))
                engine.backward(engine(x))
                engine.step()
                norms.append(float(engine.get_global_grad_norm()))
            found.append((norms, weights(engine)))
            engine.destroy()
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-5), stage
        assert_alike(found[0][1], found[1][1], 1e-6)


@shared_ranks(2)
def test_the_last_norm_of_layers_that_ranks_share():
    """A norm that counts copies twice, or another rank's part never, would clip otherwise."""
    engine = split_engine(0, 0.05, enabled=True)
    for step in range(3):
        engine.backward(engine(torch.randn(2, 8, generator=torch.Generator().manual_seed(step))))
        engine.step()
    kept = engine.basic_optimizer.param_groups[0]["last_grad_norm"]
    assert kept == pytest.approx(float(engine.get_global_grad_norm()), rel=1e-6)
    seen = [torch.empty((), dtype=torch.float64) for _ in range(2)]
    dist.all_gather(seen, torch.tensor(kept, dtype=torch.float64))
    assert seen[0] == seen[1], "ranks clip alike"
    engine.destroy()


@shared_ranks(2)
def test_what_is_refused_on_several_ranks():
    with pytest.raises(DeepSpeedError, match=r"optimizer_in_backward\.enabled: a step of .*Muon"):
        build(1, optimizer="Muon")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {}},
        "optimizer_in_backward": {"enabled": True},
    }
    model = PipelineModule([LayerSpec(nn.Linear, 8, 8)], num_stages=1, loss_fn=nn.functional.mse_loss)
    with pytest.raises(DeepSpeedError, match=r"optimizer_in_backward\.enabled: not for pipelines. A stage adds up"):
        deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
