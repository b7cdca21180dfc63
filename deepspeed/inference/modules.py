"""Modules of any kind: blocks whose computations were replaced, and the parts of a pipeline object."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn

from deepspeed.errors import UsageError
from deepspeed.fusion.build import FusionFinding, find, put
from deepspeed.transformers.replacement import Refused, class_before

KINDS = ("norm", "mlp", "rotary", "mask")
"""What fused kernels compute in inference."""


class DeepSpeedTransformerInference(nn.Module):
    """The kind of blocks of which fused kernels compute parts: `isinstance` tells them."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        raise UsageError(
            "DeepSpeedTransformerInference has no layers of its own: init_inference with replace_with_kernel_inject "
            "replaces computations inside of a model's blocks, which are of this class then"
        )


class HFGPT2LayerPolicy:
    """What `injection_policy` says of GPT-2's blocks, as a class: the layers whose outputs are summed."""

    rows = ("attn.c_proj", "mlp.c_proj")


def mark_blocks(model: nn.Module, names: Collection[str], stack: ExitStack) -> None:
    """Let the blocks in lists of a model, inside of which modules of these names lie, be of that kind."""
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            continue
        for label, block in module.named_children():
            inner = f"{path}.{label}" if path else label
            has = any(name == inner or name.startswith(f"{inner}.") for name in names)
            if has and not isinstance(block, DeepSpeedTransformerInference):
                before = type(block)
                block.__class__ = class_before(_Marked, before, "Inference")
                stack.callback(setattr, block, "__class__", before)


class _Marked(DeepSpeedTransformerInference):
    """The mark of one block: nothing is constructed, and nothing is computed in another way."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


def replace_transformer_layer(
    orig_layer_impl: type[nn.Module] | None,
    model: nn.Module,
    checkpoint_dict: Mapping[str, Any] | None = None,
    config: Any = None,
    model_config: Any = None,
) -> nn.Module:
    """Let fused kernels compute what they can in the blocks of a class, or in all of a model; returns the model.

    `init_inference` does this by the key `replace_with_kernel_inject`; checkpoints and configs belong there.
    """
    if checkpoint_dict is not None:
        raise UsageError("replace_transformer_layer reads no checkpoint; give it to init_inference(checkpoint=...)")
    with ExitStack() as undo:
        put_kernels(model, orig_layer_impl, undo)
        undo.pop_all()
    return model


def put_kernels(model: nn.Module, kind: type[nn.Module] | None, stack: ExitStack) -> list[FusionFinding]:
    """Put fused kernels into the blocks of a class, or into all of a model; what was found."""
    blocks = {"": model}
    if kind is not None:
        blocks = {path: each for path, each in model.named_modules() if isinstance(each, kind)}
        if not blocks:
            raise UsageError(f"the model has no module of the class {kind.__name__}")
    every: list[FusionFinding] = []
    names: list[str] = []
    for path, block in blocks.items():
        found = list(find(block, KINDS, serves="infer"))
        put(found, stack)
        every += found
        names += [f"{path}.{each.name}".strip(".") for each in found if not isinstance(each.result, Refused)]
    mark_blocks(model, names, stack)
    return every


def parts_of(pipeline: object) -> dict[str, nn.Module]:
    """The modules of an object that is none itself, such as a pipeline of Diffusers, by attribute."""
    listed = getattr(pipeline, "components", None)
    names = list(listed) if isinstance(listed, Mapping) else list(getattr(pipeline, "__dict__", {}))
    found = {name: getattr(pipeline, name, None) for name in names}
    return {name: part for name, part in found.items() if isinstance(part, nn.Module)}
