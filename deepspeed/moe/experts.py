"""`Experts`: the experts that one rank holds, copies of one module, computed as one where their code allows it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.moe.side_by_side import lay_side_by_side
from deepspeed.moe.structure import read
from deepspeed.ops.grouped import Groups

__all__ = ["Experts"]


class Experts(nn.Module):
    """Copies of an expert; each parameter says by `allreduce` and `group_name` that it is one of an expert."""

    def __init__(self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None) -> None:
        super().__init__()
        self.deepspeed_experts = nn.ModuleList(_copy_of(expert) for _ in range(num_local_experts))
        self.num_local_experts = num_local_experts
        self.group_name = expert_group_name
        self._structure = read(self.deepspeed_experts[0])
        # Stage 3 gathers the experts of a rank together: they are used together, whichever tokens come.
        self._z3_leaf = True
        self._gather_memory()
        for param in self.deepspeed_experts.parameters():
            param.allreduce = False  # type: ignore[attr-defined]  # what is published, and what scripts look at
            param.group_name = expert_group_name  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor, groups: Groups | None = None) -> Tensor:
        """[groups, local experts, capacity, M] → the same: every expert computes its slice of the second dim.

        With `groups` the input is [rows, M], and each expert computes its group of rows.
        """
        if groups is not None:
            return self._of_rows(inputs, groups)
        by_expert = inputs.transpose(0, 1)  # [local experts, groups, capacity, M]
        equal = Groups(self.num_local_experts, length=by_expert[0, ..., 0].numel())
        out = self._of_rows(by_expert.reshape(-1, inputs.shape[-1]), equal)
        return out.view(*by_expert.shape[:-1], out.shape[-1]).transpose(0, 1)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Experts:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # moves and casts parameters one by one
        self._gather_memory()
        return self

    def _gather_memory(self) -> None:
        """Lay the parameters of all experts side by side, so that a grouped product needs no copy."""
        if self._structure is not None:
            lay_side_by_side([self._structure.parameters(expert) for expert in self.deepspeed_experts])

    @property
    def as_one(self) -> bool:
        """True if the experts need not be told apart by the host; see [Note: experts as one]."""
        return self._structure is not None

    def _of_rows(self, rows: Tensor, groups: Groups) -> Tensor:
        """[rows, M]: each expert computes its group."""
        if self._structure is not None:
            found = self._structure.run(list(self.deepspeed_experts), rows, groups)
            if found is not None:
                return found
            self._structure = None  # somebody changed them: from now on one by one
        parts = rows.split(groups.sizes())
        return torch.cat([_first(expert(part)) for expert, part in zip(self.deepspeed_experts, parts, strict=True)])


def _copy_of(expert: nn.Module) -> nn.Module:
    """A copy with the marks of its parameters, such as that of split ones, which torch does not copy."""
    made = copy.deepcopy(expert)
    for param, given in zip(made.parameters(), expert.parameters(), strict=True):
        for name, mark in vars(given).items():
            setattr(param, name, mark)
    return made


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """An expert may return a bias beside its output, which is not used."""
    return output[0] if isinstance(output, tuple) else output
