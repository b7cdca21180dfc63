"""`GatheredParameters`: whole parameters for a while, with edits by one rank or none."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import nn

from deepspeed import comm
from deepspeed.errors import LostEditError, UsageError
from deepspeed.utils.logging import warn_once
from deepspeed.zero import fetch
from deepspeed.zero.external import register_external_parameter
from deepspeed.zero.param import Shard, shards_of

__all__ = ["GatheredParameters"]


class GatheredParameters:
    """A context in which some parameters are whole on every rank; all ranks enter it together.

    With `modifier_rank`, what that rank (of the parameters' group) wrote is given to all on exit. Without, edits are
    dropped, which is told. Ordinary parameters may be among them and are left alone.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self.enabled = enabled
        self.src_rank = modifier_rank
        given = [params] if isinstance(params, torch.Tensor) else list(params) if enabled else []
        self.params = [param for param in given if isinstance(param, nn.Parameter)]
        self.fwd_module = fwd_module
        self._shards: list[Shard] = []
        self._versions: list[tuple[int, int]] = []

    def __enter__(self) -> None:
        if not self.enabled:
            return
        self._shards = [shard for shard in shards_of(self.params) if shard.numel]
        missing = [shard for shard in self._shards if not shard.whole]
        fetch.gather(missing)
        for shard in self._shards:
            shard.holds += 1
            shard.users.add(id(self))
        self._versions = [(shard.param._version, shard.param.data_ptr()) for shard in self._shards]
        if self.fwd_module is not None:
            for shard in self._shards:
                register_external_parameter(self.fwd_module, shard.param)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.enabled:
            return
        for shard in self._shards:
            shard.holds -= 1
            shard.users.discard(id(self))
        if error is None:
            if self.src_rank is None:
                self._refuse_edits()
            else:
                self._spread(self.src_rank)
        fetch.release(self._shards)

    @torch.no_grad()
    def _spread(self, modifier: int) -> None:
        """Give what the modifier wrote to all ranks, and cut it again."""
        for shard in self._shards:
            if not 0 <= modifier < shard.axis.size:
                raise UsageError(
                    f"GatheredParameters: modifier_rank is {modifier}, but {shard.name} lies on {shard.axis.size} ranks"
                )
            if shard.param.device != shard.full.device:
                raise UsageError(
                    f"GatheredParameters: {shard.name} was moved to {shard.param.device}; change its values in place, "
                    f"on {shard.full.device}"
                )
            values = shard.param.detach()
            if values.shape != shard.shape:
                raise UsageError(
                    f"GatheredParameters: {shard.name} came back with the shape {tuple(values.shape)} instead of "
                    f"{tuple(shard.shape)}; replace the module's parameter to change its shape"
                )
            if values.data_ptr() != shard.full.data_ptr():
                shard.full.copy_(values)
                shard.param.data = shard.full
            if shard.axis.size > 1:
                with comm.labelled(shard.name):
                    comm.broadcast(shard.flat, src=shard.axis.ranks[modifier], group=shard.axis.group)
            shard.store()
            shard.version = shard.param._version

    def _refuse_edits(self) -> None:
        changed = [
            shard.name
            for shard, known in zip(self._shards, self._versions, strict=True)
            if (shard.param._version, shard.param.data_ptr()) != known
        ]
        if not changed:
            return
        message = (
            f"GatheredParameters: {changed[:3]} were changed without modifier_rank, so the change is lost when the "
            "context ends. Pass modifier_rank=0 to keep what rank 0 wrote."
        )
        strict = any(shard.strict for shard in self._shards)
        if strict:
            raise LostEditError(message)
        warn_once(message)
        for shard in self._shards:
            if shard.persistent and shard.name in changed:
                fetch.gather([shard])  # it stays whole, so that the edit would stay too, on this rank only
