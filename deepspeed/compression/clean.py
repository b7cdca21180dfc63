"""`redundancy_clean`: a model whose layers were compressed becomes one of plain, smaller layers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from logging import WARNING
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.compression.basic_layer import CompressedLayer, compression_of
from deepspeed.compression.plan import PATH, check_deepspeed_config, compressed_layer, plans_of, unwrapped
from deepspeed.compression.stored import WeightGrid, store
from deepspeed.errors import UsageError
from deepspeed.log import log_dist
from deepspeed.parallel.regions import cut_of

__all__ = ["redundancy_clean"]

_ORDER = ("weight_quantization", "sparse_pruning", "row_pruning", "head_pruning", "channel_pruning")


@torch.no_grad()
def redundancy_clean(model: nn.Module, deepspeed_config: Any, mpu: Any = None) -> nn.Module:
    """Make the compression of a model final, in place: it computes the same without masks; returns the model.

    Rounded weights become the parameters, or integers where `store_integers` asks for them. What is pruned becomes
    zero, or is taken out of layers and of their `related_modules`. Layers get their classes back, but those whose
    inputs are rounded.
    """
    section, inner = check_deepspeed_config(deepspeed_config), unwrapped(model)
    _require_whole(inner)
    plans = {(plan.technique, plan.group): plan for plan in plans_of(inner, section, mpu, partly=False)}
    shared = _untied(inner)
    for technique in _ORDER:
        for plan in (each for key, each in plans.items() if key[0] == technique):
            for place, name in enumerate(plan.names):
                layer: Any = inner.get_submodule(name)
                if not isinstance(layer, CompressedLayer):
                    raise UsageError(
                        f"redundancy_clean: {name} is not compressed, as {PATH}.{technique} asks; call "
                        "init_compression with this config first"
                    )
                related = plan.related[place] if plan.related else ()
                _fix(inner, layer, technique, related)
    for module in list(inner.modules()):
        if compression_of(module) is not None:
            _release(module)
    for names in shared:
        _tie(inner, names)
    return model


def _untied(model: nn.Module) -> list[list[str]]:
    """Give compressed layers weights of their own, each of which may end otherwise; returns who shared one."""
    users: dict[int, list[str]] = {}
    for name, each in model.named_modules():
        if isinstance(weight := each._parameters.get("weight"), nn.Parameter):
            users.setdefault(id(weight), []).append(name)
    shared = [names for names in users.values() if len(names) > 1]
    for name in itertools.chain(*shared):
        module: Any = model.get_submodule(name)
        if compression_of(module) is not None:
            module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=module.weight.requires_grad)
    return shared


def _tie(model: nn.Module, names: Sequence[str]) -> None:
    """Let layers share a weight again where theirs ended alike."""
    first = _weight_of(model.get_submodule(names[0]))
    for name in names[1:]:
        module = model.get_submodule(name)
        own = _weight_of(module)
        if own.keys() == first.keys() and all(torch.equal(own[key], first[key]) for key in own):
            for key, value in first.items():
                (module._parameters if key == "weight" else module._buffers)[key] = value  # type: ignore[assignment]
        else:
            log_dist(
                f"redundancy_clean: {names[0]} and {name} shared a weight, which was not compressed alike in both, and "
                "have one each now. Tell the model's config that they are not tied, as by tie_word_embeddings=False",
                level=WARNING,
            )


def _weight_of(module: nn.Module) -> dict[str, Tensor]:
    """The weight, or the integers and what belongs to them."""
    return {
        key: value
        for held in (module._parameters, module._buffers)
        for key, value in held.items()
        if key.startswith("weight") and value is not None
    }


def _require_whole(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if compression_of(module) is not None and (cut_of(module) is not None or not _here(module)):
            raise UsageError(
                f"redundancy_clean: ranks share {name}; load the consolidated weights into a whole model, for which "
                "init_compression was called, and clean that"
            )


def _here(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is None or (not hasattr(weight, "ds_id") and weight.numel() > 0)


def _fix(model: nn.Module, layer: Any, technique: str, related: Sequence[str]) -> None:
    state = layer.compressed
    if technique == "weight_quantization":
        if state.weights is not None:
            _round(layer)
        return
    pruning = state.prunings.get(technique)
    if pruning is None:
        return
    width = getattr(layer, "in_features", 0)
    if technique == "head_pruning":
        _require_alike(model, layer, related)
    kept = layer.fix_pruning(technique, takes=bool(related))
    for name in related:
        compressed_layer(model, name).follow_pruning(technique, kept)
    if technique == "head_pruning":
        _tell_heads(model, (state.name, *related) if related else (), kept, width)


def _round(layer: Any) -> None:
    """The weight as it is rounded in the end, and the numbers that it may have."""
    state = layer.compressed
    rounding = state.weights
    if rounding.store_integers:
        weight = layer._parameters["weight"]
        found = state.codes(weight, rounding.target_bits)
        state.grid = WeightGrid(weight, found, rounding.target_bits)
    layer.fix_weight_quantization()


# Attributes of attention modules: how many heads there are, and how many outputs these have together.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "num_key_value_heads")
_WIDTHS = ("all_head_size", "embed_dim", "inner_dim")


def _require_alike(model: nn.Module, layer: Any, related: Sequence[str]) -> None:
    for name in related:
        outputs = getattr(model.get_submodule(name), "out_features", None)
        if outputs != layer.in_features:
            raise UsageError(
                f"redundancy_clean: {name} has {outputs} outputs, and {layer.compressed.name}, whose heads are pruned, "
                f"{layer.in_features} inputs; heads that share keys and values cannot be taken out, so leave "
                "related_modules out"
            )


def _tell_heads(model: nn.Module, names: Sequence[str], kept: Tensor, width: int) -> None:
    """Let attention modules around the layers know that they have fewer heads."""
    before, after = kept.numel(), int(kept.sum())
    around = {model.get_submodule(name.rpartition(".")[0]) for name in names}
    for module in around:
        for attributes, old in ((_HEADS, before), (_WIDTHS, width)):
            for attribute in attributes:
                if getattr(module, attribute, None) == old:
                    setattr(module, attribute, old // before * after)


def _release(module: Any) -> None:
    """Give a layer its class back, unless its inputs are rounded; and its integers, if it has any."""
    state = module.compression
    if state.activations is None:
        for handle in state.handles:
            handle.remove()
        del module.compression
        module.__class__ = state.original
    if state.grid is not None:
        store(module, state.grid)
        state.grid = None
