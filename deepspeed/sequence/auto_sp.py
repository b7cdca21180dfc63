"""AutoSP: a model's attention over sequences that ranks share, of text, images, or both."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed.errors import UsageError
from deepspeed.sequence.exchange import (
    gather_heads,
    lengths_of_ranks,
    of_all_ranks,
    padded,
    scatter_heads,
    shares,
    unpadded,
)
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.sequence.ulysses import UlyssesSPAttentionHF
from deepspeed.transformers.attention import (
    core_attention,
    free_name,
    models_in,
    register_attention,
    require_attention,
    require_functions,
)

__all__ = [
    "UlyssesSPViTAttention",
    "auto_wrap_model_for_sp",
]

_ATTENTION = re.compile(r"\w*Attention(2|Fast)?$")
_VISION_CLASS = re.compile(r"ViT|CLIP|S[iI]g[lL]ip|Vision|Dino|DeiT|Beit|Intern(?!LM)")
_VISION_PATH = re.compile(r"(^|\.)(vision\w*|visual\w*|image\w*)(\.|$)")
_TEXT_PATH = re.compile(r"(^|\.)(language\w*|text\w*|llm)(\.|$)")
_PROJECTION = re.compile(r"(^|\.)(mm_projector|multi_modal_projector|mlp1|merger|projector|connector|aligner)$")


@dataclass
class SPModelInfo:
    """Modules by their names in the model."""

    vit_attn_modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    llm_attn_modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    vision_projection_module: tuple[str, nn.Module] | None = None
    """What makes embeddings of image features; the first one that is found."""


def detect_model_sp_info(model: nn.Module) -> SPModelInfo:
    """Look at names of classes and paths; an attention inside of another one belongs to that."""
    info = SPModelInfo()
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if info.vision_projection_module is None and _PROJECTION.search(path):
            info.vision_projection_module = path, module
        if not _ATTENTION.match(type(module).__name__) or path.startswith(inside):
            continue
        found = info.vit_attn_modules if _of_images(path, module) else info.llm_attn_modules
        found.append((path, module))
        inside = (*inside, f"{path}.")
    return info


def _of_images(path: str, module: nn.Module) -> bool:
    """Where the path does not tell, the class does."""
    if _VISION_PATH.search(path):
        return True
    return not _TEXT_PATH.search(path) and bool(_VISION_CLASS.search(type(module).__name__))


class UlyssesSPViTAttention(nn.Module):
    """Runs `attn` over whole images; hidden states are [images, this rank's patches, hidden].

    A class token goes first on every rank (`has_cls_token`). Ranks exchange patches for images: each computes some
    images whole. Where there are fewer images than ranks, or a mask comes with them, each computes all of them. Ranks
    may have different numbers of patches: they are padded on the way, and `attn` sees no padding.
    """

    def __init__(self, attn: nn.Module, process_group: ProcessGroup, has_cls_token: bool = True) -> None:
        super().__init__()
        self.attn, self.process_group, self.has_cls_token = attn, process_group, has_cls_token

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        """What `attn` returns, of this rank's patches; `kwargs` are for whole images."""
        if hidden_states.dim() != 3:
            raise UsageError(
                f"UlyssesSPViTAttention got hidden states of shape {tuple(hidden_states.shape)}; expected [images, "
                "patches, hidden]."
            )
        group, images = self.process_group, hidden_states.shape[0]
        if group.size() == 1:
            return self.attn(hidden_states, **kwargs)
        lengths = lengths_of_ranks([hidden_states], group)[0]
        own = lengths[group.rank()]
        if images < group.size() or any(isinstance(each, Tensor) for each in kwargs.values()):
            found = self.attn(self._together(of_all_ranks(hidden_states, lengths, group), lengths), **kwargs)
            return _changed(found, lambda out: self._apart(out, lengths)[group.rank()][:, :own])
        counts = shares(images, group.size())
        sent = padded(hidden_states, max(lengths)).transpose(0, 1)[None]
        mine = unpadded(scatter_heads(sent, counts, group)[0].transpose(0, 1), lengths)
        found = self.attn(self._together(mine, lengths), **kwargs)

        def back(out: Tensor) -> Tensor:
            parts = torch.cat(self._apart(out, lengths), 1).transpose(0, 1)[None]
            return gather_heads(parts, counts, group)[0].transpose(0, 1)[:, :own]

        return _changed(found, back)

    def _together(self, parts: Tensor, lengths: Sequence[int]) -> Tensor:
        """Parts of all ranks, each behind its class token, as one image behind one."""
        if not self.has_cls_token:
            return parts.contiguous()
        pieces = parts.split(list(lengths), 1)
        return torch.cat([pieces[0][:, :1], *(piece[:, 1:] for piece in pieces)], 1)

    def _apart(self, whole: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """The other way, each part padded to the longest."""
        first = int(self.has_cls_token)
        patches = whole[:, first:].split([length - first for length in lengths], 1)
        return [padded(torch.cat([whole[:, :first], each], 1), max(lengths)) for each in patches]


def _changed(found: Any, change: Any) -> Any:
    """The same structure with hidden states of another length; what an attention returns besides is of whole images."""
    return (change(found[0]), *found[1:]) if isinstance(found, tuple) else change(found)


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
    for config in {id(module.config): module.config for module in modules}.values():
        attention = UlyssesSPAttentionHF.of_config(
            config, core_attention(config._attn_implementation), group, batch_size=1, seq_length_is_variable=True
        )
        name = free_name("deepspeed_autosp")
        register_attention(name, attention, attention.masks)
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
