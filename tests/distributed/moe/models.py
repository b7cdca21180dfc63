"""A small model with layers of experts, and the same model whole on one rank: what parity tests compare."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from deepspeed.moe.layer import MoE
from deepspeed.parallel import ParallelLayout

WIDTH, EXPERTS, TOKENS = 8, 4, 12


class Normed(nn.Module):
    """An expert that cannot run as one with others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, rows):
        return self.norm(self.inner(rows))


class Model(nn.Module):
    """Dense, experts, dense, experts, dense; the loss has both auxiliary losses."""

    def __init__(self, first: int = 1, second: int = 1, *, expert: nn.Module | None = None, **options) -> None:
        """`first` and `second`: over how many ranks the experts of each layer are spread."""
        super().__init__()
        options = {"use_rts": False, "top2_2nd_expert_sampling": False, "min_capacity": 1, **options}
        made = expert or nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.inward = nn.Linear(WIDTH, WIDTH)
        self.first = MoE(WIDTH, made, EXPERTS, ep_size=first, **options)
        self.between = nn.Linear(WIDTH, WIDTH)
        self.second = MoE(WIDTH, made, EXPERTS, ep_size=second, **options)
        self.outward = nn.Linear(WIDTH, 3)

    def forward(self, tokens):
        hidden = torch.tanh(self.inward(tokens))
        hidden, one, _ = self.first(hidden)
        hidden = torch.tanh(self.between(hidden))
        hidden, two, _ = self.second(hidden)
        return self.outward(hidden).square().mean() + 0.1 * (one + two)


def scrambled(model: nn.Module, seed: int = 0) -> nn.Module:
    """Parameters of their own for every expert, which were copies of one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 3)
    return model


def counterparts(model: nn.Module, whole: nn.Module, layout: ParallelLayout, *, data_first: bool) -> Iterator[tuple]:
    """(name, this rank's parameter, that of the whole model): an expert has its number in the whole model."""
    found = dict(whole.named_parameters())
    for name, param in model.named_parameters():
        layer = name.split(".")[0]
        if "deepspeed_experts" in name:
            moe = getattr(model, layer)
            rank = layout.experts(moe.ep_size, data_first=data_first)["ep"].rank
            before, _, rest = name.partition("deepspeed_experts.")
            number, _, rest = rest.partition(".")
            name = f"{before}deepspeed_experts.{rank * moe.num_local_experts + int(number)}.{rest}"
        yield name, param, found[name]


def adopt(model: nn.Module, whole: nn.Module, *, data_first: bool = False) -> None:
    """Give a model that is spread over ranks the values of the whole one."""
    with ParallelLayout.build() as layout, torch.no_grad():
        for _, mine, theirs in counterparts(model, whole, layout, data_first=data_first):
            mine.copy_(theirs)


def batches(step: int, micro: int, *, tokens: int = TOKENS, uneven: bool = False) -> list[torch.Tensor]:
    """One batch for each rank."""
    generator = torch.Generator().manual_seed(100 * step + micro)
    return [
        torch.randn(tokens + (rank if uneven else 0), WIDTH, generator=generator)
        for rank in range(dist.get_world_size())
    ]


class StackedExperts(nn.Module):
    """Experts in stacked parameters, as Transformers keeps them, without its flags."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.num_experts = experts
        self.down_proj = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) / 3)

    def forward(self, tokens, chosen, weights):
        out = torch.zeros_like(tokens)
        for number in range(self.num_experts):
            rows, choice = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, tokens[rows] @ self.down_proj[number] * weights[rows, choice, None])
        return out


class StackedModel(nn.Module):
    """A router of its own, and stacked experts."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, experts), StackedExperts(experts)

    def forward(self, tokens):
        weights, chosen = self.gate(tokens).softmax(-1).topk(2)
        return self.experts(tokens, chosen, weights).square().mean()
