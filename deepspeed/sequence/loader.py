"""`UlyssesSPDataLoaderAdapter`: a loader that gives every rank other samples, read so that ranks share sequences."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.sequence.labels import shifted
from deepspeed.sequence.order import TokenOrder

__all__ = ["UlyssesSPDataLoaderAdapter"]


class UlyssesSPDataLoaderAdapter:
    """Gathers one batch from each sequence-parallel rank, then gives all of them this rank's part of each in turn.

    Every tensor [batch, length, …] is cut. `labels` become `shift_labels`, moved by one over the whole sequence;
    `position_ids` are added where there are none. The end comes when any rank's loader ends.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: ProcessGroup, sp_world_size: int, device: Any) -> None:
        self.dl = dl
        self.sp_rank = sp_rank
        self.sp_group = sp_group
        self.sp_world_size = sp_world_size
        self.device = device
        self.iter: Iterator[Any] = iter(())
        self.micro_batches: deque[dict[str, Any]] = deque()

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __getattr__(self, name: str) -> Any:
        if name == "dl":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.dl, name)

    def __iter__(self) -> UlyssesSPDataLoaderAdapter:
        self.iter = iter(self.dl)
        self.micro_batches.clear()
        return self

    def __next__(self) -> dict[str, Any]:
        if not self.micro_batches:
            self.refill()
        return self.micro_batches.popleft()

    def refill(self) -> None:
        """Take the next batch of every rank."""
        batch = next(self.iter, None)
        if batch is not None:
            batch = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in batch.items()}
        batches: list[Any] = [None] * self.sp_world_size
        comm.all_gather_object(batches, batch, group=self.sp_group)
        if any(each is None for each in batches):
            raise StopIteration
        self.micro_batches.extend(map(self._part, batches))

    def _part(self, batch: dict[str, Any]) -> dict[str, Any]:
        ids = batch.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            found = "none" if ids is None else tuple(getattr(ids, "shape", ()))
            raise UsageError(f"a batch needs input_ids of shape [batch, length]; found {found}, keys {sorted(batch)}.")
        rows, length = ids.shape
        order = TokenOrder(self.sp_world_size, 1)
        order.check(length)
        whole = dict(batch)
        if whole.get("position_ids") is None:
            whole["position_ids"] = torch.arange(length).expand(rows, length)
        if "labels" in whole:
            labels = whole.pop("labels")
            if not isinstance(labels, Tensor) or labels.shape[:2] != ids.shape:
                raise UsageError(
                    f"a batch has input_ids of shape {tuple(ids.shape)} and labels of shape "
                    f"{tuple(getattr(labels, 'shape', ()))}; sequences that ranks share need a label for each token."
                )
            whole.setdefault("shift_labels", shifted(labels))
        mine = order.of_rank(length, self.sp_rank)
        return {key: self._cut(value, length, mine) for key, value in whole.items()}

    def _cut(self, value: Any, length: int, mine: Tensor) -> Any:
        if not isinstance(value, Tensor):
            return value
        fits = value.dim() >= 2 and value.shape[1] == length
        return (value[:, mine[0] : mine[-1] + 1].contiguous() if fits else value).to(self.device)
