"""How attention functions and masks are hung into Transformers, and taken out again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from deepspeed.errors import UsageError
from deepspeed.sequence.core import Core
from deepspeed.sequence.whole import Whole

__all__ = ["Masks", "core_of", "hang", "models_in", "require_attention", "require_functions"]

_UNFIT = ("eager", "flex_attention")  # the first is each model's own, the second takes masks of its own kind

_LAYER_KINDS = ("layer_types", "layers_block_type", "block_types")
"""Where configs tell the kind of each layer."""
_WITH_ATTENTION = {"attention", "full_attention", "sliding_attention", "chunked_attention", "dense", "sparse", "moe"}


class Masks:
    """Masks as attention functions get them: padding, [batch, length]; each knows the `Whole` that it stands for.

    A model makes its masks once per forward and hands the same objects to all layers, also when a checkpointed layer
    runs again, so that what belongs to a batch is found by its mask.
    """

    def __init__(self) -> None:
        self._wholes = WeakTensorKeyDictionary()

    def __call__(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        attention_mask: Tensor | None = None,
        use_vmap: bool = False,
        device: Any = None,
        **others: Any,
    ) -> Tensor:
        """What Transformers calls to make a mask."""
        chunk = getattr(others.get("config"), "attention_chunk_size", None)
        if use_vmap or chunk is not None:
            what = "a mask of its own kind" if chunk is None else f"attention in chunks of {chunk} tokens"
            raise UsageError(
                f"the model uses {what}, which sequence parallelism cannot share out over its ranks. It knows causal "
                "and bidirectional attention, sliding windows, padding and packed sequences."
            )
        if attention_mask is None:
            return torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
        return attention_mask[:, -kv_length:].bool()

    def stands_for(self, mask: Tensor, whole: Whole) -> None:
        """Remember what a mask stands for."""
        self._wholes[mask] = whole

    def whole(self, mask: Tensor | None) -> Whole | None:
        """What a mask stands for, if that is known."""
        return None if mask is None else self._wholes.get(mask)


def models_in(module: nn.Module) -> list[Any]:
    """The models of Transformers in a module, itself or what it wraps (PEFT), the outermost first."""
    from transformers import PreTrainedModel

    return [each for each in module.modules() if isinstance(each, PreTrainedModel)]


def require_attention(name: str, config: Any) -> None:
    """Refuse a model in which tokens meet in other layers than attention: parts of a sequence would not, silently."""
    text = config.get_text_config()
    named = [each for key in _LAYER_KINDS for each in getattr(text, key, None) or ()]
    other = sorted({str(each) for each in named} - _WITH_ATTENTION)
    if other:
        raise UsageError(
            f"{name} has layers of the type {other[0]!r}, by which tokens see each other without attention: ranks that "
            f"share a sequence know only attention ({', '.join(sorted(_WITH_ATTENTION))}). Train this model without "
            "sequence parallelism."
        )


def require_functions(kind: Any, advice: str) -> None:
    """Refuse a class of models whose attention modules call no function of Transformers: ours would not be called."""
    if not getattr(kind, "_supports_attention_backend", True):
        raise UsageError(
            f"{kind.__name__} computes attention by itself instead of by Transformers' attention functions, so that "
            f"it cannot be shared out. {advice}"
        )


def core_of(name: str, kind: Any = None) -> Core:
    """One of Transformers' attention functions, as it is without ours around it; `kind` is the class of the model."""
    from transformers import AttentionInterface

    known = AttentionInterface._global_mapping
    if name in _UNFIT or name.startswith("paged") or name not in known:
        others = ("paged", "deepspeed_")  # the latter are ours, of other engines
        usable = sorted(each for each in known if each not in _UNFIT and not each.startswith(others))
        usable = [each for each in usable if kind is None or _takes(kind, each)]
        advice = f"Load the model with attn_implementation set to one of {', '.join(usable)}"
        if not usable:
            advice = f"{kind.__name__} takes no other one. Train this model without sequence parallelism"
        raise UsageError(f"the attention {name!r} cannot be used under sequence parallelism. {advice}.")
    function = known[name]
    return Core(name, getattr(function, "inner", function))


def _takes(kind: Any, name: str) -> bool:
    """Whether Transformers lets a class of models use one of its functions, as the class says."""
    flag = "_supports_flash_attn" if "flash" in name else f"_supports_{name}"
    return bool(getattr(kind, flag, True))


def hang(name: str, function: Callable[..., Any], masks: Callable[..., Any]) -> Callable[[], None]:
    """Make an attention function and its masks known by a name; returns what undoes it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    tables = (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)
    before = [table.get(name) for table in tables]
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, masks)

    def undo() -> None:
        for table, value in zip(tables, before, strict=True):
            table.pop(name, None)
            if value is not None:
                table[name] = value

    return undo
