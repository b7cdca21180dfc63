"""Profiles of operations and of memory in a pipeline: each stage counts its own, and the first rank tells of all."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import PipelineError
from deepspeed.events import Phase, PhaseBegan
from deepspeed.pipe import LayerSpec, PipelineModule
from tests.harness import ranks, shared_ranks, store_path
from tests.pipelines import Whole, config, data, logits, micro_batch, pipeline


def flops_profiler():
    """Imported late: torch's formulas bring Triton, which has to learn of its interpreter first."""
    from deepspeed.profiling.flops_profiler import profiler

    return profiler


class Row(Whole):
    """The layers without the loss."""

    def forward(self, tokens):
        value = self.tied_modules["embed"](tokens)
        for number in range(1, self.blocks + 1):
            value = getattr(self, str(number))(value)
        return logits(self.tied_modules["embed"], value)


def expected():
    """Operations, multiplications and parameters of the whole model in one forward."""
    profiler = flops_profiler().FlopsProfiler(Row())
    profiler.start_profile()
    profiler.model(micro_batch(0, 0, 0)[0])
    profiler.stop_profile()
    return profiler.flops, profiler.macs, profiler.params


def train(stages, schedule, count=4, steps=3, stage=0, **sections):
    module = pipeline(stages, schedule=schedule)
    engine, *_ = deepspeed.initialize(model=module, config=config(count, stage, **sections))
    source, output, seen = data(module.mpu().get_data_parallel_rank(), count), io.StringIO(), []
    with contextlib.redirect_stdout(output):
        for _ in range(steps):
            engine.train_batch(source)
            seen.append(len(re.findall("Flops Profiler|Memory at the peak", output.getvalue())))
    return engine, output.getvalue(), seen


def sums(told):
    own = told.flops, told.macs, told.params
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


@ranks(4)
def test_operations_are_counted_by_stage_and_summed():
    flops, macs, params = expected()
    tied = Whole().tied_modules["embed"].weight.numel()
    for stages, schedule, stage in ((2, "1f1b", 1), (4, "zb-h1", 0), (2, "zbv", 3), (2, "interleaved", 0)):
        engine, output, seen = train(stages, schedule, stage=stage, flops_profiler={"enabled": True, "profile_step": 1})
        first = engine._parts.layout["dp"].rank == 0
        assert (engine.flops_profiler is not None) == first, "the first replica of each stage counts"
        assert seen == ([0, 1, 1] if dist.get_rank() == 0 else [0, 0, 0]), "the first rank prints, once"
        found = sums(engine.flops_profiler or flops_profiler().FlopsProfiler(nn.Identity()))
        split = int(schedule != "zbv")  # of zbv, embedding and head lie on one rank
        assert [sum(each) for each in zip(*found, strict=True)] == [flops, macs, params + tied * split], schedule
        if dist.get_rank() == 0:
            rows = dict(line.split(":", 1) for line in output.splitlines() if line.count(":") == 1)
            shown = {name: value.strip() for name, value in rows.items()}
            assert shown["fwd MACs of model = sum over pipeline ranks * tp_size"] == flops_profiler().number_to_string(
                macs, "MACs"
            )
            assert shown["pipeline ranks"] == str(stages)
            held = [shown[f"pipeline rank {number}, params"] for number in range(stages)]
            assert len(held) == stages, "a line for each rank"
            assert shown["params of model = sum over pipeline ranks * tp_size"] == flops_profiler().params_to_string(
                params
            )
            assert all(f"= pipeline rank {number} (stage" in output for number in range(stages)), "modules of each"
            assert output.count("Detailed Profile per GPU") == stages
            assert float(shown["iter latency, ranks that wait included"].split()[0]) > 0
        engine.destroy()


class Sometimes(nn.Linear):
    """Fails when it is told to."""

    fails = False

    def forward(self, x):
        if Sometimes.fails:
            raise ValueError("not now")
        return super().forward(x)


@shared_ranks(2)
def test_a_batch_that_failed_is_not_counted():
    layers = [
        LayerSpec(nn.Linear, 8, 8),
        LayerSpec(nn.Linear, 8, 8),
        LayerSpec(Sometimes, 8, 8),
        LayerSpec(nn.Linear, 8, 8),
    ]
    module = PipelineModule(
        layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform", schedule="zbv"
    )
    files = {name: f"{store_path()}-{name}.txt" for name in ("flops", "memory")}
    sections = {
        "flops_profiler": {"enabled": True, "profile_step": 0, "detailed": False, "output_file": files["flops"]},
        "memory_profiler": {"enabled": True, "profile_step": 0, "output_file": files["memory"]},
    }
    engine, *_ = deepspeed.initialize(model=module, config=config(2, **sections))
    batches = [(torch.ones(2, 8), torch.ones(2, 8))] * 2
    Sometimes.fails = dist.get_rank() == 1
    with pytest.raises(PipelineError, match="not now"):
        engine.train_batch(iter(batches))
    Sometimes.fails = False
    engine.train_batch(iter(batches))
    assert engine.flops_profiler.macs == 2 * 2 * 8 * 8, "two layers of this rank, once"
    dist.barrier()
    text = Path(files["flops"]).read_text()
    assert "pipeline rank 1 (stage 1 and 2, rank 1)" in text
    assert not Path(files["memory"]).exists(), "a step that failed ends the look at memory, on all ranks"
    engine.destroy()


@shared_ranks(2)
def test_memory_of_every_stage():
    engine, output, seen = train(2, "1f1b", memory_profiler={"enabled": True, "profile_step": 1, "top_modules": 2})
    peak = engine.memory_profiler.peak
    assert peak.total > 0
    assert peak.phase in ("forward", "backward", "step"), peak
    assert sum(peak.activations.values()) > 0, "forwards of a pipeline are seen"
    if dist.get_rank() == 0:
        assert seen == [0, 2, 2], "a table for each of two stages"
        heads = [output.index(f"pipeline rank {number} (stage {number}, rank {number})") for number in range(2)]
        assert heads == sorted(heads)
    else:
        assert seen == [0, 0, 0]
    engine.destroy()


@shared_ranks(2)
def test_phases_and_rates():
    """What times steps sees forwards and backwards of every micro-batch, and none of an evaluation."""
    module = pipeline(2, schedule="zb-h1")
    engine, *_ = deepspeed.initialize(model=module, config=config(3, wall_clock_breakdown=True, steps_per_print=1))
    seen = []
    engine.events.subscribe(PhaseBegan, lambda event: seen.append((event.phase, event.micro_step)))
    source, output = data(0, 3), io.StringIO()
    with contextlib.redirect_stdout(output):
        for _ in range(4):
            engine.train_batch(source)
        before = len(seen)
        engine.eval_batch(source)
    assert len(seen) == before, "an evaluation is no phase of training"
    forwards = [step for phase, step in seen if phase is Phase.FORWARD]
    assert forwards == list(range(12))
    last = module.stage_id == 1
    backwards = [step for phase, step in seen if phase is Phase.BACKWARD]
    assert sorted(backwards) == sorted([*range(12)] * (2 if last else 1)), "on the last stage in two parts"
    assert engine.timers("fwd").elapsed(reset=False) > 0
    assert engine._parts.tput_timer.samples_per_second > 0
    engine.destroy()
