"""Which modules of a model are attention of images, which attention of text, and what carries one over to the other."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from torch import nn

__all__ = ["SPModelInfo", "detect_model_sp_info"]

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
