"""The `flops_profiler` section: one step of an engine, profiled on rank 0."""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist

import deepspeed
from tests.harness import shared_ranks


def train(steps, stage=0, accumulation=1, **section):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": accumulation,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "flops_profiler": {"enabled": True, **section},
        },
    )
    output, lengths = io.StringIO(), []
    with contextlib.redirect_stdout(output):
        for _ in range(steps * accumulation):
            engine.backward(engine(torch.ones(2, 8)).square().mean())
            engine.step()
            lengths.append(output.getvalue().count("Flops Profiler"))
    return engine, output.getvalue(), lengths


@shared_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_one_step_is_profiled_on_rank_0(stage):
    engine, output, lengths = train(4, stage, profile_step=1, recompute_fwd_factor=1.0)
    assert engine.wall_clock_breakdown()
    assert "fwd" in engine.timers.get_timers()
    if dist.get_rank():
        assert engine.flops_profiler is None
        assert lengths[-1] == 0
    else:
        assert lengths == [0, 1, 1, 1]
        assert (engine.flops_profiler.flops, engine.flops_profiler.macs) == (2 * 384 + 32, 384)
        assert engine.flops_profiler.params == 8 * 16 + 16 + 16 * 4 + 4
        rows = [line.split(":") for line in output.splitlines() if line.count(":") == 1]
        shown = {name: value.strip() for name, value in rows}
        assert (shown["world size"], shown["data parallel size"], shown["batch size per GPU"]) == ("2", "2", "2")
        assert shown["fwd MACs per GPU"] == "384 MACs"
        assert any(name.startswith("bwd FLOPS per GPU = 3 *") for name in shown)
        assert "(0): Linear(144 = " in output
    engine.destroy()


@shared_ranks(1)
def test_the_first_step_the_last_one_and_none(tmp_path):
    engine, output, lengths = train(2, accumulation=3, profile_step=0, output_file=str(tmp_path / "profile.txt"))
    assert lengths == [0] * 6
    assert "Flops Profiler" not in output
    text = (tmp_path / "profile.txt").read_text()
    assert "iter latency = 3 * (fwd+bwd latency) + step latency" in text
    assert engine.flops_profiler.macs == 384
    engine.destroy()
    engine, _, lengths = train(2, profile_step=7, detailed=False)
    assert lengths == [0, 0]
    engine.destroy()


@shared_ranks(1)
def test_steps_are_counted_from_the_beginning_of_the_run_that_a_checkpoint_continues(tmp_path):
    def build(**sections):
        model = torch.nn.Linear(8, 4)
        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, **sections}
        return deepspeed.initialize(model=model, config=config)[0]

    def step(engine):
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()

    engine = build()
    for _ in range(3):
        step(engine)
    engine.save_checkpoint(str(tmp_path))
    engine.destroy()
    for wanted in (0, 3, 4):
        section = {"enabled": True, "profile_step": wanted}
        engine, profiled = build(flops_profiler=section, memory_profiler=section), []
        engine.load_checkpoint(str(tmp_path))
        for number in range(3, 6):
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                step(engine)
            for title in ("Flops Profiler", "Memory at the peak"):
                if title in output.getvalue():
                    profiled.append((title, number))
        expected = [] if wanted == 0 else [("Flops Profiler", wanted), ("Memory at the peak", wanted)]
        assert sorted(profiled) == expected
        assert (engine.memory_profiler.peak is None) == (wanted == 0)
        engine.destroy()
        assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


@shared_ranks(2)
def test_a_profiler_of_the_script_is_told_of_the_job_by_the_engine():
    from deepspeed.profiling.flops_profiler import FlopsProfiler  # loads Triton, which other tests must set up first

    for timed in (False, True):
        model = torch.nn.Linear(8, 4)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 3,
            "optimizer": {"type": "AdamW"},
            "wall_clock_breakdown": timed,
        }
        engine = deepspeed.initialize(model=model, config=config)[0]
        profiler = FlopsProfiler(engine.module, ds_engine=engine, recompute_fwd_factor=1.0)
        profiler.start_profile()
        engine.module(torch.ones(2, 8))
        profiler.stop_profile()
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 8)).square().mean())
            engine.step()
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            profiler.print_model_profile(detailed=False)
        rows = [line.split(":") for line in output.getvalue().splitlines() if line.count(":") == 1]
        shown = {name: value.strip() for name, value in rows}
        assert (shown["world size"], shown["data parallel size"], shown["batch size per GPU"]) == ("2", "2", "2")
        assert shown["fwd MACs per GPU"] == "64 MACs"
        assert ("FLOPS per GPU = 3 * 4 * fwd flops per GPU / iter latency" in shown) is timed
        profiler.end_profile()
        engine.destroy()


@shared_ranks(1)
def test_a_report_that_cannot_be_written_is_shown_and_training_goes_on(tmp_path):
    section = {"enabled": True, "profile_step": 0, "output_file": str(tmp_path)}  # a folder
    config = {"train_micro_batch_size_per_gpu": 2, "flops_profiler": section, "memory_profiler": section}
    engine = deepspeed.initialize(model=torch.nn.Linear(8, 4), config={**config, "optimizer": {"type": "AdamW"}})[0]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 8)).square().mean())
            engine.step()
    assert engine.global_steps == 2
    assert output.getvalue().count("Flops Profiler") == output.getvalue().count("Memory at the peak") == 1
    engine.destroy()
