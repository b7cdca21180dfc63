"""What a script calls on a pipeline's engine, what is refused, and what becomes of failures."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError, LayoutError, PipelineError, UsageError
from deepspeed.parallel import AxisGroup
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.pipe import layers as pipe_layers
from tests.harness import shared_ranks
from tests.pipelines import (
    SEED,
    VOCABULARY,
    Block,
    Whole,
    assert_equal,
    config,
    data,
    logits,
    loss_of,
    micro_batch,
    pipeline,
    train_pipeline,
    train_whole,
    weights,
)


def engine_for(module, count=2, **more):
    return deepspeed.initialize(model=module, config=config(count, **more))[0]


@shared_ranks(2)
def test_hosts_need_no_group_of_their_own():
    """Whatever all ranks agree upon at the start or around a batch goes over the world, where that is gloo's."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        twin = AxisGroup.twin
        patch.setattr(AxisGroup, "twin", lambda axis, *kind: made.append((axis.name, kind)) or twin(axis, *kind))
        engine = engine_for(pipeline(2))
        engine.train_batch(data(0, 2))
        engine.eval_batch(data(0, 2))
    assert made == []


@shared_ranks(2)
def test_evaluation():
    for schedule in ("1f1b", "zbv", "interleaved"):
        module = pipeline(2, schedule=schedule)
        engine = engine_for(module, 3)
        batches = [micro_batch(5, 0, number) for number in range(3)]
        whole = Whole()
        with torch.no_grad():
            expected = [float(whole(*batch)) for batch in batches]
            value = whole.tied_modules["embed"](batches[0][0])
            for number in range(1, 7):
                value = getattr(whole, str(number))(value)
            first = logits(whole.tied_modules["embed"], value)
        assert float(engine.eval_batch(iter(batches))) == pytest.approx(sum(expected) / 3, abs=1e-6)
        loss, outputs = engine.eval_batch(iter(batches), return_logits=True, bcast_loss=False)
        each = engine.eval_batch(iter(batches), reduce_output=None, num_micro_batches=2)
        mean = engine.eval_batch(iter(batches), compute_loss=False)
        inferred = engine.inference_batch(iter(batches), num_micro_batches=1)
        assert engine.is_last_stage() == (module.stage_id == (0 if schedule == "zbv" else 1))
        if engine.is_last_stage():
            assert float(loss) == pytest.approx(sum(expected) / 3, abs=1e-6)
            assert outputs.shape == (6, *first.shape[1:])
            assert [float(loss) for loss in each] == pytest.approx(expected[:2], abs=1e-6)
            assert mean.shape == first.shape
            assert torch.allclose(inferred[0], first, atol=1e-6)
        else:
            assert (loss, outputs, each, mean, inferred) == (None,) * 5
        before = weights(engine)
        assert engine.module.training
        engine.train_batch(iter(batches))
        assert any(not torch.equal(value, before[name]) for name, value in weights(engine).items())
        engine.destroy()


@shared_ranks(2)
def test_what_a_pipeline_refuses():
    engine = engine_for(pipeline(2))
    for name in ("forward", "backward", "step"):
        with pytest.raises(PipelineError, match=rf"engine\.{name}\(\) is not available .*engine\.train_batch"):
            getattr(engine, name)()
    with torch.no_grad(), pytest.raises(PipelineError, match="needs gradients"):
        engine.train_batch(data(0, 2))
    with pytest.raises(UsageError, match="reduce_output is 'avg' or None; found 'sum'"):
        engine.eval_batch(data(0, 2), reduce_output="sum")
    with pytest.raises(PipelineError, match="could not take its data: UsageError: there is no data"):
        engine.train_batch()
    with pytest.raises(DeepSpeedConfigError, match="built for '1f1b', which puts other layers"):
        engine_for(pipeline(2), pipeline={"schedule": "zbv"})
    with pytest.raises(LayoutError, match="world size 2 is not divisible by num_stages 3"):
        pipeline(3)
    with pytest.raises(UsageError, match="8 layers cannot make 16 stages"):
        pipeline(2, schedule="interleaved", chunks=8)
    with pytest.raises(UsageError, match="at least 4 micro-batches; found 2"):
        engine_for(pipeline(2, schedule="dualpipev"), 2)
    with pytest.raises(UsageError, match="neither mpu nor mesh_param"):
        deepspeed.initialize(model=pipeline(2), mpu=object(), config=config(2))
    losses, _ = train_pipeline(2, 2, 1, schedule="zb-h1")
    assert losses == pytest.approx(train_whole(1, 1, 2)[0], abs=1e-6)


@shared_ranks(2)
def test_a_stage_without_parameters_is_named_on_every_rank():
    layers = [LayerSpec(nn.Linear, 4, 4), nn.functional.relu]
    module = PipelineModule(layers, num_stages=2, partition_method="uniform", loss_fn=nn.functional.mse_loss)
    with pytest.raises(PipelineError, match=r"rank 1: pipeline rank 1 has no parameters: .*layers 1 to 1"):
        engine_for(module)


@shared_ranks(2)
def test_data_that_ends_loaders_and_batch_functions():
    engine = engine_for(pipeline(2), 2)
    source = itertools.islice(data(0, 2), 5)
    engine.train_batch(source)
    engine.train_batch(source)
    with pytest.raises(StopIteration):
        engine.train_batch(source)
    with pytest.raises(StopIteration):
        engine.train_batch(iter(()))
    assert engine.global_steps == 2
    engine.set_batch_fn(lambda batch: (batch["tokens"], batch["labels"]))
    rows = [dict(zip(("tokens", "labels"), micro_batch(9, 0, number), strict=True)) for number in range(2)]
    engine.train_batch(iter(rows))
    with pytest.raises(PipelineError, match=r"could not take its data"):
        engine.train_batch(iter([1, 2]))
    engine.train_batch(iter(rows))
    assert engine.global_steps == 4
    assert engine.micro_steps == 8


@shared_ranks(4)
def test_a_loader_of_the_engine_gives_both_ends_the_same_samples():
    generator = torch.Generator().manual_seed(3)
    rows = [tuple(torch.randint(VOCABULARY, (3,), generator=generator) for _ in "ab") for _ in range(16)]
    module = pipeline(2)
    engine, _, loader, _ = deepspeed.initialize(model=module, config=config(2), training_data=rows)
    assert len(loader) == 4
    losses = [float(engine.train_batch()) for _ in range(6)]  # the loader begins anew
    assert losses[-1] < losses[0]


@shared_ranks(2)
def test_training_data_keeps_its_order():
    """Samples are grouped by their length, so that another order could not be stacked."""
    lengths = [length for length in (2, 5, 3, 4) for _ in range(2)]
    rows = [tuple(torch.full((length,), number) for _ in "ab") for number, length in enumerate(lengths)]
    seen = []
    engine, *_ = deepspeed.initialize(model=pipeline(2, dynamic_shape=True), config=config(2), training_data=rows)
    engine.set_batch_fn(lambda batch: (seen.append(batch[0][:, 0].tolist()), batch)[1])
    for _ in range(4):  # two epochs
        engine.train_batch()
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 7]] * 2


@shared_ranks(3)
def test_a_failing_stage_is_named_on_every_rank_and_the_next_batch_trains():
    expected, end = train_whole(2, 1, 3)
    for schedule, when in (("1f1b", 0), ("zb-h1", 2), ("gpipe", 1)):
        engine = engine_for(pipeline(3, schedule=schedule), 3)
        calls = itertools.count()

        def fail(module, args, calls=calls, when=when):
            if next(calls) == when:
                raise ValueError("out of luck")

        handle = engine.module.register_forward_pre_hook(fail) if engine.module.stage_id == 1 else None
        with pytest.raises(PipelineError) as caught:
            engine.train_batch(data(0, 3))
        assert f"rank 1: stage 1 failed in the forward of micro-batch {when}: ValueError: out of luck" in str(
            caught.value
        )
        assert isinstance(caught.value.__cause__, ValueError) == (engine.module.stage_id == 1)
        if handle is not None:
            handle.remove()
        source = data(0, 3)
        assert [float(engine.train_batch(source)) for _ in range(2)] == pytest.approx(expected, abs=1e-6)
        assert_equal(engine, end)
        engine.destroy()


@shared_ranks(2)
def test_a_failing_backward_is_named_too():
    engine = engine_for(pipeline(2), 2)

    def fail(grad):
        raise ValueError("no gradient today")

    if engine.is_first_stage():
        handle = engine.module.get_submodule("2").up.weight.register_hook(fail)
    with pytest.raises(PipelineError, match="rank 0: stage 0 failed in the backward of micro-batch 0: ValueError"):
        engine.train_batch(data(0, 2))
    if engine.is_first_stage():
        handle.remove()
    assert float(engine.train_batch(data(0, 2))) == pytest.approx(train_whole(1, 1, 2)[0][0], abs=1e-6)


def shaped(lengths):
    for number, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(number)
        yield tuple(torch.randint(VOCABULARY, (2, length), generator=generator) for _ in "ab")


@shared_ranks(2)
def test_shapes_that_change():
    engine = engine_for(pipeline(2), 2)
    with pytest.raises(PipelineError, match=r"stage 0 .*float32\[2, 4, 8\].* of micro-batch 1 .*float32\[2, 3, 8\]"):
        engine.train_batch(shaped([3, 4]))
    engine.train_batch(shaped([3, 3]))
    engine.reset_activation_shape()
    engine.train_batch(shaped([5, 5]))
    engine.eval_batch(shaped([2, 2]))
    engine.train_batch(shaped([5, 5]))
    engine.destroy()
    expected = Whole()
    for schedule in ("1f1b", "zbv"):
        dynamic = engine_for(pipeline(2, dynamic_shape=True, schedule=schedule), 3)
        with torch.no_grad():
            mean = sum(float(expected(*batch)) for batch in shaped([3, 5, 1])) / 3
        assert float(dynamic.train_batch(shaped([3, 5, 1]))) == pytest.approx(mean, abs=1e-6)
        _, outputs = dynamic.eval_batch(shaped([3, 5, 1]), return_logits=True)
        if dynamic.is_last_stage():
            assert [each.shape[1] for each in outputs] == [3, 5, 1]
            with pytest.raises(UsageError, match=r"shapes .*, of which there is no mean: .*reduce_output=None"):
                dynamic.eval_batch(shaped([3, 5, 1]), compute_loss=False)
        else:
            dynamic.eval_batch(shaped([3, 5, 1]), compute_loss=False)
        dynamic.destroy()


@shared_ranks(2)
def test_ranks_that_call_different_methods_are_told():
    engine = engine_for(pipeline(2), 2)
    call = engine.train_batch if engine.is_first_stage() else engine.eval_batch
    with pytest.raises(PipelineError, match=r"something else.*same methods in the same order"):
        call(data(0, 2))
    short = list(data(0, 2))[: 1 + engine.is_first_stage()]  # the first stage has computed before it hears of it
    with pytest.raises(StopIteration):
        engine.train_batch(iter(short))
    alike = engine_for(pipeline(2), 2)
    for _ in range(2):
        assert float(engine.train_batch(data(0, 2))) == float(alike.train_batch(data(0, 2))), "something was left"


@shared_ranks(2)
def test_the_loss_of_a_step_that_fails_is_told():
    """Whoever looks for the cause must not see that of the step before."""
    engine = engine_for(pipeline(2), 2, nonfinite_gradients="stop")
    engine.train_batch(data(0, 2))
    with torch.no_grad():
        for param in engine.module.parameters():
            param.fill_(float("nan"))
    with pytest.raises(DeepSpeedError, match="nonfinite_gradients is 'stop'"):
        engine.train_batch(data(0, 2))
    assert engine.agg_train_loss.isnan(), f"the loss of the step is {engine.agg_train_loss}"
    assert engine.global_steps == 1


class Noted(PipelineModule):
    """Gives the same dict and tensor for every micro-batch, with other values: 1, 3, 5, …"""

    seen = None

    def get_additional_losses(self):
        self.seen = self.seen or {"aux": torch.tensor(-1.0)}
        self.seen["aux"] += 2
        return self.seen


@shared_ranks(2)
def test_a_module_as_scripts_see_it():
    layers = [LayerSpec(nn.Embedding, VOCABULARY, 8), *(nn.Linear(8, 8) for _ in range(2)), LayerSpec(nn.Linear, 8, 13)]
    module = Noted(layers, num_stages=2, loss_fn=loss_of, base_seed=SEED)
    assert (module.num_pipeline_stages(), module.topology().get_dim("pipe")) == (2, 2)
    assert [module.stage_owner(number) for number in range(4)] == sorted(module.stage_owner(n) for n in range(4))
    built = {name for name, _ in module.named_parameters()}
    assert {int(name.split(".")[0]) for name in built} == set(module.layers_of(module.stage_id))
    engine = engine_for(module, 2)
    engine.train_batch(data(0, 2))
    losses = engine.get_additional_losses()
    assert losses == ({"aux": 2.0} if engine.is_last_stage() else None)
    assert engine.get_pipeline_parallel_rank() == module.stage_id
    assert not engine.is_gradient_accumulation_boundary()
    engine.set_train_batch_size(8)
    assert engine.gradient_accumulation_steps() == 4
    engine.train_batch(data(0, 4))


@shared_ranks(2)
def test_a_sequential_is_cut_as_it_is():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    inputs, labels = torch.rand(3, 4), torch.rand(3, 2)
    with torch.no_grad():
        expected = float(nn.functional.mse_loss(model(inputs), labels))
    module = PipelineModule(model, num_stages=2, loss_fn=nn.functional.mse_loss)
    engine = engine_for(module, 1)
    assert float(engine.train_batch(iter([(inputs, labels)]))) == pytest.approx(expected, abs=1e-6)


@shared_ranks(2)
def test_layers_are_cut_by_measured_time():
    now = 0.0
    pipe_layers.time = SimpleNamespace(perf_counter=lambda: now)

    class Timed(nn.Linear):
        def forward(self, value):
            nonlocal now
            now += 1.0 if isinstance(self, Slow) else 0.1
            return super().forward(value)

    class Slow(Timed):
        pass

    layers = [LayerSpec(Slow, 16, 16), *(LayerSpec(Timed, 16, 16) for _ in range(5))]
    module = PipelineModule(layers, num_stages=2, partition_method="profile", example_input=torch.rand(8, 16))
    assert module.partitions() == [0, 1, 6]
    with pytest.raises(UsageError, match="example_input" if module.global_rank == 0 else "on rank 0"):
        PipelineModule(layers, num_stages=2, partition_method="profile")


@shared_ranks(2)
def test_partition_methods():
    blocks = [LayerSpec(nn.Linear, 4, 4), *(LayerSpec(Block, 8) for _ in range(3)), LayerSpec(nn.Linear, 64, 64)]
    cuts = {
        method: PipelineModule(blocks, num_stages=2, partition_method=method).partitions()
        for method in ("uniform", "parameters", "type:block")
    }
    assert cuts == {"uniform": [0, 3, 5], "parameters": [0, 4, 5], "type:block": cuts["type:block"]}
    assert cuts["type:block"][1] in (2, 3)
    for method, words in (("type:nothing", "matches none"), ("type:(", "no regular"), ("best", "not known")):
        with pytest.raises(UsageError, match=words):
            PipelineModule(blocks, num_stages=2, partition_method=method)


@shared_ranks(1)
def test_seeded_layers_draw_the_same_when_they_run_again():
    """Other micro-batches have passed in between, as they have in 1f1b."""
    for reentrant in (True, False):
        drop, seen = nn.Dropout(0.5), []
        options = {"seed_layers": True, "activation_checkpoint_interval": 3}
        module = PipelineModule([nn.Linear(8, 8), drop, nn.Linear(8, 8)], num_stages=1, loss_fn=loss_of, **options)
        module.use_reentrant = reentrant
        drop.register_forward_hook(lambda _, args, out, seen=seen: seen.append(out.detach() == 0))
        for out in [module(torch.ones(2, 8, requires_grad=True)) for _ in range(2)]:
            out.sum().backward()
        assert not torch.equal(seen[0], seen[1]), "two micro-batches drop the same elements"
        assert all(torch.equal(a, b) for a, b in zip(seen[:2], seen[2:], strict=True)), f"reentrant: {reentrant}"
