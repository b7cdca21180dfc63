"""`DeepSpeedTransformerLayer` inside an engine: sharded or not, whatever is computed again."""

import torch
from torch import nn

import deepspeed
from deepspeed.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer
from tests.harness import ranks

AGAIN = {"normalize_invertible": True, "gelu_checkpoint": True, "attn_dropout_checkpoint": True}


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        config = DeepSpeedTransformerConfig(
            hidden_size=16, heads=2, num_hidden_layers=2, initializer_range=0.3, attn_dropout_ratio=0.0,
            hidden_dropout_ratio=0.0, **options,
        )  # fmt: skip
        self.layers = nn.ModuleList(DeepSpeedTransformerLayer(config) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def losses(stage, **options):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine = deepspeed.initialize(model=Model(**options), config=config)[0]
    found = []
    for step in range(3):
        loss = engine(torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(step)))
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    engine.destroy()
    return found


@ranks(2)
def test_the_same_losses_at_every_stage():
    for first in (True, False):
        expected = losses(0, pre_layer_norm=first)
        assert expected[-1] != expected[0]
        for stage, options in ((0, AGAIN), (2, {}), (3, {}), (3, AGAIN)):
            found = losses(stage, pre_layer_norm=first, **options)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
