"""What plain PyTorch exports of a model in shards is empty: the calls that give whole values are named, once."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from deepspeed.log import warn_once
from deepspeed.zero.parameters.shard import shard_of

__all__ = ["tell_of_empty_state_dicts"]


def tell_of_empty_state_dicts(module: nn.Module) -> Callable[[], None]:
    """Warn once when `state_dict()` of a module or of any below it has empty tensors; returns what undoes that.

    With `keep_vars=True`, as this library calls it, nothing is said: then the caller wants the parameters themselves.
    """
    handles = [each.register_state_dict_pre_hook(_tell) for each in module.modules()]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _tell(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if keep_vars:
        return
    shards = map(shard_of, module.parameters(recurse=False))
    if any(shard is not None and not shard.whole and shard.numel for shard in shards):
        warn_once(
            "state_dict() of a model whose parameters are sharded has empty tensors. Use engine.module_state_dict() or "
            "engine.zero3_consolidated_16bit_state_dict(), which gather them, or call it inside "
            "deepspeed.zero.GatheredParameters(module.parameters())."
        )
