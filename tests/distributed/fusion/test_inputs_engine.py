"""Training with gradients that products sum beside training without, where parameters come and go."""

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.fusion import shared_input
from deepspeed.utils import set_z3_leaf_modules
from tests.closeness import Training, assert_same_training
from tests.harness import ranks
from tests.user_models import whole

pytestmark = pytest.mark.usefixtures("with_transformers")

EACH = 2 * 2 * 3 * 2
"""Layers × (attention and feed-forward) × steps × micro steps."""


def qwen():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(5)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
    return Qwen2ForCausalLM(Qwen2Config(**shape, num_attention_heads=4, num_key_value_heads=2, use_cache=False))


def train(stage, leaves, fp8, on):
    """The training, and how often layers were computed together in it."""
    model = qwen()
    if leaves:
        from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

        set_z3_leaf_modules(model, [Qwen2DecoderLayer])
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "fused_kernels": {"enabled": True, "inputs": on},
            "fp8": {"enabled": fp8, "scaling": "row", "exclude": [".*mlp", "lm_head"]},
        },
    )
    before, losses, norms, times, real = whole(engine), [], [], [], shared_input.linears
    generator = torch.Generator().manual_seed(dist.get_rank())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_input, "linears", lambda *args: (times.append(1), real(*args))[1])
        for _ in range(3 * 2):
            ids = torch.randint(0, 61, (2, 9), generator=generator)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            total = loss.detach().double()
            dist.all_reduce(total)
            losses.append(total.item())
            norms.append(engine.get_global_grad_norm())
    after = whole(engine)
    engine.destroy()
    assert all("forward" not in module.__dict__ for module in model.modules()), "what was put in place is taken back"
    return Training(before, after, losses, [norm for norm in norms if norm is not None]), len(times)


@ranks(2)
@pytest.mark.parametrize(
    ("stage", "leaves", "times"),
    [
        (0, False, EACH),
        (1, False, EACH),
        (3, False, 0),  # hooks gather each layer alone
        (3, True, EACH),
    ],
)
def test_the_same_training(stage, leaves, times):
    with_it, found = train(stage, leaves, fp8=False, on=True)
    without, none = train(stage, leaves, fp8=False, on=False)
    assert (found, none) == (times, 0)
    assert_same_training(with_it, without)


@ranks(2)
def test_gradients_of_8_bits_are_as_near_for_layers_in_one():
    """Rounded once for all layers that read an input, they have other scales than rounded for each."""
    exact, _ = train(1, leaves=False, fp8=False, on=False)
    together, times = train(1, leaves=False, fp8=True, on=True)
    each, none = train(1, leaves=False, fp8=True, on=False)
    assert (times, none) == (EACH // 2, 0), "attention multiplies 8-bit numbers"

    def distance(found: Training) -> float:
        return sum((found.after[name] - value).norm() ** 2 for name, value in exact.after.items()).item() ** 0.5

    assert 0 < distance(together) < 1.25 * distance(each)
    assert together.losses == pytest.approx(each.losses, rel=3e-3)
