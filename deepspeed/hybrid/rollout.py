"""Rollouts: prompts become sequences with the log-probabilities of their tokens, for reinforcement learning.

The names are those of DeepSpeed's `runtime.rollout`; the log-probabilities, and how far they are from the trainer's,
are ours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.events import RolloutCompared
from deepspeed.hybrid.engine import DeepSpeedHybridEngine
from deepspeed.log import log_dist

__all__ = [
    "HybridEngineRollout",
    "HybridEngineRolloutConfig",
    "RolloutBatch",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutRequest",
    "SamplingConfig",
    "build_rollout",
]


@dataclass
class RolloutConfig:
    """Which engine makes rollouts."""

    engine: str = "hybrid_engine"
    use_graph_capture: bool = False


@dataclass
class HybridEngineRolloutConfig:
    """Settings of DeepSpeed's loop. The schedule of pages does all of it always, but for graphs, which
    `hybrid_engine.enable_cuda_graph` asks for."""

    use_graph_capture: bool = False
    enable_profiling: bool = False
    use_shared_prefill: bool = False
    align_decode_fronts: bool = False
    enable_cache_trimming: bool = False
    continuous_cache_capacity: int | None = None


@dataclass
class RolloutRequest:
    """Prompts [batch, length] and their mask; padding is on the left."""

    prompt_ids: Tensor
    prompt_attention_mask: Tensor


@dataclass
class SamplingConfig:
    """How responses are drawn; `top_k` -1 is off."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    n_samples_per_prompt: int = 1
    continuous_batch_size: int | None = None


@dataclass
class RolloutBatch:
    """Sequences of prompt and response [batch, length], those of one prompt side by side."""

    input_ids: Tensor
    attention_mask: Tensor
    response_start_idx: Tensor
    """[batch]: where each response begins."""
    logprobs: Tensor | None = None
    """[batch, length]: of each token of a response as it was drawn, by the model's logits; 0 elsewhere."""

    @property
    def batch_size(self) -> int:
        """Sequences."""
        return self.input_ids.shape[0]

    @property
    def seq_len(self) -> int:
        """Tokens of a row, padding included."""
        return self.input_ids.shape[1]

    @property
    def response_mask(self) -> Tensor:
        """[batch, length]: True for the tokens of responses."""
        places = torch.arange(self.seq_len, device=self.input_ids.device)
        return (places >= self.response_start_idx[:, None]) & self.attention_mask.bool()


class RolloutEngine(ABC):
    """Makes rollouts of requests."""

    @abstractmethod
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Draw responses."""

    @abstractmethod
    def sync_weights(self, step: int) -> None:
        """Take over the weights of a training step."""

    def shutdown(self) -> None:
        """Free what the engine holds."""
        return


class HybridEngineRollout(RolloutEngine):
    """Rollouts of the weights that train; all ranks call it together."""

    def __init__(self, engine: DeepSpeedHybridEngine, tokenizer: Any = None, cfg: Any = None) -> None:
        if not isinstance(engine, DeepSpeedHybridEngine):
            raise UsageError(
                f"rollouts need a DeepSpeedHybridEngine, found {type(engine).__name__}. Set hybrid_engine.enabled to "
                "true in the config of deepspeed.initialize."
            )
        self._engine, self._pad = engine, getattr(tokenizer, "pad_token_id", None) or 0
        graphs = engine._config.schema.hybrid_engine.enable_cuda_graph
        if getattr(cfg, "use_graph_capture", False) and not graphs:
            log_dist("use_graph_capture: no effect: set hybrid_engine.enable_cuda_graph in the engine's config")

    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Draw responses; rows are padded on the right to the longest."""
        drawn = sampling.temperature > 0
        done = self._engine.complete(
            input_ids=request.prompt_ids,
            attention_mask=request.prompt_attention_mask,
            max_new_tokens=sampling.max_new_tokens,
            num_return_sequences=sampling.n_samples_per_prompt,
            do_sample=drawn,
            **({"temperature": sampling.temperature, "top_p": sampling.top_p} if drawn else {}),
            top_k=max(sampling.top_k, 0),
        )
        device, start = request.prompt_ids.device, request.prompt_ids.shape[1]
        length = start + max(len(one.token_ids) for one in done)
        batch = RolloutBatch(
            torch.full((len(done), length), self._pad, device=device),
            torch.zeros(len(done), length, dtype=torch.int64, device=device),
            torch.full((len(done),), start, device=device),
            torch.zeros(len(done), length, device=device),
        )
        count = sampling.n_samples_per_prompt
        batch.input_ids[:, :start] = request.prompt_ids.repeat_interleave(count, 0)
        batch.attention_mask[:, :start] = request.prompt_attention_mask.repeat_interleave(count, 0)
        assert batch.logprobs is not None, "made above"
        for row, one in enumerate(done):
            end = start + len(one.token_ids)
            batch.input_ids[row, start:end] = torch.tensor(one.token_ids, device=device)
            batch.attention_mask[row, start:end] = 1
            batch.logprobs[row, start:end] = torch.tensor(one.logprobs, device=device)
        return batch

    @torch.no_grad()
    def compare(self, batch: RolloutBatch, trainer_logprobs: Tensor | None = None) -> RolloutCompared:
        """How far the log-probabilities of a rollout are from the trainer's, which is an event for monitors.

        Those of the trainer are computed by a forward in eval mode, or given: [batch, length] as in the rollout.
        """
        if batch.logprobs is None:
            raise UsageError("this RolloutBatch has no log-probabilities; HybridEngineRollout.generate gives them")
        if trainer_logprobs is None:
            trainer_logprobs = self._scores(batch)
        gap = (batch.logprobs - trainer_logprobs)[batch.response_mask].abs().double()
        sums = torch.stack([gap.sum(), gap.new_tensor(gap.numel())])
        largest = gap.max() if gap.numel() else gap.new_zeros(())
        comm.all_reduce(sums)
        comm.all_reduce(largest, op=comm.ReduceOp.MAX)
        tokens = int(sums[1])
        found = RolloutCompared(self._engine.global_samples, tokens, float(sums[0]) / max(tokens, 1), float(largest))
        self._engine.events.emit(found)
        return found

    def _scores(self, batch: RolloutBatch) -> Tensor:
        """[batch, length]: the trainer's log-probability of each token, given those before it."""
        training = self._engine.training
        self._engine.eval()
        try:
            positions = (batch.attention_mask.cumsum(1) - 1).clamp(min=0)
            given = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "position_ids": positions}
            logits = self._engine(**given, use_cache=False).logits[:, :-1]
        finally:
            self._engine.train(training)
        own = logits.float().log_softmax(-1).gather(2, batch.input_ids[:, 1:, None])[..., 0]
        return torch.nn.functional.pad(own, (1, 0))

    def sync_weights(self, step: int) -> None:
        """There is one set of weights: nothing to do."""

    def shutdown(self) -> None:
        """Free keys and values."""
        self._engine.free_inference_cache()


def build_rollout(
    rollout_cfg: Any, student_engine: Any = None, tokenizer: Any = None, **kwargs: Any
) -> HybridEngineRollout:
    """The rollout engine of a config, an object or a mapping with the key `engine`."""
    given = rollout_cfg if isinstance(rollout_cfg, dict) else vars(rollout_cfg)
    kind = given.get("engine", "hybrid_engine")
    if kind != "hybrid_engine":
        raise UsageError(f"rollout engine is {kind!r}; 'hybrid_engine' is the only one")
    return HybridEngineRollout(student_engine, tokenizer, kwargs.get("cfg", rollout_cfg))
