"""The next token of each sequence, drawn on the device: op `sample`.

[Note: draws] A draw is a function of (seed, offset, token): an integer hash gives each token a uniform number, that a
Gumbel number, and the token with the largest sum of this and its logit is the one. So a sequence gets the same token in
any batch, and a rejected draft can be drawn again. Logits are changed in the order of Transformers' processors:
penalties, bias, mask, temperature, top-k, top-p, min-p. Tokens with equal logits are kept or dropped together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed.ops.model.linear import takes
from deepspeed.ops.registry import by_triton, op, reference

__all__ = ["SampleResult", "SamplingTensors", "sample"]


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """What each row of the logits is sampled with: tensors of [rows], or None where no row uses it."""

    temperature: Tensor
    """float32; 0 takes the largest logit, the one of the lowest id among equals."""
    seeds: Tensor
    """int64"""
    offsets: Tensor
    """int64: which draw of the seed this is; the position of the token, for instance."""
    top_k: Tensor | None = None
    """int64 or int32; 0 keeps all."""
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    repetition: Tensor | None = None
    """float32, by which the logits of tokens in the prompt or the output are divided, or multiplied if negative."""
    presence: Tensor | None = None
    """float32, subtracted from the logits of tokens in the output."""
    frequency: Tensor | None = None
    """float32, subtracted for each time that a token is in the output."""
    counts: Tensor | None = None
    """int32 [rows, tokens]: how often each token is in the output; needed for penalties."""
    prompt: Tensor | None = None
    """bool [rows, tokens]: what the prompt has; needed for the repetition penalty."""
    bias: Tensor | None = None
    """float32 [rows, tokens], added to logits."""
    mask: Tensor | None = None
    """bool [rows, tokens]: what may be chosen."""


class SampleResult(NamedTuple):
    """Chosen tokens, with log-probabilities of the model's own distribution: of the logits as they were given."""

    tokens: Tensor
    """int64 [rows]; 0 where the logits have NaN or nothing may be chosen, which `logprob` tells by NaN."""
    logprob: Tensor
    """float32 [rows]"""
    top_logprobs: Tensor
    """float32 [rows, logprobs], the largest first."""
    top_ids: Tensor
    """int64 [rows, logprobs]"""


def sample(logits: Tensor, tensors: SamplingTensors, *, logprobs: int = 0) -> SampleResult:
    """Choose a token for each row of logits [rows, tokens], without a wait of the host; see [Note: draws]."""
    tokens, logprob, total = op("sample")(logits, tensors)
    top, ids = (
        logits.float().topk(logprobs) if logprobs else (logits.new_empty(len(logits), 0, dtype=torch.float32),) * 2
    )
    return SampleResult(tokens, logprob, top - total.unsqueeze(1), ids.long())


@reference("sample")
@torch.no_grad()
def sample_reference(logits: Tensor, tensors: SamplingTensors) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, their log-probabilities, logarithms of the sums of exponents), in plain torch."""
    raw = logits.float()
    scores = processed(raw, tensors)
    drawn = tensors.temperature > 0
    tokens = scores.argmax(1)
    if bool(drawn.any()):
        heated = scores[drawn] / tensors.temperature[drawn].unsqueeze(1)
        kept = _truncated(
            heated, *(None if x is None else x[drawn] for x in (tensors.top_k, tensors.top_p, tensors.min_p))
        )
        noise = gumbel(tensors.seeds[drawn], tensors.offsets[drawn], logits.shape[1])
        tokens[drawn] = (kept + noise).argmax(1)
    total = raw.logsumexp(1)
    failed = ~(total.isfinite() & scores.amax(1).isfinite())
    tokens = torch.where(failed, 0, tokens)
    logprob = raw.gather(1, tokens.unsqueeze(1))[:, 0] - total
    return tokens, torch.where(failed, float("nan"), logprob), total


def processed(scores: Tensor, tensors: SamplingTensors) -> Tensor:
    """float32 logits [rows, tokens] with penalties, bias and mask."""
    if tensors.repetition is not None:
        assert tensors.counts is not None, "a repetition penalty needs the counts of tokens"
        known = tensors.counts > 0 if tensors.prompt is None else (tensors.counts > 0) | tensors.prompt
        penalty = tensors.repetition.unsqueeze(1)
        scores = torch.where(known, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
    if tensors.frequency is not None:
        assert tensors.counts is not None, "a frequency penalty needs the counts of tokens"
        scores = scores - tensors.frequency.unsqueeze(1) * tensors.counts
    if tensors.presence is not None:
        assert tensors.counts is not None, "a presence penalty needs the counts of tokens"
        scores = scores - tensors.presence.unsqueeze(1) * (tensors.counts > 0)
    if tensors.bias is not None:
        scores = scores + tensors.bias
    if tensors.mask is not None:
        scores = scores.masked_fill(~tensors.mask, float("-inf"))
    return scores


def _truncated(scores: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Tensor:
    """Scores with -inf for what top-k, then top-p, then min-p drop."""
    tokens = scores.shape[1]
    least = scores.new_full((len(scores), 1), float("-inf"))
    bounded = top_k is not None and bool(((top_k > 0) & (top_k < tokens)).all())
    uses_p = top_p is not None and bool((top_p < 1).any())
    if uses_p or (top_k is not None and bool((top_k > 0).any())):
        assert not bounded or top_k is not None, "bounded by it"
        ordered = scores.topk(int(top_k.max()) if bounded and top_k is not None else tokens).values
        if top_k is not None:
            last = torch.where(top_k > 0, top_k, tokens).clamp(max=tokens).long().unsqueeze(1) - 1
            least = ordered.gather(1, last)
        if uses_p and top_p is not None:
            whole = scores if bounded else ordered
            weights = (ordered - ordered[:, :1]).exp().masked_fill(ordered < least, 0.0)
            mass = (whole - ordered[:, :1]).exp().masked_fill(whole < least, 0.0).sum(1, keepdim=True)
            before = weights.cumsum(1) - weights
            count = (before < top_p.unsqueeze(1) * mass).sum(1, keepdim=True).clamp(min=1)
            by_mass = ordered.gather(1, count - 1)
            least = torch.maximum(least, torch.where(top_p.unsqueeze(1) < 1, by_mass, least))
    if min_p is not None:
        least = torch.maximum(least, scores.amax(1, keepdim=True) + min_p.log().unsqueeze(1))
    return scores.masked_fill(scores < least, float("-inf"))


_LOW = 0xFFFFFFFF


def _mixed(bits: Tensor) -> Tensor:
    """A bijection of 32-bit numbers, in int64, in which every bit depends on every other."""
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B & _LOW
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35 & _LOW
    return bits ^ (bits >> 16)


def gumbel(seeds: Tensor, offsets: Tensor, tokens: int) -> Tensor:
    """float32 [rows, tokens]; see [Note: draws]."""
    low, high, offset = seeds & _LOW, (seeds >> 32) & _LOW, offsets & _LOW
    first = _mixed((_mixed((_mixed(low ^ 0x9E3779B9) + high) & _LOW) + offset) & _LOW).unsqueeze(1)
    second = _mixed(first ^ 0x7F4A7C15)
    token = torch.arange(tokens, device=seeds.device) * 0x9E3779B1 & _LOW
    bits = _mixed(_mixed((token + first) & _LOW) ^ second)
    small = bits < 1 << 24  # float32 has all digits of these, and of the high 24 bits of others
    at = torch.where(small, bits.float() + 0.5, (bits >> 8).float() * 256 + 128) * 2.0**-32
    series = at * (1 + at * (0.5 + at * (1 / 3 + at * 0.25)))
    return -torch.where(at < 2.0**-6, series, -(1 - at).log()).log()


@by_triton("sample")
@torch.no_grad()
def sample_triton(logits: Tensor, tensors: SamplingTensors) -> tuple[Tensor, Tensor, Tensor]:
    """By the kernel where it can."""
    if not takes(logits) or logits.stride(-1) != 1 or not logits.numel():
        return sample_reference(logits, tensors)
    from deepspeed.ops.generate.kernels.sampling import draw

    return draw(logits, tensors)
