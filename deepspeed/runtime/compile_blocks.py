"""Compilation by regions: the repeated blocks of a model are compiled, once for all of them, and the rest is not.

A block is compiled in seconds where a whole model takes minutes. What surrounds the blocks stays Python, which models
need: Transformers' models see only there that a mask is causal and need not exist; compiled as a whole they build it,
and attention with a mask of numbers takes three times as long.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.runtime.parts import Parts


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model: of each outermost list of modules, those of the class that most of them have."""
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        kinds = Counter(type(child) for child in module.children())
        kind, count = kinds.most_common(1)[0] if kinds else (nn.Module, 0)
        blocks = [child for child in module.children() if type(child) is kind]
        if count < 2 or not any(True for _ in blocks[0].children()):
            continue
        found += blocks
        inside.update(id(each) for block in blocks for each in block.modules())
    return found


def compile_module(parts: Parts, options: dict[str, Any]) -> None:
    """Compile an engine's model as its config says; undone when the engine is destroyed."""
    schema, module = parts.config.schema, parts.module
    region = schema.compile.region
    blocks = repeated_blocks(module) if region != "model" else []
    if region == "blocks" and not blocks:
        raise DeepSpeedConfigError(
            f"compile.region is 'blocks', but {type(module).__name__} has no list of two modules of one class; use "
            "'auto' or 'model'",
            path="compile.region",
        )
    if not blocks:
        before = module._compiled_call_impl
        module.compile(**options)
        parts.resources.callback(setattr, module, "_compiled_call_impl", before)
        return
    if parts.sharded.hooks is not None:
        parts.sharded.hooks.as_units(blocks)
    for block in blocks:
        # the forward alone: hooks on the block stay Python
        before = block.__dict__.get("forward")
        block.forward = torch.compile(block.forward, **options)
        parts.resources.callback(_put_back, block, before)


def _put_back(block: nn.Module, before: Any) -> None:
    """A forward that was put on the block itself is there again."""
    if before is None:
        block.__dict__.pop("forward", None)
    else:
        block.forward = before
