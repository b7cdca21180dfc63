"""Models as they come against themselves in one piece: losses and gradients, of all families."""

from __future__ import annotations

import pytest
import torch.distributed as dist
import transformers as hf

from deepspeed.errors import UsageError
from tests.distributed.tensor_parallel.families import FAMILIES, assert_close, make, start, tokens, whole
from tests.distributed.tensor_parallel.training import momentum, train, zero
from tests.harness import ranks, shared_ranks

NAMES = list(FAMILIES)


def compare(name, **options):
    model, plain = make(name)
    labels = tokens().clone()
    labels[0, :3] = -100
    expected = plain(input_ids=tokens(), labels=labels)
    expected.loss.backward()
    engine = start(model, dist.get_world_size(), tensor_parallel=options)
    found = engine(input_ids=tokens(), labels=labels)
    engine.backward(found.loss)
    assert abs(found.loss.item() - expected.loss.item()) < 1e-5, name
    local = {path: param.grad for path, param in engine.module.named_parameters() if param.grad is not None}
    wanted = {path: param.grad for path, param in plain.named_parameters() if param.grad is not None}
    assert_close(whole(engine, local), wanted)
    engine.destroy()


def sample(world):
    """Every family; the output layer as the model's plan says, split, and whole, by turns that ranks shift."""
    for place, name in enumerate(NAMES):
        head = (None, True, False)[(place + world // 2) % 3]
        overlap = (place + world // 4) % 2 == 0
        yield name, {"vocab_parallel_lm_head": None if "bert" in name else head, "tp_overlap_comm": overlap}


@shared_ranks(2, 4, timeout=300)
def test_losses_and_gradients():
    for name, options in sample(dist.get_world_size()):
        compare(name, **options)


@ranks(4, timeout=300)
def test_what_belongs_to_heads_trains_sharded():
    """Cut by heads and sharded over replicas; the norm counts copies of a key head's norm once."""
    for name, stage in (("gpt-oss", 3), ("cohere with norms of heads", 3), ("persimmon", 1)):
        for tp in (2, 4):
            model, plain = make(name)
            train(start(model, tp, **momentum(**zero(stage), gradient_clipping=0.3)), plain, steps=2, clip=0.3)


@shared_ranks(2)
def test_half_a_pair_and_modules_for_each_head_are_refused():
    """What names of layers cannot tell is an error that names the layer and the dim, not another model."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
    deberta = hf.DebertaV2ForMaskedLM(hf.DebertaV2Config(**sizes, intermediate_size=48))
    with pytest.raises(UsageError, match=r"attention\.output\.dense would be split by its inputs \(dim 1"):
        start(deberta, 2)
    stable = hf.StableLmForCausalLM(
        hf.StableLmConfig(**sizes, intermediate_size=48, num_key_value_heads=2, qk_layernorm=True)
    )
    with pytest.raises(UsageError, match=r"layers\.0\.self_attn\.q_layernorm\.norms has a module for each of 4 heads"):
        start(stable, 2)
    few = hf.CodeGenForCausalLM(hf.CodeGenConfig(n_embd=32, n_layer=1, n_head=4, vocab_size=50, rotary_dim=4))
    with pytest.raises(UsageError, match=r"attn\.qkv_proj: 96 rows \(dim 0\) of 4 heads in 4 runs"):
        start(few, 2)
