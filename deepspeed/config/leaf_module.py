"""The `zero_optimization.leaf_module` block: subtrees of the model that stage 3 gathers as one unit."""

from __future__ import annotations

from pydantic import Field

from .model import Section
from .values import OneOrMoreNames

__all__ = [
    "DEFAULT_LEAF_MODULE_CLASSES",
    "DEFAULT_LEAF_MODULE_NAMES",
    "DEFAULT_LEAF_MODULE_NAME_SUFFIXES",
    "DeepSpeedZeroLeafModuleConfig",
]

DEFAULT_LEAF_MODULE_CLASSES: list[str] = [
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
]
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


class DeepSpeedZeroLeafModuleConfig(Section):
    """Modules below which stage 3 does not look: experts, of which each rank may use others."""

    classes: OneOrMoreNames = Field(
        DEFAULT_LEAF_MODULE_CLASSES,
        description="Classes, by fully qualified name, whose subtree is gathered whole; a list given here replaces "
        "the default list.",
    )
    names: OneOrMoreNames = Field(
        DEFAULT_LEAF_MODULE_NAMES, description="Modules, by path in the model, whose subtree is gathered whole."
    )
    name_suffixes: OneOrMoreNames = Field(
        DEFAULT_LEAF_MODULE_NAME_SUFFIXES, description="Endings of module paths whose subtree is gathered whole."
    )
