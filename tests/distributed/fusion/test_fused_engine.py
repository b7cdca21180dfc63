"""Training with fused kernels beside training without, at every stage."""

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.fusion.head import LazyLogits
from tests.closeness import Training, assert_same_training
from tests.harness import shared_ranks
from tests.user_models import whole

pytestmark = pytest.mark.usefixtures("with_transformers")
CASES = [
    *((stage, checkpoints, tied, "llama") for stage, checkpoints, tied in (
        (0, False, False), (1, True, False), (2, False, True), (3, False, False), (3, True, True),
    )),
    (3, False, False, "gpt2"), (3, True, True, "gpt2"),
]  # fmt: skip


EPSILON = {"llama": 1e-5, "gpt2": 1e-2}  # weights of GPT-2 begin so small that Adam makes much of rounding


def llama(tied):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied)
    return LlamaForCausalLM(config)


def gpt2(tied):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 16}
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**shape, **none, tie_word_embeddings=tied, use_cache=False))


def train(stage, checkpoints, tied, family, section):
    model = {"llama": llama, "gpt2": gpt2}[family](tied)
    if checkpoints:
        model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.5,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": EPSILON[family]}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "fused_kernels": section,
        },
    )
    before, losses, norms = whole(engine), [], []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(3):
        ids = torch.randint(0, 61, (2, 9), generator=generator)
        labels = ids.clone()
        labels[0, : 3 + dist.get_rank()] = -100
        out = engine(input_ids=ids, labels=labels)
        assert isinstance(out.logits, LazyLogits) == section["enabled"]
        engine.backward(out.loss)
        engine.step()
        total = out.loss.detach().double()
        dist.all_reduce(total)
        losses.append(total.item())
        norms.append(engine.get_global_grad_norm())
        if step == 1:  # whoever looks gets them, with their gradients
            assert out.logits.argmax(-1).shape == ids.shape
    after = whole(engine)
    engine.eval()
    with torch.no_grad():
        assert type(engine(input_ids=ids, labels=labels).logits) is torch.Tensor
    engine.destroy()
    assert all("forward" not in module.__dict__ for module in model.modules()), "what was put in place is taken back"
    assert type(model.lm_head) is torch.nn.Linear
    return Training(before, after, losses, norms)


@shared_ranks(2)
@pytest.mark.parametrize(("stage", "checkpoints", "tied", "family"), CASES)
def test_the_same_training(stage, checkpoints, tied, family):
    fused = train(stage, checkpoints, tied, family, {"enabled": True})
    assert_same_training(fused, train(stage, checkpoints, tied, family, {"enabled": False}))
