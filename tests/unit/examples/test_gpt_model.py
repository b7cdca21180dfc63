"""The example's model: its first loss, causality, shared weights, and that it learns."""

from __future__ import annotations

import math

import pytest
import torch

from examples.gpt.model import GPT, Shape

TINY = Shape(vocabulary=17, context=8, layers=2, heads=2, width=16)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(TINY)


def test_knows_nothing_at_first(model):
    tokens = torch.randint(17, (4, 9))
    assert model(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(math.log(17), abs=0.1)


def test_a_token_does_not_change_what_came_before_it(model):
    tokens = torch.randint(17, (1, 8))
    other = tokens.clone()
    other[0, 5] = (other[0, 5] + 1) % 17
    before, after = model(tokens)[0], model(other)[0]
    torch.testing.assert_close(before[:5], after[:5])
    assert (before[5:] - after[5:]).abs().amax(dim=1).min() > 1e-4


def test_the_loss_is_the_mean_over_all_tokens(model):
    tokens = torch.randint(17, (3, 9))
    chances = model(tokens[:, :-1]).log_softmax(-1)
    picked = chances.gather(2, tokens[:, 1:, None])
    torch.testing.assert_close(model(tokens[:, :-1], tokens[:, 1:]), -picked.mean())


def test_the_head_is_the_embedding(model):
    names = [name for name, weight in model.named_parameters() if weight.shape[0] == 17]
    assert names == ["tokens.weight"]
    width = TINY.width
    blocks = TINY.layers * (12 * width**2 + 4 * width)
    expected = blocks + TINY.vocabulary * width + 2 * width
    assert sum(weight.numel() for weight in model.parameters()) == expected


def test_learns_a_pattern_and_continues_it(model):
    text = torch.arange(36).remainder(5)
    pieces = torch.stack([text[start : start + 9] for start in range(10)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = model(pieces[:, :-1], pieces[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    # longer than the context, so that the oldest tokens drop out
    made = model.continued(text[:3], 12, temperature=1.0, top=1, generator=torch.Generator())
    assert made.tolist() == text[:15].tolist()


def test_a_sample_depends_on_its_seed_alone(model):
    def drawn(seed):
        generator = torch.Generator().manual_seed(seed)
        return model.continued(torch.tensor([1]), 20, temperature=1.0, top=40, generator=generator).tolist()

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
