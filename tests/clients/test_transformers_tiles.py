"""Tiles and chained checkpoints by the config alone, in models of Transformers as they come."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError, UsageError
from tests.clients.sequences import VOCABULARY, Case, batches, build, family, plain_training, training
from tests.clients.test_peft_sequence import adapted
from tests.closeness import assert_same_training
from tests.harness import ranks

TILES = {"tiled_compute": 3, "tiled_loss": 5}
CHAINS = {"activation_checkpointing": {"cpu_checkpointing": True, "layers_per_checkpoint": 2}}
TWO = [
    Case("llama", 0, "ulysses", tiles=TILES, checkpoints=True, config=CHAINS),
    Case("llama", 3, None, sp=1, tiles=TILES, checkpoints=True, config=CHAINS, clip=0.3),
    Case("qwen3", 3, "ring", data="half", tiles={"tiled_loss": 3}),
    Case("gpt2", 1, None, sp=1, tiles=TILES, data="padded", accumulation=2),  # a head that is the embedding, too
    Case("mistral", 3, None, sp=1, tiles={"tiled_compute": 1}, data="packed"),
]


@ranks(2, timeout=400)
def test_training_is_that_without_tiles():
    for case in TWO:
        try:
            assert_same_training(training(case), plain_training(case))
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def alone(model, **tiles):
    return build(Case("llama", 0, None, sp=1, tiles=tiles), model=model)


@ranks(1)
def test_logits_exist_for_a_tile():
    engine = alone(family("llama"), tiled_compute=4, tiled_loss=4)
    seen, head = [], engine.module.lm_head
    head.register_forward_hook(lambda module, given, out: seen.append(tuple(out.shape)))
    (batch, *_) = batches(Case("llama", 0, None))
    out = engine(**batch)
    assert out.logits is None
    assert max(shape[1] for shape in seen if shape[-1] == VOCABULARY) == 4
    engine.backward(out.loss)
    engine.eval()
    assert engine(**batch).logits.shape[-1] == VOCABULARY
    engine.train()
    assert engine(input_ids=batch["input_ids"]).logits.shape[-1] == VOCABULARY
    # by position, with a number of items that the client counted, and as a tuple
    wanted = family("llama")(**batch, num_items_in_batch=7).loss
    found = engine(batch["input_ids"], labels=batch["labels"], num_items_in_batch=torch.tensor(7), return_dict=False)
    assert found[0].item() == pytest.approx(wanted.item(), abs=1e-5)
    assert found[1] is None
    engine.destroy()
    assert "forward" not in vars(head)
    assert engine.module(**batch).logits is not None


@ranks(1)
def test_adapters_with_tiles():
    (batch, *_) = batches(Case("llama", 0, None))
    expected = adapted()
    expected(**batch).loss.backward()
    engine = alone(adapted(), **TILES)
    engine.backward(engine(**batch).loss)
    wanted = dict(expected.named_parameters())
    trained = [(name, param) for name, param in engine.module.named_parameters() if param.requires_grad]
    assert trained
    for name, param in trained:
        torch.testing.assert_close(deepspeed.utils.safe_get_full_grad(param), wanted[name].grad, atol=1e-6, rtol=1e-5)
    engine.destroy()


@ranks(1)
def test_what_cannot_be_tiled_is_told():
    with pytest.raises(DeepSpeedConfigError, match=r"tiled_compute is given, but Linear is no model"):
        alone(nn.Linear(2, 2), tiled_compute=2)
    with pytest.raises(DeepSpeedConfigError, match=r"tiled_compute is given, but BloomForCausalLM has no MLP"):
        alone(family("bloom", attn_implementation="eager"), tiled_compute=2)
    with pytest.raises(DeepSpeedConfigError, match=r"tiled_loss is given, but BertForMaskedLM is no causal model"):
        alone(family("bert"), tiled_loss=2)
    with pytest.raises(DeepSpeedConfigError, match=r"tiled_loss is given, but T5ForConditionalGeneration is no causal"):
        alone(family("t5"), tiled_loss=2)
    (batch, *_) = batches(Case("llama", 0, None))
    capped = family("gemma2", final_logit_softcapping=30.0, attn_implementation="eager")
    engine = alone(capped, tiled_loss=2)
    with pytest.raises(UsageError, match="Gemma2ForCausalLM changes its logits"):
        engine(**batch)
    engine.destroy()
    config = {"train_batch_size": 1, "activation_checkpointing": {"layers_per_checkpoint": 2}}
    with pytest.raises(DeepSpeedConfigError, match="but Linear has no layers of Transformers"):
        deepspeed.initialize(model=nn.Linear(2, 2), config=config)
