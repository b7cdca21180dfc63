"""What DeepCompile's keys bring to host memory: it is there while graphs run, and training is the same."""

from __future__ import annotations

import weakref
from unittest import mock

import torch
from torch import fx

from deepspeed.compile.backend import _as_it_is
from deepspeed.compile.graph import PassLimits
from tests.closeness import assert_same_training
from tests.distributed.compile.test_deep_compile import compiled, graphs
from tests.harness import ranks
from tests.user_models import Primes, run


def keys(*names, **more):
    return {"compile": {"deepcompile": True, **dict.fromkeys(names, True)}, **more}


def watched(seen, found, **options):
    """Note in each forward and backward what is away at most; it is all back when a step ends."""
    compiles = compiled(seen, **options)

    def each(step, engine):
        compiles(step, engine)
        deep = engine._deep
        assert deep.activations.away.nbytes == 0
        assert deep.states.away.nbytes == 0 or step % engine.gradient_accumulation_steps()
        if step == 0:
            room = deep.states.hold

            def holds(nbytes, **kwargs):
                room(nbytes, **kwargs)
                found["states"] = max(found.get("states", 0), deep.states.away.nbytes)
                found["activations"] = max(found.get("activations", 0), deep.activations.away.nbytes)
                found.setdefault("rooms", []).append((deep._in_backward, nbytes, deep.states.away.nbytes))

            deep.states.hold = holds

    return each


@ranks(2, compiles=True)
def test_states_and_activations():
    """With a limit of one byte every saved activation but the last one leaves."""
    activations = keys("offload_activation", gradient_accumulation_steps=2)
    both = {"backend": "inductor", "schedule": [(0, ["zero3_compile", "prefetch", "offload_adam_states"])]}
    for stage, config, options in ((1, keys("offload_opt_states"), {}), (3, activations, both)):
        plain = {name: value for name, value in config.items() if name != "compile"}
        expected, seen, found = run(Primes, stage, config=plain), [], {}
        with mock.patch.object(PassLimits.__init__, "__defaults__", (1,)):
            assert_same_training(run(Primes, stage, config=config, each=watched(seen, found, **options)), expected)
        assert found["states"] > 0
        first = next(place for place, (_, _, away) in enumerate(found["rooms"]) if away)
        later = found["rooms"][first:]  # the first step makes the states
        assert all(away >= min(nbytes, found["states"]) for back, nbytes, away in later if not back)
        assert found["rooms"][-1] == (True, 0, 0), "all are back at the end of backward"
        if "offload_activation" in config["compile"]:
            assert found["activations"] > 0
            assert any(captured.away for captured in graphs(seen[-1]))


@ranks(2, compiles=True)
def test_parameters_and_early_freeing():
    config = keys("offload_parameters", "free_activation")
    config["compile"]["free_activation_threshold"] = 1
    expected, seen = run(Primes, 3), []
    assert_same_training(run(Primes, 3, config=config, each=compiled(seen)), expected)
    assert all(shard.stored.device.type == "cpu" and shard.remote for shard in seen[-1]._shards.values())
    assert seen[-1].runs == 8


def test_a_saved_input_goes_with_its_last_use():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4)
    once = graph.call_function(torch.neg, (x,))
    alive = []

    def look(value):
        alive.append(reference() is not None)
        return value + 1

    graph.output(graph.call_function(look, (once,)))
    for limit, kept in ((None, True), (17, True), (16, False)):
        value = torch.ones(4)
        reference, given = weakref.ref(value), [value]
        del value
        _as_it_is(fx.GraphModule(torch.nn.Module(), graph), limit)(given)
        assert alive.pop() is kept
