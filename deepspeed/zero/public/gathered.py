"""`GatheredParameters`: whole parameters for a while, with edits by one rank or none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.errors import LostEditError, UsageError
from deepspeed.log import warn_once
from deepspeed.zero.parameters import gather as fetch
from deepspeed.zero.parameters.data import show, writes
from deepspeed.zero.parameters.module_hooks import register_external_parameter
from deepspeed.zero.parameters.shard import Shard, shards_of
from deepspeed.zero.states.parameter_state import StateOwner, owner_of


class GatheredParameters:
    """A context in which some parameters are whole on every rank; all ranks enter it together.

    With `modifier_rank`, what that rank (of the parameters' group) wrote is given to all on exit, also of parameters
    that an engine keeps whole. Without, edits of sharded ones are dropped, with a warning. Parameters that no engine
    trains and that are not sharded may be among them and are left alone.
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
        self._versions: list[int] = []
        self._kept: dict[int, Tensor] = {}
        """What parameters that stay whole held on entry, by id of the shard."""

    def __enter__(self) -> None:
        if not self.enabled:
            return
        # On one rank an engine keeps parameters whole for good.
        self._shards = [s for s in shards_of(self.params) if s.numel and not (s.alone and s.persistent)]
        for shard in self._shards:
            if shard.persistent and not shard.holds and shard.edited:
                shard.store()  # an edit of before
        missing = [shard for shard in self._shards if not shard.whole]
        fetch.gather(missing)
        for shard in self._shards:
            shard.holds += 1
            shard.users[id(self)] = None
        self._versions = [writes(shard.param) for shard in self._shards]
        if self.src_rank is None:
            self._kept = {id(s): s.full.clone() for s in self._shards if s.persistent or s.strict}
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
            shard.users.pop(id(self), None)
        try:
            if error is None and self.src_rank is None:
                self._refuse_edits()
            elif error is None and self.src_rank is not None:
                self._spread(self.src_rank)
        finally:
            fetch.release(self._shards)

    def _spread(self, modifier: int) -> None:
        """Give what the modifier wrote to all ranks, and cut it again."""
        sharded = {id(shard.param) for shard in self._shards}
        whole: dict[StateOwner, dict[int, nn.Parameter]] = {}
        for param in self.params:
            owner = owner_of(param)
            if owner is not None and id(param) not in sharded and param.numel():
                whole.setdefault(owner, {})[id(param)] = param
        for owner, params in whole.items():
            owner.spread(list(params.values()), modifier)
        for shard in self._shards:
            if not 0 <= modifier < shard.holders:
                raise UsageError(
                    f"GatheredParameters: modifier_rank is {modifier}, but {shard.name} lies on {shard.holders} ranks"
                )
            if shard.param.device != shard.full.device:
                raise UsageError(
                    f"GatheredParameters: {shard.name} was moved to {shard.param.device}; change its values in place, "
                    f"on {shard.full.device}"
                )
        fetch.spread(self._shards, modifier)

    def _refuse_edits(self) -> None:
        changed = [
            shard
            for shard, known in zip(self._shards, self._versions, strict=True)
            if _is_changed(shard, known, self._kept.get(id(shard)))
        ]
        for shard in changed:
            if shard.persistent:  # it would keep the edit, perhaps on this rank only
                shard.full.copy_(self._kept[id(shard)])
                show(shard.param, shard.full)
                shard.mark()
        self._kept.clear()
        if not changed:
            return
        when = "when the context ends" if any(not shard.alone for shard in changed) else "on more than one rank"
        message = (
            f"GatheredParameters: {[shard.name for shard in changed[:3]]} were changed without modifier_rank: the "
            f"change is lost {when}. Pass modifier_rank=0 to keep what rank 0 wrote."
        )
        if any(shard.strict for shard in changed):
            raise LostEditError(message)
        warn_once(message)


def _is_changed(shard: Shard, version: int, kept: Tensor | None) -> bool:
    """True if the values were written since `version`, and nothing else will keep them.

    Some code writes past every counter. Without a copy of the whole, this rank's chunk shows most of that.
    """
    if shard.holds:
        return False  # whoever holds it judges
    if writes(shard.param) not in (version, shard.version) or shard.param.data_ptr() != shard.full.data_ptr():
        return True
    if kept is not None:
        return not torch.equal(kept, shard.full)
    return not shard.alone and not torch.equal(shard.rows[shard.axis.rank], shard.data.to(shard.device))


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """The module of an engine, with whole parameters and without hooks, so that every token costs no communication.

    All ranks enter and leave it together. Parameters must not be changed meanwhile.
    """
    parts = getattr(model, "_parts", None)
    sharded = None if parts is None else parts.sharded
    hooks = None if sharded is None else sharded.hooks
    module: nn.Module = model if parts is None else model.module
    aside = nullcontext() if hooks is None or not hooks.handles else hooks.paused()
    with GatheredParameters(module.parameters()), aside:
        yield module
