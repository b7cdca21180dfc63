"""Sampling: beside Transformers' processors, the distribution of draws, the kernel beside the reference."""

import math

import pytest
import torch

from tests.unit.ops.model.interpreted import DEVICE, numbers

from deepspeed.ops.generate.kernels import sampling as kernels  # isort: skip
from deepspeed.ops.generate.sampling import (
    SamplingTensors,
    _truncated,
    gumbel,
    processed,
    sample,
    sample_reference,
    sample_triton,
)

TOKENS = 60


@pytest.fixture(autouse=True)
def _small_programs(monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", 128)


def tensors(rows, **keys):
    """Each row with a seed of its own; numbers stand for all rows."""
    whole = {"temperature": 1.0, "seeds": None, "offsets": 0} | keys
    kinds = {"seeds": torch.int64, "offsets": torch.int64, "top_k": torch.int64}
    made = {
        key: value.to(DEVICE)
        if isinstance(value, torch.Tensor)
        else torch.full((rows,), value, dtype=kinds.get(key, torch.float32), device=DEVICE)
        for key, value in whole.items()
        if value is not None
    }
    made.setdefault("seeds", 7919 * torch.arange(rows, device=DEVICE) - 3)
    return SamplingTensors(**made)


def state(rows, tokens=TOKENS):
    """Counts, prompt, bias and mask."""
    generator = torch.Generator().manual_seed(4)
    return {
        "counts": (
            torch.randint(0, 4, (rows, tokens), generator=generator)
            * (torch.rand(rows, tokens, generator=generator) < 0.2)
        ).int(),
        "prompt": torch.rand(rows, tokens, generator=generator) < 0.2,
        "bias": torch.randn(rows, tokens, generator=generator),
        "mask": torch.rand(rows, tokens, generator=generator) < 0.8,
    }


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.1), (20, 0.6, 0.05)]
)
def test_the_same_tokens_are_kept_as_by_transformers(top_k, top_p, min_p):
    processors = pytest.importorskip("transformers.generation.logits_process", reason="transformers is not installed")
    logits = numbers(4, TOKENS) * 3
    ids = torch.randint(TOKENS, (4, 9), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    chain = [processors.RepetitionPenaltyLogitsProcessor(1.4), processors.TemperatureLogitsWarper(0.7)]
    chain += [processors.TopKLogitsWarper(top_k)] if top_k else []
    chain += [processors.TopPLogitsWarper(top_p), processors.MinPLogitsWarper(min_p)]
    expected = logits
    for each in chain:
        expected = each(ids, expected)
    counts = torch.zeros(4, TOKENS, dtype=torch.int32, device=DEVICE).scatter_(1, ids, 1)
    given = tensors(4, temperature=0.7, repetition=1.4, counts=counts, top_k=top_k, top_p=top_p, min_p=min_p)
    scores = processed(logits, given) / given.temperature.unsqueeze(1)
    found = _truncated(scores, given.top_k, given.top_p, given.min_p)
    torch.testing.assert_close(found, expected)
    assert found.isinf().any() == (top_k > 0 or top_p < 1 or min_p > 0)


def test_penalties_are_those_of_the_formulas():
    scores, more = numbers(3, TOKENS), state(3)
    given = tensors(3, repetition=1.3, presence=0.4, frequency=0.2, **more)
    found = processed(scores, given)
    for row in range(3):
        for token in range(TOKENS):
            value, count = scores[row, token].item(), more["counts"][row, token].item()
            if count or more["prompt"][row, token]:
                value = value * 1.3 if value < 0 else value / 1.3
            value -= 0.2 * count + 0.4 * (count > 0)
            value += more["bias"][row, token].item()
            value = value if more["mask"][row, token] else -math.inf
            assert found[row, token].item() == pytest.approx(value, abs=1e-5)


def chi_square(found, probabilities):
    expected = probabilities * len(found)
    seen = torch.bincount(found, minlength=len(probabilities)).double()
    assert seen[expected == 0].sum() == 0
    return ((seen - expected).square() / expected)[expected > 0].sum().item()


@pytest.mark.parametrize("draws", ["seeds", "offsets"])
@pytest.mark.parametrize("keys", [{}, {"top_p": 0.8}])
def test_draws_have_the_distribution(draws, keys):
    """99.9 % of the values of chi-square with 19 degrees of freedom are below 43.8."""
    rows, logits = 20000, numbers(1, 20)
    varied = torch.arange(rows, device=DEVICE)
    given = tensors(
        rows, **{"seeds": torch.full_like(varied, 12345), "offsets": torch.full_like(varied, 17), draws: varied}, **keys
    )
    found = sample_reference(logits.expand(rows, -1), given)[0]
    kept = _truncated(logits, None, given.top_p[:1] if "top_p" in keys else None, None)
    assert chi_square(found.cpu(), kept[0].double().softmax(0).cpu()) < 43.8


def test_numbers_of_a_draw_are_independent():
    noise = gumbel(torch.arange(500), torch.zeros(500, dtype=torch.int64), 200)
    uniform = torch.exp(-torch.exp(-noise.double()))
    assert abs(uniform.mean().item() - 0.5) < 0.005
    assert abs(uniform.var().item() - 1 / 12) < 0.002
    for other in (uniform.roll(1, 0), uniform.roll(1, 1)):
        assert abs(torch.corrcoef(torch.stack((uniform.flatten(), other.flatten())))[0, 1].item()) < 0.015
    tail = gumbel(torch.arange(40), torch.zeros(40, dtype=torch.int64), 100_000)
    assert tail.isfinite().all()
    assert 12 < tail.max().item() < 22


@pytest.mark.parametrize("way", [sample_reference, sample_triton])
def test_a_token_depends_on_its_seed_and_offset_alone(way):
    logits = numbers(6, TOKENS)
    keys = {"temperature": torch.tensor([0.0, 1, 1, 0.5, 1, 1]), "offsets": torch.tensor([0, 1, 2, 3, 4, 2**33])}
    whole = tensors(6, **keys, top_p=0.9)
    together = way(logits, whole)[0]
    for row in range(6):
        one = SamplingTensors(
            *(
                None if x is None else x[row : row + 1]
                for x in (whole.temperature, whole.seeds, whole.offsets, None, whole.top_p)
            )
        )
        assert way(logits[row : row + 1], one)[0] == together[row]
    assert way(logits[:1].expand(12, -1), tensors(12))[0].unique().numel() > 3, "other seeds give other tokens"


@pytest.mark.parametrize("way", [sample_reference, sample_triton])
def test_greedy_takes_the_first_of_the_largest(way):
    logits = torch.zeros(2, TOKENS, device=DEVICE)
    logits[0, [7, 30]] = 1.0
    assert way(logits, tensors(2, temperature=0.0))[0].tolist() == [7, 0]


@pytest.mark.parametrize("way", [sample_reference, sample_triton])
def test_what_has_no_distribution_is_told(way):
    """NaN in the log-probability, a token that exists, and no harm to other rows."""
    logits = numbers(5, TOKENS)
    logits[0, 3], logits[1], logits[2, 7] = math.nan, -math.inf, math.inf
    mask = torch.ones(5, TOKENS, dtype=torch.bool)
    mask[3] = False
    for temperature in (0.0, 1.0):
        token, logprob, _ = way(logits, tensors(5, temperature=temperature, mask=mask, top_p=0.9))
        assert token[:4].tolist() == [0] * 4
        assert logprob.isnan().tolist() == [True] * 4 + [False]


def test_log_probabilities_are_of_the_given_logits():
    logits = numbers(3, TOKENS)
    found = sample(logits, tensors(3, temperature=0.5, top_k=3, bias=numbers(3, TOKENS)), logprobs=4)
    whole = logits.log_softmax(1)
    torch.testing.assert_close(found.logprob, whole.gather(1, found.tokens[:, None])[:, 0])
    torch.testing.assert_close(found.top_logprobs, whole.topk(4).values)
    assert torch.equal(found.top_ids, whole.topk(4).indices)
    assert sample(logits, tensors(3)).top_ids.shape == (3, 0)


KEYS = [
    {},
    {"top_k": torch.tensor([5, 50, 0, 1])},
    {"top_p": torch.tensor([0.9, 0.5, 1.0, 0.99]), "min_p": 0.01},
    {"top_k": 40, "top_p": 0.8, "repetition": 1.3, "presence": 0.5, "frequency": 0.3},
]


@pytest.mark.parametrize("at", range(len(KEYS)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_is_the_reference(at, dtype):
    logits, more = numbers(4, 300, dtype=dtype) * 3, state(4, 300) if at == 3 else {}
    given = tensors(4, temperature=torch.tensor([0.0, 1.0, 0.7, 2.0]), **KEYS[at], **more)
    for found, expected in zip(sample_triton(logits, given), sample_reference(logits, given), strict=True):
        torch.testing.assert_close(found, expected)
