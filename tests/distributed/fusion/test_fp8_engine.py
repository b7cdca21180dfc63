"""Training with products of 8-bit numbers: near training without them, and the same at every stage."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.fusion import fp8_linear as feed_forward8
from deepspeed.fusion.fp8_linear import Fp8Products
from tests.harness import ranks, shared_ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(32, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, 16)

    def forward(self, x, y):
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return nn.functional.mse_loss(self.last(x).float(), y)


def train(stage, section, steps=30):
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(
        model=Net(),
        config={
            "train_micro_batch_size_per_gpu": 16,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "fp8": section,
        },
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, y = torch.randn(16, 32, generator=generator).bfloat16(), torch.randn(16, 16, generator=generator)
    losses = []
    for _ in range(steps):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    engine.destroy()
    return losses


@ranks(2)
def test_the_curve_beside_that_of_16_bits_at_every_stage():
    exact = train(0, {"enabled": False})
    for scaling in ("tensor", "row", "block"):
        curves = {stage: train(stage, {"enabled": True, "scaling": scaling}) for stage in (0, 2, 3)}
        for stage, losses in curves.items():
            assert losses == pytest.approx(curves[0], rel=2e-2), (scaling, stage)  # bf16 sums in another order
            assert losses != exact
            assert losses == pytest.approx(exact, rel=0.1), (scaling, stage)
            assert losses[-1] < 0.7 * losses[0]
    assert train(0, {"enabled": True, "scaling": "auto"}) == curves[0], "the most exact, where nothing is measured"


@shared_ranks(1)
def test_a_device_without_such_units_is_told():
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepspeed.fusion.build.log_dist", lambda message, **_: told.append(message))
        train(0, {"enabled": True}, steps=1)
    assert any("multiplied as float32" in message for message in told) == (not torch.cuda.is_available())


@shared_ranks(1)
def test_layers_that_stay_are_chosen_by_name():
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(
        model=Net(),
        config={"train_micro_batch_size_per_gpu": 16, "fp8": {"enabled": True, "exclude": ["first", "la.t"]}},
    )
    replaced = [name for name, module in engine.module.named_modules() if "forward" in module.__dict__]
    assert replaced == ["second"]
    engine.destroy()
    assert "forward" not in engine.module.second.__dict__


@pytest.mark.parametrize("section", ["fp8", "fused_kernels"])
@shared_ranks(1)
def test_a_pattern_that_leaves_nothing_alone_is_told(section):
    told = []
    for asked in ({"exclude": ["first", "lsat"]}, {}, {"enabled": False, "exclude": ["lsat"]}):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("deepspeed.fusion.build.log_dist", lambda message, **_: told.append(message))
            config = {"train_micro_batch_size_per_gpu": 16, section: {"enabled": True, **asked}}
            engine, *_ = deepspeed.initialize(model=Net(), config=config)
        engine.destroy()
    (line,) = [message for message in told if "exclude" in message]
    assert line.startswith(f"{section}.exclude: 'lsat' matches the name of no module")
    assert line.endswith("the last module of this model is 'last'")


def train_decoder(stage, *, leaves=False, together=True):
    """(losses of a training, how often feed-forward layers and how often attention layers were computed as one)."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    torch.manual_seed(5)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, use_cache=False))
    if leaves:
        deepspeed.utils.set_z3_leaf_modules(model, [LlamaDecoderLayer])
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "fused_kernels": {"enabled": True, "inputs": together, "mlp": together},
            "fp8": {"enabled": True, "exclude": ["lm_head"]},
        },
    )
    generator, losses, counts = torch.Generator().manual_seed(dist.get_rank()), [], [0, 0]
    whole, several = feed_forward8.compute, Fp8Products.several

    def count_whole(*args):
        counts[0] += 1
        return whole(*args)

    def count_several(self, input, weights, biases):
        counts[1] += len(weights) > 1
        return several(self, input, weights, biases)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed_forward8, "compute", count_whole)
        patch.setattr(Fp8Products, "several", count_several)
        for _ in range(3 * 2):
            ids = torch.randint(0, 61, (2, 9), generator=generator)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
    engine.destroy()
    return losses, tuple(counts)


@pytest.mark.usefixtures("with_transformers")
@shared_ranks(2)
def test_layers_that_are_computed_as_one_at_every_stage():
    apart, none = train_decoder(0, together=False)
    assert none == (0, 0)
    expected, each = train_decoder(0)
    assert each == (2 * 6, 2 * 6), "layers × micro steps"
    assert expected == pytest.approx(apart, rel=2e-2)
    for stage, leaves, count in ((2, False, each), (3, False, (0, 0)), (3, True, each)):
        losses, found = train_decoder(stage, leaves=leaves)
        assert found == count, (stage, leaves)  # hooks gather each layer alone, unless blocks are gathered as one
        assert losses == pytest.approx(apart, rel=2e-2), (stage, leaves)
