"""The benchmark of long sequences without a device: its arithmetic, and a small step whose every byte is counted."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

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
    assert sum(shared.kinds().values()) == pytest.approx(sum(shared.device(0).values()) + shared.host())
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


def as_first_of_four(layers, folder):
    """Bytes that a rank sends in a step, of 2 × 2 ranks that share layers and the sequence."""
    given = ["--shape", "tiny", "--tokens", "256", "--device", "cpu", "--quiet", "--tile", "32", "--loss-tile", "32"]
    shared = ["--tensor", "2", "--sequence", "2", "--layers", str(layers), "--out", str(folder), "--attention", "any"]
    options = gpu_long.parser().parse_args([*given, *shared])
    plan = Plan(SHAPES["tiny"].with_layers(layers), 256, tensor=2, sequence=2)
    return gpu_long.train(plan, options)["sent"], plan


@ranks(1, init=False, timeout=400)
def test_the_wire_of_a_rank_is_what_the_docs_say():
    """Also that a file tells every layer of the step, and its end."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        (few, plan), (many, _) = as_first_of_four(2, folder), as_first_of_four(3, folder)
        notes = json.loads((Path(folder) / "tiny-3-256-2x2.json").read_text())
    layer = {kind: many[kind] - few[kind] for kind in many}
    hidden, elements = plan.unit, (4 * 64 * 64 - 2 * 64 * 32 + 3 * 64 * 128) // 2 + 2 * 64
    tiles = 4
    sums = (5 + (tiles - 1) / tiles) * hidden + 4 * elements
    assert layer["all-reduce"] == pytest.approx(sums, abs=100)  # and a few numbers on which ranks agree
    keys = 2 * 128 * 16 * 1  # a key and a value head of 16 for each token
    assert layer["other"] == 2 * keys + 2 * keys + (
        2 * keys + 2 * 4 * keys
    )  # twice forward; backward, gradients in fp32
    step = notes["steps"][-1]
    assert [row["layer"] for row in step["layers"]] == [0, 1, 2, 2, 1, 0]
    assert [row["begins"] for row in step["phases"]] == ["forward", "loss", "backward", "update", "between steps"]
    assert notes["found"]["sent"] == many
