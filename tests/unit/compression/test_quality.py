"""What compressed models are still worth: accuracy and perplexity next to those of the models that they come from."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deepspeed.compression.compress import init_compression, redundancy_clean
from deepspeed.compression.scheduler import compression_scheduler
from tests.unit.compression.test_layers import config, technique

INT8 = technique(["*"], {"start_bits": 8, "target_bits": 8}, quantize_groups=4, store_integers=True)


class Classifier(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


class Gpt(nn.Module):
    """One causal block over 16 tokens."""

    def __init__(self, width=32):
        super().__init__()
        self.tokens, self.places = nn.Embedding(16, width), nn.Embedding(24, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.head = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Linear(width, 16)

    def forward(self, tokens):
        hidden = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + self.out(mixed)
        return self.head(hidden + self.down(torch.relu(self.up(hidden))))


def points(count, generator):
    """Four clouds, which overlap a little."""
    labels = torch.randint(4, (count,), generator=generator)
    centers = torch.randn(4, 16, generator=torch.Generator().manual_seed(9)) * 1.5
    return centers[labels] + torch.randn(count, 16, generator=generator), labels


def text(count, generator):
    """Walks in which each token allows three next ones."""
    rows = [torch.randint(16, (count,), generator=generator)]
    for _ in range(24):
        rows.append((rows[-1] * 5 + torch.randint(3, (count,), generator=generator)) % 16)
    tokens = torch.stack(rows, 1)
    return tokens[:, :-1], tokens[:, 1:]


def train(model, data, steps, schedule=None):
    generator, optimizer = torch.Generator().manual_seed(2), torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        inputs, labels = data(32, generator)
        F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    return model


@torch.no_grad()
def worth(model, data):
    """(accuracy, perplexity) on samples that were not seen."""
    inputs, labels = data(500, torch.Generator().manual_seed(3))
    logits = model.eval()(inputs).flatten(0, -2)
    right = (logits.argmax(-1) == labels.flatten()).float().mean().item()
    return right, F.cross_entropy(logits, labels.flatten()).exp().item()


def compressed(model, settings, data, steps):
    small = init_compression(copy.deepcopy(model).train(), settings)
    schedule = compression_scheduler(small, settings["compression_training"])
    return redundancy_clean(train(small, data, steps, schedule), settings)


def bytes_of(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return len(file.getvalue())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "data", "rows", "after"), [(Classifier, points, "0", "2"), (Gpt, text, "up", "down")])
def test_int8_and_half_of_the_rows_keep_what_a_model_learned(kind, data, rows, after):
    torch.manual_seed(0)
    model = train(kind(), data, 120)
    accuracy, perplexity = worth(model, data)
    assert (accuracy > 0.9) if kind is Classifier else (perplexity < 3.5)
    pruned = technique([rows], {"dense_ratio": 0.5}, [[after]])
    for settings, steps in ((config(weight_quantization=INT8), 0), (config(row_pruning=pruned), 80)):
        small = compressed(model, settings, data, steps)
        found = worth(small, data)
        assert found[1] < perplexity * 1.01
        if kind is Classifier:  # which of three tokens comes next is chance
            assert found[0] > accuracy - 0.01
        assert bytes_of(small) < bytes_of(model)
    assert small.get_submodule(rows).out_features * 2 == model.get_submodule(rows).out_features


@pytest.mark.slow
def test_zeroquant_in_int8_is_as_good_as_float32():
    torch.manual_seed(0)
    model = train(Gpt(), text, 120)
    _, perplexity = worth(model, text)
    tokens = technique(["qkv", "out", "up", "down", "head"], {"bits": 8}, range_calibration="dynamic")
    small = compressed(model, config(weight_quantization=INT8, activation_quantization=tokens), text, 0)
    assert worth(small, text)[1] == pytest.approx(perplexity, rel=3e-3)
    assert worth(small, text)[1] != perplexity
    assert sum(value.nbytes for name, value in small.state_dict().items() if "codes" in name) * 4 == sum(
        module.weight.nbytes for module in model.modules() if isinstance(module, (nn.Linear, nn.Embedding))
    )
