"""DeepCompile of layers that ranks share: sums over ranks are operations of graphs; training is the model's."""

from __future__ import annotations

from tests.distributed.compile.test_deep_compile import graphs
from tests.distributed.tensor_parallel.families import make, start
from tests.distributed.tensor_parallel.training import momentum, train, zero
from tests.harness import ranks


@ranks(2, timeout=600)
def test_layers_that_ranks_share():
    options = {"vocab_parallel_lm_head": True, "vocab_parallel_embedding": True}
    compiled = {"deepcompile": True, "passes": ["autotp"]}
    model, plain = make("llama")
    engine = start(model, 2, tensor_parallel=options, compile=compiled, **momentum(**zero(3)))
    engine.compile(backend="eager")
    train(engine, plain, steps=2)
    assert engine._deep.runs >= 2 * len(graphs(engine._deep)), "forward and backward run as graphs"
