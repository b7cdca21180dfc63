"""Losses over vocabularies and sequences that ranks share, against torch's over all of it.

What reductions and gradients mean is as DeepSpeed 0.19.8 was seen to do it with the same calls over two gloo ranks.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from deepspeed.errors import UsageError
from deepspeed.sequence.cross_entropy import (
    VocabParallelCrossEntropyLoss,
    vocab_parallel_cross_entropy,
    vocab_sequence_parallel_cross_entropy,
)
from tests.harness import shared_ranks

LENGTH, ROWS, WIDTH = 6, 2, 8


def given():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(LENGTH, ROWS, WIDTH, generator=generator, requires_grad=True)
    target = torch.randint(WIDTH, (LENGTH, ROWS), generator=generator)
    target[1, 0] = -100
    return logits, target


def expected(reduction="mean"):
    logits, target = given()
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction=reduction)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    return (loss.detach().view(LENGTH, ROWS) if reduction == "none" else loss.detach()), grad


def columns():
    """This rank's part of the vocabulary, and where it is."""
    start = dist.get_rank() * WIDTH // 2
    return slice(start, start + WIDTH // 2)


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


@shared_ranks(2)
def test_a_split_vocabulary():
    world, mine = dist.group.WORLD, columns()
    for reduction in ("mean", "sum", "none"):
        logits, target = given()
        part = logits.detach()[..., mine].clone().requires_grad_()
        wanted, wanted_grad = expected(reduction)
        options = ({}, {"vocab_start_index": mine.start, "vocab_end_index": mine.stop})
        for option in options:
            found = vocab_parallel_cross_entropy(part, target, world, reduction=reduction, **option)
            close(found.detach(), wanted)
            close(torch.autograd.grad(found.sum(), part)[0], wanted_grad[..., mine])
    close(VocabParallelCrossEntropyLoss(world)(part, target).detach(), expected()[0])
    # the last token of the vocabulary is padding, and this rank may have nothing else
    close(
        vocab_parallel_cross_entropy(
            part, target.clamp(max=4), world, vocab_start_index=mine.start, vocab_end_index=mine.stop,
            global_vocab_size=5,
        ).detach(),
        F.cross_entropy(logits.detach()[..., :5].flatten(0, 1), target.clamp(max=4).flatten()),
    )  # fmt: skip
    with pytest.raises(UsageError, match="a target is 8, out of range for a vocabulary of 8 tokens"):
        vocab_parallel_cross_entropy(part, torch.full_like(target, 8), world)


@shared_ranks(2)
def test_a_split_sequence():
    world, half = dist.group.WORLD, LENGTH // 2
    rows = slice(dist.get_rank() * half, dist.get_rank() * half + half)
    logits, target = given()
    part, labels = logits.detach()[rows].clone().requires_grad_(), target[rows]
    for reduction in ("mean", "sum"):
        wanted, wanted_grad = expected(reduction)
        found = vocab_sequence_parallel_cross_entropy(
            part, labels, world, reduction=reduction, gather_sequence_loss=False
        )
        close(found.detach(), wanted)
        close(torch.autograd.grad(found, part)[0], wanted_grad[rows])
    wanted, wanted_grad = expected("none")
    found = vocab_sequence_parallel_cross_entropy(part, labels, world)
    close(found.detach(), wanted)
    close(torch.autograd.grad(found.sum(), part)[0], wanted_grad[rows])
    found = vocab_parallel_cross_entropy(part, labels, sp_group=world, reduction="none", gather_sequence_loss=True)
    close(torch.autograd.grad(found.sum(), part)[0], 2 * wanted_grad[rows])  # both ranks' sums reach every loss


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reduction": "x"}, "reduction is 'x'"),
        ({"gather_sequence_loss": True}, "gather_sequence_loss needs reduction 'none'"),
        ({"backend": "liger"}, "backend is 'liger'"),
        ({"global_vocab_size": 4}, "needs explicit vocab_start_index"),
        ({"vocab_start_index": 0}, "give both of them or none"),
        ({"vocab_start_index": 0, "vocab_end_index": 3}, "have 8 columns"),
    ],
)
def test_what_does_not_fit_is_told(options, words):
    logits, target = given()
    with pytest.raises(UsageError, match=words):
        vocab_parallel_cross_entropy(logits, target, **options)


def test_one_rank_alone():
    logits, target = given()
    close(vocab_parallel_cross_entropy(logits, target).detach(), expected()[0])
