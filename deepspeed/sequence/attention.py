"""`SequenceAttention`: the attention of one engine's model, which knows the sequences that the engine shares out."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from deepspeed.errors import UsageError
from deepspeed.sequence.attend import Ways, attend, core_options
from deepspeed.sequence.core import Core
from deepspeed.sequence.distance_bias import DistanceBias, is_crossing
from deepspeed.sequence.key_bias import KeyBias
from deepspeed.sequence.own_attention import knows, teach
from deepspeed.sequence.transformers_hooks import Masks, core_of, hang, models_in, require_attention, require_functions
from deepspeed.sequence.whole import Whole

__all__ = ["SequenceAttention"]


class SequenceAttention:
    """Attention over the whole sequence while a forward of the engine runs, else over what it gets."""

    def __init__(self, core: Core, ways: Ways) -> None:
        self._core, self._ways, self._masks = core, ways, Masks()
        self.inner = core.function
        self.current: Whole | None = None
        """The sequences of the forward that runs."""
        self.calls = 0
        """How often attention was computed over ranks."""

    def mask(self, *args: Any, **kwargs: Any) -> Tensor:
        """What Transformers calls to make a mask."""
        mask = self._masks(*args, **kwargs)
        self._masks.stands_for(mask, self.current if self.current is not None else Whole(0))
        return mask

    def whole(self, mask: Tensor | None) -> Whole | None:
        """What a mask stands for."""
        return self._masks.whole(mask)

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """What Transformers calls to compute attention."""
        whole = self._masks.whole(attention_mask)
        if whole is None and attention_mask is not None:
            raise UsageError(
                "attention got a mask that the model did not make in this forward: one of four dims, or a copy. Pass "
                "padding masks of two dims, and use checkpoints without reentrance (use_reentrant=False)."
            )
        if whole is None or whole.length == 0:  # the bare module is called, or a part of it that has no mask
            return self._alone(module, (query, key, value), attention_mask, kwargs)
        self.calls += 1
        if whole.target is not None and is_crossing(module):
            kwargs.update(queries=whole.target.length, position_bias=None)  # of other sequences no distance is known
        elif whole.target is not None and getattr(module, "is_decoder", False):
            whole = whole.target
        table = kwargs.get("position_bias")
        if isinstance(table, Tensor) and table.dim() == 2:
            kwargs.update(bias=DistanceBias(table), position_bias=None)
        return attend(module, (query, key, value), self._core, self._ways, whole, **kwargs)

    def _alone(
        self, module: nn.Module, tensors: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        length, width = tensors[1].shape[2], tensors[2].shape[-1]
        bias: KeyBias | None = options.pop("bias", None)
        if bias is not None:
            tensors = bias.last(length).widen(*tensors)
        positions = options.get("position_ids")
        if positions is not None and (positions.dim() != 2 or positions.shape[1] != length):
            positions = None
        rows = tensors[1].shape[0]
        whole = Whole.of(length, None if positions is None else positions.expand(rows, length), mask)
        pairs = options.pop("position_bias", None)
        options = core_options(options) | ({} if pairs is None else {"position_bias": pairs})
        crossing = pairs is not None and is_crossing(module)
        found, weights = self._core(module, *tensors, whole, crossing=crossing, **options)
        return found[..., :width], weights

    @classmethod
    def install(cls, module: nn.Module, ways: Ways, stack: ExitStack) -> SequenceAttention:
        """Let every model of Transformers in a module use it, until the stack is closed."""
        models = models_in(module)
        require_attention(type(models[0]).__name__, models[0].config)
        for model in models:
            if not knows(model.config):
                require_functions(type(model), "Remove sequence_parallel.attention for this model.")
        used = models[0].config._attn_implementation
        chosen = "sdpa" if used == "eager" and knows(models[0].config) else used
        attention = cls(core_of(chosen, type(models[0])), ways)
        name = _free_name()
        stack.callback(hang(name, attention, attention.mask))
        for config in _configs(module):
            stack.callback(_set(config, config._attn_implementation))
            config._attn_implementation = name
        if knows(models[0].config):
            teach(models[0], attention, attention.whole, stack)
        return attention


def _configs(module: nn.Module) -> list[Any]:
    """Those that say which attention is used: the models', and those of attention modules that have their own."""
    from transformers import PreTrainedConfig

    configs = [getattr(each, "config", None) for each in module.modules()]
    return list({id(config): config for config in configs if isinstance(config, PreTrainedConfig)}.values())


def _set(config: Any, name: str) -> Callable[[], None]:
    def undo() -> None:
        config._attn_implementation = name

    return undo


def _free_name() -> str:
    from transformers import AttentionInterface

    known = AttentionInterface._global_mapping
    return next(name for name in map("deepspeed_sequence_{}".format, itertools.count()) if name not in known)
