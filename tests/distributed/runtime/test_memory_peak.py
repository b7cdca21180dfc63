"""The `memory_profiler` section: what was alive when a step needed most memory, and the module that was running."""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from tests.harness import shared_ranks

ROWS, WIDTH, TIMES = 8, 16, 4096


class _Wide(torch.autograd.Function):
    """Needs much memory for a moment."""

    @staticmethod
    def forward(ctx, x, where):
        ctx.where = where
        if where == "forward":
            x.repeat(1, TIMES)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.where == "backward":
            grad.repeat(1, TIMES)
        return grad, None


class Wide(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.where = where

    def forward(self, x):
        return _Wide.apply(x, self.where)


class Model(nn.Module):
    def __init__(self, where, again=False):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Wide(where), nn.Linear(WIDTH, WIDTH))
        self.register_buffer("table", torch.zeros(100))
        self.again = again

    def forward(self, x):
        x = self.first(x)
        x = checkpoint(self.middle, x, use_reentrant=False) if self.again else self.middle(x)
        return x.float().square().mean()


NUMEL = 3 * (WIDTH * WIDTH + WIDTH)


def train(model, steps=2, stage=0, dtype=torch.bfloat16, **section):
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": dtype is torch.bfloat16},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "memory_profiler": {"enabled": True, **section},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    output, tables = io.StringIO(), []
    with contextlib.redirect_stdout(output):
        for _ in range(steps):
            engine.backward(engine(torch.randn(ROWS, WIDTH, dtype=dtype)))
            engine.step()
            tables.append(output.getvalue().count("Memory at the peak"))
    return engine, output.getvalue(), tables


@shared_ranks(1)
def test_the_module_of_the_peak_and_bytes_by_kind():
    wide = ROWS * WIDTH * TIMES * 2
    for where in ("forward", "backward"):
        engine, output, tables = train(Model(where), steps=3, profile_step=1)
        peak = engine.memory_profiler.peak
        assert tables == [0, 1, 1]
        assert (peak.phase, peak.module, peak.module_type) == (where, "middle.2", "Wide")
        assert peak.operation == "aten.repeat"
        held = {kind: peak.kinds[kind] for kind in ("parameters", "masters", "moments", "buffers of the model")}
        assert held == {
            "parameters": 2 * NUMEL,
            "masters": 4 * NUMEL,
            "moments": 8 * NUMEL,
            "buffers of the model": 100 * 4,
        }
        born = "activations" if where == "forward" else "gradients of activations, temporaries"
        assert wide <= peak.kinds[born] < 1.1 * wide
        assert sum(peak.kinds.values()) == peak.total
        if where == "forward":
            assert next(iter(peak.activations)) == "middle.2"
            assert peak.activations["first"] == ROWS * WIDTH * 2
        else:  # of the last layer of the middle, and of none before
            assert peak.kinds["gradients"] == 2 * (WIDTH * WIDTH + WIDTH)
        assert f"in {where}, module middle.2 (Wide), operation aten.repeat" in output
        engine.destroy()


@shared_ranks(1)
def test_the_first_step_files_and_what_is_computed_again(tmp_path):
    engine, output, _ = train(Model("nowhere"), steps=1, profile_step=0, output_file=str(tmp_path / "a" / "peak.txt"))
    assert "Memory" not in output
    text = (tmp_path / "a" / "peak.txt").read_text()
    assert "Memory at the peak of step 0" in text
    assert engine.memory_profiler.peak.phase == "step"  # masters and moments are made there
    assert engine.memory_profiler.peak.module is None
    engine.destroy()
    engine, _, _ = train(Model("forward", again=True), profile_step=1, top_modules=1)
    peak = engine.memory_profiler.peak
    assert (peak.phase, peak.module) == ("backward", "middle.2")  # there are gradients then, besides
    assert peak.kinds["activations"] > ROWS * WIDTH * TIMES
    engine.destroy()
    engine, _, _ = train(Model("forward"), profile_step=1, dtype=torch.float32)
    kinds = engine.memory_profiler.peak.kinds
    assert (kinds["parameters"], kinds["masters"]) == (4 * NUMEL, 0)  # the parameter is its own master
    engine.destroy()
    engine, _, tables = train(Model("forward"), profile_step=7)
    assert (tables, engine.memory_profiler.peak) == ([0, 0], None)
    engine.destroy()


@shared_ranks(2)
def test_sharded_parameters_count_as_they_come_and_go():
    engine, _, tables = train(Model("forward"), stage=3, profile_step=1)
    if dist.get_rank():
        assert (tables, engine.memory_profiler) == ([0, 0], None)
    else:
        peak = engine.memory_profiler.peak
        assert (peak.phase, peak.module) == ("forward", "middle.2")
        assert NUMEL <= peak.kinds["parameters"] < 3 * NUMEL  # a half, and what is gathered at that moment
        assert (peak.kinds["masters"], peak.kinds["moments"]) == (2 * NUMEL, 4 * NUMEL)
        assert tables == [0, 1]
    engine.destroy()


class Fails(Wide):
    def forward(self, x):
        raise torch.OutOfMemoryError("out of memory")


@shared_ranks(1)
def test_an_error_names_the_module_and_shows_the_profile():
    model = Model("nowhere")
    model.middle[2] = Fails("nowhere")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train(model, profile_step=0)
    text = str(caught.value)
    assert "What was alive on cpu in forward of middle.2 (Fails):" in text
    assert "Memory at the peak of step 0" in text
    assert "Activations that were alive, by the module that made them:" in text
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


@shared_ranks(1)
def test_a_failure_before_the_profiled_step_does_not_end_the_wait_for_it():
    for failing, expected in ((0, [0, 1, 1]), (1, [0, 0, 0])):
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "optimizer": {"type": "AdamW"},
            "memory_profiler": {"enabled": True, "profile_step": 1},
        }
        engine = deepspeed.initialize(model=Model("forward"), config=config)[0]
        output, tables = io.StringIO(), []
        with contextlib.redirect_stdout(output):
            for number in range(3):
                if number == failing:
                    with pytest.raises(RuntimeError, match="shapes"):
                        engine(torch.randn(ROWS, WIDTH + 1))
                engine.backward(engine(torch.randn(ROWS, WIDTH)))
                engine.step()
                tables.append(output.getvalue().count("Memory at the peak"))
        assert tables == expected
        engine.destroy()
        assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
