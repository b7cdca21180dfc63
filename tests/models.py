"""Small models and the plain training loop that engines are compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Tiny(nn.Module):
    """Embedding, two linear layers, a norm, and a head that shares the embedding's weight."""

    def __init__(self, vocabulary: int = 17, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.up = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(3 * width)
        self.down = nn.Linear(3 * width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.down(torch.relu(self.norm(self.up(hidden))))
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def make(kind: Callable[..., nn.Module] = Tiny, seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    return kind(**options)


def batches(
    count: int, samples: int, length: int = 5, vocabulary: int = 17, seed: int = 1
) -> list[tuple[Tensor, Tensor]]:
    """`count` global batches of `samples` rows."""
    generator = torch.Generator().manual_seed(seed)
    shape = (samples, length)
    return [
        (
            torch.randint(vocabulary, shape, generator=generator),
            torch.randint(vocabulary, shape, generator=generator),
        )
        for _ in range(count)
    ]


def share(batch: tuple[Tensor, ...], rank: int, ranks: int) -> tuple[Tensor, ...]:
    """The rows of a batch that belong to one rank."""
    rows = batch[0].shape[0] // ranks
    return tuple(part[rank * rows : (rank + 1) * rows] for part in batch)


class PlainLoop:
    """The same training in one process, without the library: per-rank micro batches, summed in rank order.

    `param` is the dtype of the model; masters are fp32 and begin as what the cast model holds; `scale` is a fixed
    loss scale.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        *,
        ranks: int = 1,
        steps: int = 1,
        clip: float = 0.0,
        param: torch.dtype = torch.float32,
        accumulate: torch.dtype | None = None,
        scale: float = 1.0,
    ) -> None:
        self.model = copy.deepcopy(model).to(param)
        self.masters = copy.deepcopy(self.model).float()
        self.optimizer = optimizer(list(self.masters.parameters()))
        self.ranks, self.steps, self.clip, self.scale = ranks, steps, clip, scale
        self.param, self.accumulate = param, accumulate or param
        self._publish()

    def step(self, micro_batches: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
        """One optimizer step over `steps` global micro batches; (mean loss, norm before clipping)."""
        per_rank, total = [], 0.0
        for rank in range(self.ranks):
            sums: list[Tensor | None] = [None for _ in self.model.parameters()]
            for batch in micro_batches:
                loss = self.model(*share(batch, rank, self.ranks))
                total += loss.item()
                (loss / self.steps * self.scale).backward()
                for place, weight in enumerate(self.model.parameters()):
                    if weight.grad is not None:
                        grad = weight.grad.to(self.accumulate)
                        sums[place] = grad if sums[place] is None else sums[place] + grad
                        weight.grad = None
            per_rank.append(sums)
        for place, master in enumerate(self.masters.parameters()):
            grads = [sums[place] for sums in per_rank]
            if all(grad is None for grad in grads):
                master.grad = None
                continue
            # between ranks gradients travel in the model's dtype
            sent = grads if self.ranks == 1 else [None if g is None else g.to(self.param) for g in grads]
            whole = sum((g if g is not None else 0) for g in sent)
            master.grad = (whole / self.ranks).float() / self.scale
        norm = self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._publish()
        return total / self.ranks / len(micro_batches), norm.item()

    @torch.no_grad()
    def _clip(self) -> Tensor:
        """As torch.nn.utils.clip_grad_norm_; over several ranks with an exact norm, as theirs is."""
        grads = [master.grad for master in self.masters.parameters() if master.grad is not None]
        if self.ranks == 1:
            norm = torch.nn.utils.get_total_norm(grads)
        else:
            norm = torch.nn.utils.get_total_norm([grad.double() for grad in grads]).float()
        if self.clip:
            torch.nn.utils.clip_grads_with_norm_(self.masters.parameters(), self.clip, norm)
        return norm

    @torch.no_grad()
    def _publish(self) -> None:
        for weight, master in zip(self.model.parameters(), self.masters.parameters(), strict=True):
            weight.copy_(master)
