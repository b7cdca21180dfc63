"""`auto_wrap_model_for_sp`: a model's attention over sequences that ranks share, of text, images, or both."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from deepspeed.errors import UsageError
from deepspeed.sequence.autosp_detector import SPModelInfo, detect_model_sp_info
from deepspeed.sequence.autosp_vit import UlyssesSPViTAttention
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.sequence.transformers_hooks import core_of, hang, models_in, require_attention, require_functions
from deepspeed.sequence.ulysses import UlyssesSPAttentionHF

__all__ = ["auto_wrap_model_for_sp"]

_CLASS_TOKENS = ("class_embedding", "cls_token")


def auto_wrap_model_for_sp(model: nn.Module, process_group: ProcessGroup) -> nn.Module:
    """Change a model in place, so that its ranks may each be called with a part of the sequence; returns the model.

    Attention of Transformers' text models goes by Ulysses with the modules as they are; they want the `position_ids` of
    their part. Other attention of text, which must take query, key and value, is wrapped by `DistributedAttention`,
    attention of images by `UlyssesSPViTAttention`.
    """
    info = detect_model_sp_info(model)
    if not info.vit_attn_modules and not info.llm_attn_modules:
        raise UsageError(
            f"{type(model).__name__} has no attention that could be shared out: no module whose class is called "
            "…Attention. Wrap its attention by deepspeed.sequence.layer.DistributedAttention."
        )
    shared = [(path, module) for path, module in info.llm_attn_modules if _is_of_transformers(module)]
    wrapped = [(path, module) for path, module in info.llm_attn_modules if not _is_of_transformers(module)]
    inside = {id(module) for _, module in shared}
    for inner in models_in(model) if shared else ():
        if any(id(module) in inside for module in inner.modules()):
            require_functions(type(inner), "Wrap its attention by deepspeed.sequence.layer.DistributedAttention.")
            require_attention(type(inner).__name__, inner.config)
    for path, module in wrapped:
        _check_takes_three(path, module)
    _share_text([module for _, module in shared], process_group)
    for path, module in wrapped:
        _replace(model, path, DistributedAttention(module, process_group))
    for path, module in info.vit_attn_modules:
        _replace(model, path, UlyssesSPViTAttention(module, process_group, _has_class_token(model, info)))
    return model


def _is_of_transformers(module: Any) -> bool:
    return hasattr(getattr(module, "config", None), "_attn_implementation")


def _share_text(modules: list[Any], group: ProcessGroup) -> None:
    """Let attention functions of Transformers exchange heads, for these modules' configs."""
    from transformers import AttentionInterface

    for config in {id(module.config): module.config for module in modules}.values():
        heads = config.num_attention_heads
        attention = UlyssesSPAttentionHF(
            attn=core_of(config._attn_implementation),
            batch_size=1,
            attn_head_count=heads,
            attn_head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            kv_head_count=getattr(config, "num_key_value_heads", None) or heads,
            num_hidden_layers=config.num_hidden_layers,
            process_group=group,
            seq_length_is_variable=True,
        )
        known = AttentionInterface._global_mapping
        name = next(each for each in map("deepspeed_autosp_{}".format, itertools.count()) if each not in known)
        hang(name, attention, attention.masks)
        config._attn_implementation = name


def _check_takes_three(path: str, module: nn.Module) -> None:
    parameters = list(inspect.signature(module.forward).parameters.values())
    positional = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    needed = [each for each in positional if each.default is each.empty]
    if (len(positional) < 3 and not any(each.kind is each.VAR_POSITIONAL for each in parameters)) or len(needed) == 1:
        raise UsageError(
            f"{path} ({type(module).__name__}) is neither an attention of Transformers nor called with query, key and "
            "value, so that it cannot be shared out. Use deepspeed.sequence.layer.DistributedAttention inside of it."
        )


def _has_class_token(model: nn.Module, info: SPModelInfo) -> bool:
    """Whether images go behind a token of their own; where nothing is known of them, they do."""
    if not any(_is_of_transformers(module) for _, module in info.vit_attn_modules):
        return True
    return any(name.endswith(_CLASS_TOKENS) for name, _ in model.named_parameters())


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    if not path:
        raise UsageError("the model itself is an attention; wrap it where it is used.")
    setattr(model.get_submodule(parent), name, module)
