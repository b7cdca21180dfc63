"""DeepCompile of layers that ranks share: sums over ranks are operations of graphs; training is the model's."""

from __future__ import annotations

from unittest import mock

from deepspeed.parallel import regions
from tests.distributed.compile.test_deep_compile import graphs
from tests.distributed.tensor_parallel.families import make, start
from tests.distributed.tensor_parallel.training import momentum, train, zero
from tests.harness import ranks


@ranks(2, timeout=300)
def test_layers_that_ranks_share():
    calls = []
    original = regions._WAYS["summed"]
    counted = {**regions._WAYS, "summed": lambda *args: calls.append(args[0].shape) or original(*args)}
    with mock.patch.object(regions, "_WAYS", counted):
        _train_all(calls)


def _train_all(calls):
    for stage, options in ((1, {}), (3, {"vocab_parallel_lm_head": True})):
        model, plain = make("llama")
        compiled = {"deepcompile": True, "passes": ["autotp"]}
        engine = start(model, 2, tensor_parallel=options, compile=compiled, **momentum(**zero(stage)))
        engine.compile(backend="eager")
        calls.clear()
        train(engine, plain, steps=2)
        assert len(graphs(engine._deep)) == 3, "masks are made in Python, between two of them; nothing else is"
        if not options:
            layers = len(model.model.layers)
            each = 4 * layers + 1  # an attention, a feed-forward, in forward and backward; the head in backward
            assert len(calls) == 2 * each, len(calls)
        engine.destroy()
