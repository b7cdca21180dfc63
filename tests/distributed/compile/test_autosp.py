"""AutoSP: the exchanges of ranks that share sequences are operations of graphs; training is that of eager attention."""

from __future__ import annotations

import copy

import pytest
import torch

from deepspeed.compile.passes.sp_compile import prepare_autosp_inputs
from deepspeed.errors import UsageError
from tests.distributed.compile.test_deep_compile import graphs
from tests.distributed.tensor_parallel.families import assert_close, make, parameters, start, tokens
from tests.distributed.tensor_parallel.training import momentum, zero
from tests.harness import ranks

EXCHANGE = "deepspeed_sequence.exchange.default"


def batches(packed):
    """A plain one, and one of padding at the front and of two documents in a row; labels lie unevenly."""
    ids = tokens(2, 8)
    labels, positions = ids.clone(), torch.arange(8).expand_as(ids)
    labels[0, :5] = -100
    yield ids, labels, positions, None
    if packed:
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        positions = torch.stack([torch.arange(8), torch.cat([torch.arange(3), torch.arange(5)])])
        yield ids, torch.where(mask == 1, ids, -100), positions, mask


def trained(engine, packed):
    losses = []
    for batch in batches(packed):
        ids, labels, positions, mask = prepare_autosp_inputs(*batch)
        loss = engine(input_ids=ids, labels=labels, position_ids=positions, attention_mask=mask).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    values = {name: value.clone() for name, value in parameters(engine).items()}
    engine.destroy()
    return losses, values


@ranks(2, compiles=True)
@pytest.mark.parametrize(
    ("family", "stage", "backend", "packed"),
    [("uneven", 3, "eager", True), ("llama", 1, "inductor", False)],
    ids=["eager", "inductor"],
)
def test_shared_sequences(family, stage, backend, packed):
    model, _ = make(family)
    options = {"sequence_parallel_size": 2, **momentum(**zero(stage))}
    eager = start(copy.deepcopy(model), 1, sequence_parallel={"attention": "ulysses"}, **options)
    expected, wanted = trained(eager, packed)
    engine = start(model, 1, compile={"deepcompile": True, "passes": ["autosp"]}, **options)
    torch._dynamo.reset()
    seen = []

    def see(graph):
        seen.extend(graph.backward for node in graph.module.graph.nodes if str(node.target) == EXCHANGE)

    engine.compile(backend=backend, schedule=[(0, [f"zero{stage}_compile", see])])
    deep = engine._deep
    found, values = trained(engine, packed)
    assert found == pytest.approx(expected, abs=1e-5)
    assert_close(values, wanted, 2e-5)
    assert seen.count(False) == seen.count(True) >= 4, "two in each of two layers, and two for their gradients"
    assert deep.runs >= 2 * len(graphs(deep)) > 0, "forward and backward run as graphs"


@ranks(2, compiles=True)
def test_stage_0():
    """Nothing is gathered there, so plain torch.compile is used."""
    model, _ = make("llama")
    options = {"sequence_parallel_size": 2, **momentum(**zero(0))}
    eager = start(copy.deepcopy(model), 1, sequence_parallel={"attention": "ulysses"}, **options)
    expected, wanted = trained(eager, packed=False)
    engine = start(model, 1, compile={"deepcompile": True, "passes": ["autosp"]}, **options)
    torch._dynamo.reset()
    engine.compile(backend="eager")
    found, values = trained(engine, packed=False)
    assert found == pytest.approx(expected, abs=1e-5)
    assert_close(values, wanted, 2e-5)


def test_batches_that_cannot_be_shared():
    ids = torch.zeros(2, 8, dtype=torch.long)
    assert prepare_autosp_inputs(ids, ids)[2:] == (None, None)
    with pytest.raises(UsageError, match=r"got label_id \(2, 7\) with input_id of shape \(2, 8\)"):
        prepare_autosp_inputs(ids, ids[:, 1:])
    with pytest.raises(UsageError, match="seq_dim 0"):
        prepare_autosp_inputs(ids, ids, seq_dim=0)
