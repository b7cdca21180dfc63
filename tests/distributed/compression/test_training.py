"""Compressed layers under engines: every stage computes what one plain process does, MoQ resumes bit-equal."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn.utils import prune

import deepspeed
from deepspeed.compression.basic_layer import compression_of
from deepspeed.compression.compress import init_compression
from deepspeed.compression.scheduler import compression_scheduler
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.pipe import PipelineModule
from tests.hanging import play
from tests.harness import ranks, shared_ranks, store_path
from tests.models import Tiny, batches, make, share
from tests.unit.compression.test_eigenvalue import Blocks, dense

STEPS = 4


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


class Once(Blocks):
    """Can be differentiated once."""

    def forward(self, x):
        for layer in self.layers:
            x = Square.apply(layer(x))
        return self.head(x).square().mean()


def technique(modules, params, **shared):
    return {
        "shared_parameters": {"enabled": True, "schedule_offset": 1, **shared},
        "different_groups": {"one": {"params": params, "modules": modules}},
    }


EVERYTHING = {
    "weight_quantization": technique(
        ["up", "down", "embedding"],
        {"start_bits": 8, "target_bits": 6, "quantization_period": 1},
        quantize_groups=1,
        quantize_weight_in_forward=True,
        quantization_type="asymmetric",
    ),
    "activation_quantization": technique(["down"], {"bits": 8}),
    "sparse_pruning": technique(["down"], {"dense_ratio": 0.5}, schedule_offset=2),
    "row_pruning": technique(["up"], {"dense_ratio": 0.5}),
}
BLOCKS = {
    "sparse_pruning": {
        "shared_parameters": {
            "enabled": True,
            "method": "snip_momentum",
            "schedule_offset": 1,
            "schedule_offset_end": 3,
            "block_pattern": "4x1",
            "dense_ratio": 0.3,
            "excluded_modules": ["head"],
        }
    },
}
MOQ = {
    "enabled": True,
    "quantize_bits": {"start_bits": 8, "target_bits": 5},
    "quantize_schedule": {"quantize_period": 1},
    "quantize_algo": {"rounding": "stochastic"},
    "fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": 0.3},
}


def plain(section):
    """The same training in one process, without an engine."""
    model = init_compression(make(Tiny), {"train_batch_size": 4, "compression_training": section})
    scheduler = compression_scheduler(model, section)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for batch in batches(STEPS, 4):
        loss = model(*batch)
        losses.append(loss.item())
        loss.backward()
        scheduler.before_step()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses, model


def build(stage, model=None, **config):
    config = {
        "train_micro_batch_size_per_gpu": 4 // dist.get_world_size(),
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **config,
    }
    return deepspeed.initialize(model=make(Tiny) if model is None else model, config=config)[0]


def train(engine, first=0, stop=STEPS):
    losses = []
    for batch in batches(stop, 4)[first:]:
        loss = engine(*share(batch, dist.get_rank(), dist.get_world_size()))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


@torch.no_grad()
def evaluate(engine):
    engine.eval()
    loss = engine(*share(batches(1, 4)[0], dist.get_rank(), dist.get_world_size()))
    engine.train()
    return loss.item()


def weights(engine):
    return {name: value.clone() for name, value in engine.module_state_dict().items()}


@shared_ranks(2)
def test_every_stage_computes_what_one_process_does():
    expected, _ = plain(EVERYTHING)
    scored = {"sparse_pruning": technique(["down"], {"dense_ratio": 0.5}, method="topk", schedule_offset=0)}
    trained, scores = plain(scored)
    fewer, blocks = plain(BLOCKS)
    for stage in (0, 1, 2, 3):
        engine = build(stage, compression_training=BLOCKS)
        assert train(engine) == pytest.approx(fewer, rel=1e-5)
        assert torch.equal(weights(engine)["up.sparse_pruning_mask"], blocks.up.sparse_pruning_mask)
        engine.destroy()
        engine = build(stage, compression_training=EVERYTHING)
        assert train(engine) == pytest.approx(expected, rel=1e-5)
        engine.destroy()
        engine = build(stage, compression_training=scored)
        assert train(engine) == pytest.approx(trained, rel=1e-5)
        if stage == 2:
            found = weights(engine)["down.sparse_mask_scores"]
            torch.testing.assert_close(found, scores.down.sparse_mask_scores.detach())
        engine.destroy()


EIGEN = {"enabled": True, "layer_name": "layers", "stability": 0, "tol": 1e-5, "max_iter": 300}


@ranks(2)
def test_eigenvalues_of_all_samples_decide_how_long_bits_last():
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    top = dense(Blocks(), inputs)
    expected = [1 + int(4 * abs(value) / max(map(abs, top))) for value in top]
    assert len(set(expected)) > 1
    bits = {"start_bits": 16, "target_bits": 10}
    moq = {"enabled": True, "quantize_bits": bits, "quantize_schedule": {"quantize_period": 1}, "eigenvalue": EIGEN}
    folder, losses = Path(store_path()).parent / "eigen", []
    for stage, precision in ((0, {}), (1, {}), (2, {"bf16": {"enabled": True}}), (3, {})):
        kind = torch.bfloat16 if precision else torch.float32
        micro = inputs.view(2, 4, 3)[dist.get_rank()].to(kind)

        def steps(engine, count, micro=micro):
            found = []
            for _ in range(count):
                found.append(engine(micro))
                engine.backward(found[-1])
                engine.step()
            return [loss.item() for loss in found]

        def build_one(stage=stage, precision=precision):
            return build(stage, Blocks(), quantize_training=moq, **precision)

        engine = build_one()
        steps(engine, 1)
        paces = [compression_of(layer).pace for layer in engine.module.layers]
        if not precision:
            assert [pace.factors for pace in paces] == [[factor] for factor in expected]
            assert [pace.edge for pace in paces] == [2 * factor for factor in expected]
        assert compression_of(engine.module.head).pace.factors == [1]
        steps(engine, 1)
        engine.save_checkpoint(folder, tag=str(stage))
        rest = steps(engine, 6)
        losses += [] if precision else [rest]
        again = build_one()
        again.load_checkpoint(folder, tag=str(stage))
        assert steps(again, 6) == rest
        states = [[compression_of(layer).pace for layer in each.module.layers] for each in (engine, again)]
        assert states[0] == states[1]
        engine.destroy()
        again.destroy()
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)


@shared_ranks(2)
def test_eigenvalues_are_refused_where_they_cannot_be_computed():
    moq = {"quantize_training": {"enabled": True, "quantize_schedule": {"quantize_period": 1}}}
    for model, section, said in (
        (Blocks(), {"layer_name": "blocks"}, "eigenvalue.layer_name: the model has no module 'blocks'"),
        (PipelineModule([torch.nn.Linear(2, 2)] * 2, num_stages=2), {}, "eigenvalue.enabled is true, and ranks share"),
    ):
        with pytest.raises((UsageError, DeepSpeedConfigError), match=said):
            build(0, model, eigenvalue={"enabled": True, **section}, **moq)
    engine = build(0, Once(), eigenvalue={**EIGEN, "layer_name": "layers"}, **moq)
    with pytest.raises(UsageError, match=r"cannot be differentiated twice.*Use attention in plain operations"):
        engine.backward(engine(torch.ones(2, 3)))
    engine.destroy()


@ranks(2)
def test_masks_of_torch_need_whole_weights():
    """`torch.nn.utils.prune` works inside of GatheredParameters, and what it made elsewhere is refused."""
    expected, losses = make(Tiny), []
    prune.l1_unstructured(expected.down, "weight", 0.5)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5)
    for batch in batches(STEPS, 4):
        losses.append(expected(*batch))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    with deepspeed.zero.Init(config_dict_or_path={"zero_optimization": {"stage": 3}}):
        found, refused = make(Tiny), make(Tiny)
    with deepspeed.zero.GatheredParameters([found.down.weight]):
        prune.l1_unstructured(found.down, "weight", 0.5)
    prune.l1_unstructured(refused.down, "weight", 0.5)
    with pytest.raises(UsageError, match=r"down\.weight_mask has no elements.*\(8, 24\).*GatheredParameters"):
        build(3, refused)
    assert train(build(3, found)) == pytest.approx([loss.item() for loss in losses], rel=1e-4)


def resumes_bit_equal(stage, saved, end, **sections):
    """Train, save after `saved` steps, and go on from there in another engine; the first engine's module."""
    folder = Path(store_path()).parent / "saved"
    engine = build(stage, **sections)
    train(engine, 0, saved)
    engine.save_checkpoint(folder, tag=str(stage))
    judged = evaluate(engine)
    rest = train(engine, saved, end)
    again = build(stage, **sections)
    again.load_checkpoint(folder, tag=str(stage))
    assert evaluate(again) == judged
    assert train(again, saved, end) == rest
    for one, other in zip(weights(again).values(), weights(engine).values(), strict=True):
        assert torch.equal(one, other)
    engine.destroy()
    again.destroy()
    return engine.module


@shared_ranks(2)
def test_blocks_go_on_where_a_checkpoint_left_off():
    for stage, precision in ((1, {"bf16": {"enabled": True}}), (3, {})):
        module = resumes_bit_equal(stage, 2, 4, compression_training=BLOCKS, **precision)
        assert module.up.sparse_mask_scores.dtype is torch.int32


@shared_ranks(2)
def test_moq_resumes_bit_equal():
    for stage, precision in ((0, {}), (2, {"bf16": {"enabled": True}}), (3, {})):
        resumes_bit_equal(stage, 3, 6, quantize_training=MOQ, **precision)


def saved_and_killed(rank):
    """Goes on after a checkpoint, and is killed in a backward."""
    folder, engine = Path(store_path()).parent, build(2, quantize_training=MOQ, bf16={"enabled": True})
    train(engine, 0, 3)
    engine.save_checkpoint(folder / "saved")
    torch.save((train(engine, 3, 5), weights(engine)), folder / f"expected{rank}")
    engine.module.up.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    train(engine, 5, 6)


def continued(rank):
    folder, engine = Path(store_path()).parent, build(2, quantize_training=MOQ, bf16={"enabled": True})
    engine.load_checkpoint(folder / "saved")
    losses, held = torch.load(folder / f"expected{rank}")
    assert train(engine, 3, 5) == losses
    assert all(torch.equal(held[name], value) for name, value in weights(engine).items())


@ranks(1, init=False)
def test_moq_goes_on_bit_equal_after_a_kill():
    assert -signal.SIGKILL in {said.status for said in play(saved_and_killed, 2)}
    said = play(continued, 2)
    assert [each.status for each in said] == [0, 0], said[0].text
