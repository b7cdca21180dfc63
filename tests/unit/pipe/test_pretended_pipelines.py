"""One rank of thousands in one process, on torch's fake process group, of any stage of a pipeline.

What it does there, asks for and makes is the same whether there are 8 ranks or thousands.
"""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import deepspeed
from deepspeed.errors import PipelineError, UsageError
from deepspeed.parallel.topology import PipelineParallelGrid, ProcessTopology
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.pipe.layers import forms_of_inputs
from tests.harness import ranks
from tests.pipelines import LENGTH, VOCABULARY, data, loss_of, specs

COUNT = 8


def config(stage, **more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": COUNT,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": None,
        "comms_logger": {"enabled": True},
        **more,
    }


def pretend(world, rank):
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())


class Calls:
    """Counts calls of functions, of Python's and of C's, and the groups that are made."""

    def __init__(self):
        self.calls = 0
        self.groups = 0
        self._new_group = dist.new_group

    def __enter__(self):
        dist.new_group = self._make
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        dist.new_group = self._new_group

    def _seen(self, frame, event, argument):
        self.calls += event in ("call", "c_call")

    def _make(self, *args, **kwargs):
        self.groups += 1
        return self._new_group(*args, **kwargs)


def operations():
    found = Counter()
    for name, sizes in deepspeed.comm.comms_logger.comms_dict.items():
        found[name] += sum(entry[0] for entry in sizes.values())
    return found


def build(schedule="1f1b", **options):
    return PipelineModule(
        specs(),
        num_stages=4,
        loss_fn=loss_of,
        schedule=schedule,
        partition_method="uniform",
        **{"example_input": torch.zeros(2, LENGTH, dtype=torch.long), **options},
    )


def train(world, place, stage, schedule):
    """Start as the last replica of a rank of a pipeline of 4, and train: calls, groups, and operations by name."""
    pretend(world, (place + 1) * world // 4 - 1)
    torch.manual_seed(0)
    with Calls() as seen:
        module = build(schedule)
        engine, *_ = deepspeed.initialize(model=module, config=config(stage))
        source = data(0, COUNT)
        before = operations()
        losses = [engine.train_batch(source) for _ in range(2)]
        engine.eval_batch(source)
    assert (engine.global_steps, module.stage_id) == (2, place), "both batches were trained on, at that place"
    finite = all(map(torch.isfinite, losses))
    assert finite or stage == 3, (
        "messages of pretended ranks are zeros; only shards of theirs are whatever lay in memory"
    )
    assert not {"dp_groups", "pipe_groups"} & set(vars(module.mpu())), "nobody listed the whole world"
    found = seen.calls, seen.groups, operations() - before
    engine.destroy()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("place", "stage", "schedule"),
    [(0, 0, "1f1b"), (1, 1, "zb-h1"), (2, 2, "zbv"), (3, 3, "1f1b"), (0, 3, "dualpipev"), (2, 0, "interleaved")],
)
@ranks(1, init=False, timeout=300)
def test_what_a_rank_does_does_not_grow(place, stage, schedule):
    train(8, place, stage, schedule)  # whatever is loaded once
    few, groups, done = train(8, place, stage, schedule)
    assert groups <= 4, f"{groups} groups were made by one rank of 8"
    assert sum(done.values()) <= 300, done
    for world in (1024, 4096):
        calls, made, more = train(world, place, stage, schedule)
        assert made == groups, f"{made} groups were made by one rank of {world}, {groups} by one of 8"
        # ZeRO reduces what is tiny for so many ranks by other operations
        assert sum(more.values()) <= sum(done.values()) + 4, f"rank of {world}: {more}, rank of 8: {done}"
        # its own groups are listed some times; calls that grow by more than that grow with the groups of others
        assert calls - few <= 4 * world, f"{calls} calls on one rank of {world}, {few} on one of 8"


@ranks(1, init=False)
def test_the_whole_world_is_listed_for_those_who_ask():
    pretend(1024, 700)
    grid = PipelineParallelGrid(ProcessTopology(["pipe", "data"], [4, 256]))
    assert (len(grid.dp_groups), len(grid.dp_groups[3])) == (4, 256)
    assert grid.pipe_groups[5] == [5, 261, 517, 773]
    assert grid.pipe_groups is grid.pipe_groups, "listed once"


@ranks(1, init=False)
def test_shapes_that_nobody_tells():
    pretend(64, 20)
    engine, *_ = deepspeed.initialize(model=build(example_input=None), config=config(0))
    with pytest.raises(PipelineError, match="stage 1 on rank 20 receives activations from rank 4, which is only pret"):
        engine.train_batch(data(0, COUNT))
    with pytest.raises(UsageError, match=r"layer 0 \(Embed\) could not run over the shapes of example_input"):
        build(example_input=torch.zeros(2, 3, 4))
    with pytest.raises(PipelineError, match="rank 20: stage 1 failed in the forward of micro-batch 0: ValueError: no"):
        broken()


class Broken(nn.Linear):
    def forward(self, x):
        raise ValueError("no")


def broken():
    layers = [
        LayerSpec(nn.Linear, 4, 4),
        LayerSpec(Broken, 4, 4),
        LayerSpec(nn.Linear, 4, 4),
        LayerSpec(nn.Linear, 4, 4),
    ]
    module = PipelineModule(
        layers, num_stages=4, loss_fn=loss_of, partition_method="uniform", example_input=torch.zeros(2, 4)
    )
    engine, *_ = deepspeed.initialize(model=module, config=config(0))
    engine.train_batch()


@ranks(1, init=False)
def test_a_model_of_transformers_on_the_last_stage():
    import transformers as hf

    hf.logging.set_verbosity_error()
    pretend(4096, 4095)
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, vocab_size=VOCABULARY, num_hidden_layers=4))
    tokens = torch.ones(2, LENGTH, dtype=torch.long)
    module = PipelineModule(model, num_stages=2, example_input=tokens)
    engine, *_ = deepspeed.initialize(model=module, config=config(1))
    loss = engine.train_batch(iter([{"input_ids": tokens, "labels": tokens}] * COUNT))
    assert torch.isfinite(loss), "hidden states of zeros have a loss"
    assert engine.global_steps == 1


class Counted(nn.Linear):
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return super().forward(x)


class Shorter(nn.Module):
    def forward(self, x):
        return x[:, 1:]


def test_layers_that_are_alike_are_looked_at_once():
    layers = [LayerSpec(Counted, 4, 8), *[LayerSpec(Counted, 8, 8)] * 5, *[LayerSpec(Shorter)] * 3, nn.Identity()]
    numbers = range(1, len(layers))
    found = forms_of_inputs(layers, [0, *numbers], numbers, torch.zeros(2, 4))
    assert [found[number].kinds[0].shape[1] for number in numbers] == [8, 8, 8, 8, 8, 8, 7, 6, 5]
    assert Counted.calls == 2
