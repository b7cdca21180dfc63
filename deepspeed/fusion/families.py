"""What models of known families have, by which a pattern is missed that a release of Transformers has hidden."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from torch import nn

from deepspeed.fusion.find import Finding
from deepspeed.fusion.swap import Refused, Swap

__all__ = ["FAMILIES", "missed"]

_GATED = ("mask", "norm", "sum", "mlp", "rotary")

FAMILIES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3"), _GATED),
    "mixtral": ("mask", "norm", "sum", "rotary"),
    "gpt2": ("mask", "norm", "sum", "mlp"),
    "gpt_neox": ("mask", "norm", "mlp", "rotary"),
    "opt": ("norm",),
}
"""The kinds of which a model has some, by `config.model_type`; `sum` comes with `norm`."""


def missed(model: nn.Module, kinds: Sequence[str], found: Sequence[Finding]) -> Iterator[tuple[str, Finding]]:
    """(family, why nothing was replaced) for each of these kinds that a model of a known family should have.

    `found` is what the model offers, whatever of it is excluded.
    """
    configs = ((name, module, getattr(module, "config", None)) for name, module in model.named_modules())
    known = ((*each[:2], getattr(each[2], "model_type", None)) for each in configs)
    name, module, family = next((each for each in known if each[2] in FAMILIES), ("", model, None))
    for kind in FAMILIES.get(family or "", ()):
        some = [each for each in found if each.kind == kind]
        if ("norm" if kind == "sum" else kind) in kinds and not any(isinstance(each.result, Swap) for each in some):
            yield str(family), some[0] if some else Finding(kind, name, type(module).__name__, _unseen())


def _unseen() -> Refused:
    version = getattr(sys.modules.get("transformers"), "__version__", "of this version")
    return Refused(f"no module has code of the form that is known; Transformers {version} may have changed it")
