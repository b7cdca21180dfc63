"""The benchmark of long sequences without a device: its arithmetic, and a small step whose every byte is counted."""

from __future__ import annotations

import pytest

from benchmarks import gpu_long
from benchmarks.long_arithmetic import GIB, SHAPES, Plan, lines
from tests.harness import ranks


def test_sizes_and_bytes():
    assert round(SHAPES["8b"].parameters / 1e9, 2) == 8.03
    assert round(SHAPES["1b"].parameters / 1e9, 2) == 1.1
    long = Plan(SHAPES["8b"], 2**19, lora=16, keep_last=10)
    assert (long.unit, long.host()) == (4 * GIB, 22 * 4 * GIB)
    assert Plan(SHAPES["8b"], 2**20, lora=16, layers_per_checkpoint=3).host() == 10 * 8 * GIB
    assert any("expected peak" in line for line in lines(long, 2048))


def test_ranks_that_share():
    """1M tokens of 8B over 8 × 8 ranks: an eighth of the weights, of the tokens, and of the heads of these tokens."""
    alone, shared = Plan(SHAPES["8b"], 2**20), Plan(SHAPES["8b"], 2**20, tensor=8, sequence=8)
    assert (alone.unit, shared.unit, shared.host()) == (8 * GIB, GIB, 31 * GIB)
    one, many = alone.device(2048), shared.device(2048)
    assert many["weights"] * 8 == pytest.approx(one["weights"])
    assert many["queries' gradient in fp32"] * 64 == one["queries' gradient in fp32"]
    assert many["their gradients"] * 64 == one["their gradients"]
    assert sum(shared.flops().values()) * 64 == pytest.approx(sum(alone.flops().values()))
    # more ranks than key/value heads: each has one
    more = Plan(SHAPES["8b"], 2**20, tensor=16, sequence=8).device(2048)
    assert more["their gradients"] - 2 * GIB // 16 == many["their gradients"] - 2 * GIB // 8


def test_the_config_of_a_run():
    options = gpu_long.parser().parse_args(["--keep-last", "3", "--layers-per-checkpoint", "2"])
    config = gpu_long.config_of(options)
    assert config["activation_checkpointing"]["keep_last_count"] == 3
    options.pieces = True
    assert "sequence_parallel" not in gpu_long.config_of(options)


def counted(tokens, *arguments):
    """Bytes at the peak of backward."""
    given = ["--shape", "tiny", "--tokens", str(tokens), "--device", "cpu", "--count", "--quiet", "--tile", "32"]
    options = gpu_long.parser().parse_args([*given, "--loss-tile", "32", "--attention", "any", *arguments])
    plan = Plan(SHAPES["tiny"].with_layers(options.layers), tokens)
    return round(gpu_long.train(plan, options)["device"]["backward"] * GIB), plan.unit


@ranks(1, timeout=400)
def test_a_small_step_takes_what_the_arithmetic_says():
    """On a CPU checkpoints stay where they are, so that each of them is seen in the peak."""
    few, unit = counted(128, "--layers", "2")
    many, _ = counted(128, "--layers", "6")
    layer = SHAPES["tiny"].with_layers(2).parameters - SHAPES["tiny"].with_layers(1).parameters
    assert many - few == pytest.approx(4 * (unit + 16 * layer), rel=0.05)
