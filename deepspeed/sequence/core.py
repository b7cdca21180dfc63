"""Attention of one rank over whole sequences, by the functions of Transformers, with masks made of `Whole`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.errors import UsageError
from deepspeed.sequence.whole import Run, Whole, allowed

__all__ = ["Core", "is_causal"]

AttentionFunction = Callable[..., tuple[Tensor, Any]]


class _Shared:
    """A module whose key/value heads are shared by another number of query heads than it says."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module = module
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Core:
    """One of Transformers' attention functions, called with whole sequences: [batch, heads, length, width]."""

    def __init__(self, name: str, function: AttentionFunction) -> None:
        self.name = name
        self.function = function

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        whole: Whole,
        *,
        crossing: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        """([batch, length, heads, width], what the function returns besides).

        `whole` are the sequences of keys; queries that are `crossing` belong to others.
        """
        shared = _Shared(module, query.shape[1] // key.shape[1])
        tensors = (query, key, value)
        if "flash" in self.name:
            return self._flash(shared, tensors, whole, options)
        window = options.get("sliding_window")
        causal = is_causal(module, options)
        if window is not None and (not causal or window >= whole.length):
            window = None
        apart = not crossing and options.get("position_bias") is None
        runs = whole.runs if apart and window is None and query.shape[2] == key.shape[2] else None
        if runs is not None:
            return self._in_runs(shared, tensors, runs, options)
        mask = None
        if not whole.plain or window is not None or (causal and 1 < query.shape[2] < key.shape[2]):
            keys = torch.arange(key.shape[2], device=key.device)
            queries = torch.arange(query.shape[2], device=key.device) if crossing else keys[-query.shape[2] :]
            mask = allowed(whole, queries, keys, causal=causal, window=window)
        return self.function(shared, *tensors, mask, **options)

    def _flash(
        self, module: _Shared, tensors: tuple[Tensor, ...], whole: Whole, options: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        """Flash attention takes padding as it is and finds documents by positions, in a single row only."""
        if whole.documents is None:
            return self.function(module, *tensors, whole.present, **options)
        if tensors[0].shape[0] > 1 or whole.present is not None:
            raise UsageError(
                f"packed sequences with {self.name} need a batch of one row without padding; found "
                f"{tensors[0].shape[0]} rows. Use the attention sdpa, or micro batches of 1."
            )
        at = torch.arange(whole.length, device=whole.documents.device)
        begins = torch.nn.functional.pad(whole.documents[0, 1:] != whole.documents[0, :-1], (1, 0), value=True)
        positions = at - torch.where(begins, at, 0).cummax(0).values
        return self.function(module, *tensors, None, position_ids=positions[None], **options)

    def _in_runs(
        self, module: _Shared, tensors: tuple[Tensor, ...], rows: list[list[Run]], options: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        """Documents one by one: work and memory are those of the documents, not of the square of all tokens."""
        done = []
        for row, runs in enumerate(rows):
            parts = [[t[row : row + 1, :, run.begin : run.end] for t in tensors] for run in runs]
            found = [
                _nothing(*part) if run.padding else self.function(module, *part, None, **options)[0]
                for run, part in zip(runs, parts, strict=True)
            ]
            done.append(torch.cat(found, 1))
        return torch.cat(done), None


def _nothing(query: Tensor, _key: Tensor, value: Tensor) -> Tensor:
    """What attention gives that sees nothing, as a mask over everything would: zeros, with a gradient of zeros.

    The last token of padding on the left has a label: the first token of the row.
    """
    batch, heads, length = query.shape[:3]
    return query.new_zeros(batch, length, heads, value.shape[-1]) + 0 * query[:1, :1, :1, :1]


def is_causal(module: nn.Module, options: dict[str, Any]) -> bool:
    """Whether tokens see only what lies before them, as Transformers decides it."""
    told = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if told is None else told)
