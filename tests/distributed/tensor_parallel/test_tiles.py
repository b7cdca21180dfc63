"""Tiles of MLPs, norms, logits and loss in models whose layers ranks share, against the model in one piece."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from deepspeed.sequence.tiling import TiledFusedLogitsLoss, TiledMLP, sequence_tiled_compute
from tests.distributed.tensor_parallel.families import VOCABULARY, make, start, tokens
from tests.distributed.tensor_parallel.test_wire_and_memory import (
    ACTIVATION,
    BATCH,
    HIDDEN,
    LAYERS,
    LENGTH,
    sent,
    split_embeddings,
)
from tests.distributed.tensor_parallel.training import momentum, train, zero
from tests.harness import ranks, shared_ranks

TILES = {"tiled_compute": 3, "tiled_loss": 5}
CASES = [
    # family, stage, accumulation, options of tensor_parallel, of sequence_parallel, its ranks
    ("llama", 0, 1, {"vocab_parallel_lm_head": True}, TILES, 1),
    ("qwen3", 3, 2, {"vocab_parallel_lm_head": True}, TILES, 1),
    ("uneven", 1, 1, {"vocab_parallel_lm_head": True, "tp_overlap_comm": True}, TILES, 1),
    ("gpt2", 3, 1, {"vocab_parallel_lm_head": False}, TILES, 1),
    ("llama", 3, 1, {"sequence_parallel": True, "vocab_parallel_lm_head": True}, TILES, 1),
    ("one key", 1, 2, {"sequence_parallel": True}, {"tiled_compute": 1}, 1),  # with biases
    ("qwen3", 0, 1, {"sequence_parallel": True}, {**TILES, "attention": "ulysses"}, 2),
    ("llama", 3, 1, {"vocab_parallel_lm_head": True}, {**TILES, "attention": "ulysses"}, 2),
    ("mistral", 0, 1, {}, TILES, 1),  # the plan of Transformers gathers the logits, of a tile then
]


@ranks(4, timeout=400)
def test_training_is_that_of_the_whole_model():
    for name, stage, accumulation, parallel, tiles, sequence in CASES:
        model, plain = make(name)
        sections = momentum(gradient_accumulation_steps=accumulation, gradient_clipping=0.5, **zero(stage))
        sections |= {"sequence_parallel": tiles, "sequence_parallel_size": sequence}
        engine = start(model, 2, tensor_parallel=parallel, **sections)
        train(engine, plain, accumulation, steps=2, clip=0.5)
        engine.destroy()


@shared_ranks(2)
def test_bytes_and_logits_of_a_tile():
    """Tiles cost no bytes in MLPs, and the three numbers per token of the loss once more, in backward."""
    model, plain = make("llama")
    embeddings = split_embeddings(plain, 2, vocab_parallel_lm_head=True)
    engine = start(model, 2, tensor_parallel={"vocab_parallel_lm_head": True}, sequence_parallel=TILES)
    seen = []
    model.lm_head.register_forward_hook(lambda module, given, out: seen.append(tuple(out.shape)))
    batch = tokens(BATCH, LENGTH)
    engine(input_ids=batch, labels=batch)
    seen.clear()
    out, forward = sent(partial(engine, input_ids=batch, labels=batch))
    _, backward = sent(partial(engine.backward, out.loss))
    entropy = 3 * BATCH * LENGTH * 4
    assert forward["all_reduce"][1] == (2 * LAYERS + embeddings) * ACTIVATION + entropy
    assert backward["all_reduce"][1] == (2 * LAYERS + 1) * ACTIVATION + entropy
    assert {shape[1:] for shape in seen if shape[-1] != HIDDEN} == {(LENGTH // 2, VOCABULARY // 2)}
    engine.eval()
    whole = engine(input_ids=batch, labels=batch)
    assert whole.logits.shape[-1] == VOCABULARY
    assert whole.loss.item() == pytest.approx(out.loss.item(), abs=1e-5)
    engine.destroy()


@shared_ranks(2)
def test_tiles_of_sequences_that_stay_split():
    """A tile is gathered by itself: as many bytes forward, once more the MLP's gather backward, few tokens at once."""
    batch, counted, losses = tokens(BATCH, LENGTH), {}, []
    inside, outside = [], []

    def enters(module, given):
        inside.append(given[0].shape[1])

    def normed(module, given, out):
        outside.append(out.shape[1])

    for tiles in ({}, {"tiled_compute": 4}):
        model, plain = make("llama")
        parallel = {"sequence_parallel": True, "vocab_parallel_lm_head": False}
        engine = start(model, 2, tensor_parallel=parallel, sequence_parallel=tiles)
        for layer in model.model.layers:
            layer.mlp.act_fn.register_forward_pre_hook(enters)
            layer.input_layernorm.register_forward_hook(normed)
        engine(input_ids=batch, labels=batch)  # the first forward compares inputs, too
        inside.clear()
        out, forward = sent(partial(engine, input_ids=batch, labels=batch))
        _, backward = sent(partial(engine.backward, out.loss))
        assert set(inside) == ({4} if tiles else {LENGTH}), "tokens in an MLP at a time"
        assert set(outside) == {LENGTH // 2}
        outside.clear()
        counted[bool(tiles)] = forward, backward
        losses.append(out.loss.item())
        engine.eval()
        whole = engine(input_ids=batch, labels=batch).loss.item()
        assert whole == pytest.approx(plain(input_ids=batch, labels=batch).loss.item(), abs=1e-5)
        outside.clear()
        engine.destroy()
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    for at in (0, 1):
        before, after = counted[False][at], counted[True][at]
        assert {op: size for op, (_, size) in after.items() if "gather" not in op} == {
            op: size for op, (_, size) in before.items() if "gather" not in op
        }
    gathers = [{at: found[at]["all_gather_into_tensor"] for at in (0, 1)} for found in counted.values()]
    calls, size = gathers[0][0]
    assert gathers[1][0][1] == size
    once = size // calls  # of as many tokens each
    assert gathers[1][1][1] - gathers[0][1][1] == LAYERS * once


@shared_ranks(2)
def test_pieces_by_hand():
    """The published pieces around split layers: output, and gradients of inputs and weights, are those without."""
    model, plain = make("llama")
    engine = start(model, 2)
    generator = torch.Generator().manual_seed(2)
    hidden, labels = torch.randn(2, 7, 32, generator=generator), torch.randint(50, (2, 7), generator=generator)

    def mlp(module, x):
        return module.model.layers[0].mlp(x)

    def loss(module, x, y):
        return torch.nn.functional.cross_entropy(module.lm_head(x).flatten(0, -2), y.flatten(), reduction="sum")

    def of_tiles(module, x):
        x = TiledMLP.apply(mlp, module, x, 3)
        inner = {"self": module.model.layers[1].mlp}
        x = sequence_tiled_compute(lambda self, x: self(x), 7, 2, {"x": x}, inner, "x", output_reduction=None)
        return TiledFusedLogitsLoss.apply(loss, module, x, labels, None, 4, None, "sum")

    results = []
    for module, act in ((engine.module, of_tiles), (plain, None)):
        given = hidden.clone().requires_grad_()
        if act is None:
            total = loss(module, module.model.layers[1].mlp(mlp(module, given)), labels)
        else:
            total = act(module, given)
        total.backward()
        rows = 48 // 2 * dist.get_rank() if act is None else 0
        weight = module.model.layers[0].mlp.up_proj.weight.grad[rows : rows + 24]
        results.append((total.detach(), given.grad, weight))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    engine.destroy()


@ranks(2, timeout=300)
def test_tiles_in_blocks_that_are_computed_again():
    """Checkpoints of blocks around checkpoints of tiles, each of which gathers: all ranks gather in the same order."""
    parallel, tiles = {"sequence_parallel": True}, {"tiled_compute": 2, "tiled_loss": 3}
    for reentrant, stage in ((True, 3), (False, 0), (False, 3)):
        model, plain = make("llama")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        engine = start(model, 2, tensor_parallel=parallel, sequence_parallel=tiles, **momentum(**zero(stage)))
        train(engine, plain, steps=2)
        engine.destroy()
