"""Sampling parameters of a step's sequences as tensors, and the tokens that come of its logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy
import torch
from torch import Tensor

from deepspeed.generate.sequence import Sequence as Sampled
from deepspeed.ops.generate.sampling import SampleResult, SamplingTensors, sample

_MIX = 0x9E3779B97F4A7C15
_PARTS = 64
"""Of a row, each reduced by itself."""


def seed_of(base: int, index: int) -> int:
    """The seed of one of the sequences of a request, in 63 bits."""
    return (base ^ (index * _MIX)) & 0x7FFFFFFFFFFFFFFF


class Sampler:
    """Draws next tokens; what a sequence has said so far is on the device where penalties need it."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._vocabulary, self._device = vocabulary, device
        self._counts: dict[int, Tensor] = {}  # by uid: how often each token was generated
        self._prompts: dict[int, Tensor] = {}
        self._biases: dict[int, Tensor] = {}

    def forget(self, uid: int) -> None:
        """Drop what is kept of a sequence."""
        for held in (self._counts, self._prompts, self._biases):
            held.pop(uid, None)

    def draw(
        self,
        logits: Tensor,
        rows: Sequence[tuple[Sampled, int, int]],
        masks: Mapping[int, Tensor] | None = None,
    ) -> SampleResult:
        """A token for each row: (sequence, its seed, position of the token)."""
        asked = [each[0].params.logprobs for each in rows]
        most = max((count for count in asked if count is not None), default=0)
        chosen = logits[: len(rows)]
        result = sample(chosen, self.tensors(rows, masks), logprobs=most)
        for at, (sequence, _, _) in enumerate(rows):
            if sequence.uid in self._counts:
                token = result.tokens[at : at + 1]
                self._counts[sequence.uid].index_add_(0, token, torch.ones_like(token, dtype=torch.int32))
        return result

    def tensors(self, rows: Sequence[tuple[Sampled, int, int]], masks: Mapping[int, Tensor] | None) -> SamplingTensors:
        """What the rows are sampled with."""
        params = [each[0].params for each in rows]
        numbers = numpy.array(
            [
                (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
                for p in params
            ],
            numpy.float32,
        ).T.copy()
        whole = numpy.array([(each[1], each[2], each[0].params.top_k) for each in rows], numpy.int64).T.copy()
        floats, ints = self._sent(numbers), self._sent(whole)
        used = (numbers != numpy.array([[0], [1], [0], [1], [0], [0]], numpy.float32)).any(1)
        penalties = bool(used[3:].any())
        counts = prompt = None
        if penalties:
            self._remember([each[0] for each in rows])
            counts = self._stacked(self._counts, rows, torch.int32)
            prompt = self._stacked(self._prompts, rows, torch.bool) if used[3] else None
        bias = None
        if any(p.logit_bias for p in params):
            for sequence, _, _ in rows:
                if sequence.params.logit_bias and sequence.uid not in self._biases:
                    self._biases[sequence.uid] = self._bias(sequence.params.logit_bias)
            bias = self._stacked(self._biases, rows, torch.float32)
        mask = self._mask(rows, masks or {})
        return SamplingTensors(
            temperature=floats[0],
            seeds=ints[0],
            offsets=ints[1],
            top_k=ints[2] if whole[2].any() else None,
            top_p=floats[1] if used[1] else None,
            min_p=floats[2] if used[2] else None,
            repetition=floats[3] if used[3] else None,
            presence=floats[4] if used[4] else None,
            frequency=floats[5] if used[5] else None,
            counts=counts,
            prompt=prompt,
            bias=bias,
            mask=mask,
        )

    def _mask(self, rows: Sequence[tuple[Sampled, int, int]], masks: Mapping[int, Tensor]) -> Tensor | None:
        """What may be chosen: by a schema, and no end before the fewest tokens."""
        short = [at for at, (sequence, _, position) in enumerate(rows) if _too_short(sequence, position)]
        if not masks and not short:
            return None
        mask = torch.ones(len(rows), self._vocabulary, dtype=torch.bool)
        for at, (sequence, _, _) in enumerate(rows):
            if sequence.uid in masks:
                mask[at] = masks[sequence.uid]
        for at in short:
            mask[at, [token for token in rows[at][0].end_ids if token < self._vocabulary]] = False
        return mask.to(self._device)

    def _sent(self, values: numpy.ndarray) -> Tensor:
        host = torch.from_numpy(values)
        return host if self._device.type == "cpu" else host.pin_memory().to(self._device, non_blocking=True)

    def _remember(self, sequences: Sequence[Sampled]) -> None:
        """Keep on the device what sequences with penalties have said, from their first draw on."""
        for sequence in sequences:
            if sequence.params.penalised and sequence.uid not in self._counts:
                self._counts[sequence.uid] = self._counted(sequence.generated).int()
                self._prompts[sequence.uid] = self._counted(sequence.tokens[: sequence.prompt_length]) > 0

    def _counted(self, tokens: Sequence[int]) -> Tensor:
        ids = torch.tensor(tokens, dtype=torch.int64)
        return torch.bincount(ids, minlength=self._vocabulary).to(self._device)

    def _bias(self, biases: Mapping[int, float]) -> Tensor:
        values = torch.zeros(self._vocabulary)
        for token, bias in biases.items():
            values[token] = bias
        return values.to(self._device)

    def _stacked(
        self, held: Mapping[int, Tensor], rows: Sequence[tuple[Sampled, int, int]], dtype: torch.dtype
    ) -> Tensor:
        found = torch.zeros(len(rows), self._vocabulary, dtype=dtype, device=self._device)
        for at, (sequence, _, _) in enumerate(rows):
            if sequence.uid in held:
                found[at] = held[sequence.uid]
        return found


def greedy(logits: Tensor) -> SampleResult:
    """The largest of each row; its log-probability, which nobody asked for, is 0, or NaN where the row has NaN."""
    parts = _PARTS if logits.is_cuda and logits.shape[1] % _PARTS == 0 else 1  # a row alone keeps one processor busy
    tops, places = logits.unflatten(1, (parts, -1)).max(-1)
    largest, part = tops.max(-1, keepdim=True)
    tokens = part * (logits.shape[1] // parts) + places.gather(1, part)
    none = logits.new_empty(len(logits), 0)
    return SampleResult(tokens[:, 0], (largest[:, 0] * 0).float(), none, none.long())


def plainly_greedy(sequence: Sampled) -> bool:
    """Whether the largest logit is the next token, and nothing else is asked for."""
    params = sequence.params
    plain = params.logprobs is None and params.schema is None and not params.logit_bias and not params.min_tokens
    return params.greedy and plain and not params.penalised


def _too_short(sequence: Sampled, position: int) -> bool:
    """Whether the token at a position may not end the sequence yet."""
    return bool(sequence.end_ids) and position - sequence.prompt_length < sequence.params.min_tokens
