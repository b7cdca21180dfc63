"""`Init`: linear layers of a model that is built get adapters, or weights in few bits; `init_lora` finishes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ContextDecorator, ExitStack, contextmanager
from difflib import get_close_matches
from itertools import chain
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import nn

from deepspeed import comm
from deepspeed.comm.codec import group_codec
from deepspeed.config.compression import WeightQuantizationConfig
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.linear.config import TARGETS, LinearQuantization, LoRAConfig
from deepspeed.linear.optimized_linear import LoRAOptimizedLinear
from deepspeed.linear.quantization import CodedWeight, coded
from deepspeed.log import log_dist
from deepspeed.memory.tier import ShareInTier, Tier
from deepspeed.parallel import AxisGroup, ParallelLayout, layout_from_mpu
from deepspeed.parallel.mpu import current_layout
from deepspeed.transformers.replacement import whole_shape
from deepspeed.transformers.source import ParameterConstruction

__all__ = ["Init", "init_lora"]


class LinearInit(ContextDecorator):
    """A context in which models are built and loaded; at its end their linear layers rest as the configs say.

    With `lora_config` those that `target_mods` names get adapters, and everything else is frozen; with
    `delay_lora_init` they wait for `init_lora`. With `quant_config` alone every linear layer rests as codes.
    """

    def __init__(self, lora_config: LoRAConfig | None = None, quant_config: LinearQuantization | None = None) -> None:
        if lora_config is None and quant_config is None:
            raise UsageError("linear.Init: neither lora_config nor quant_config is given; give one or both")
        self._lora, self._quantization = lora_config, quant_config
        self._roots: list[nn.Module] = []
        self._depth = 0
        self._open: list[ExitStack] = []

    def __enter__(self) -> LinearInit:
        with ExitStack() as stack:
            stack.enter_context(ParameterConstruction(self._around, beside_others=True).watch())
            self._open.append(stack.pop_all())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.pop().__exit__(kind, error, trace)
        built, self._roots = self._roots, []
        if kind is None:
            below = {id(module) for root in built for module in root.modules() if module is not root}
            self._finish([root for root in built if id(root) not in below])

    @contextmanager
    def _around(self, module: nn.Module) -> Iterator[None]:
        """Around the constructor of a module."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._depth == 0:
            self._roots.append(module)

    def _finish(self, roots: Sequence[nn.Module]) -> None:
        lora, quantization = self._lora, self._quantization
        stages = [root for root in roots if _is_stage(root)]
        roots = stages or roots  # others are layers that lie on other stages
        layers = {name: each for root in roots for name, each in _plain_layers(root).items()}
        if lora is not None:
            for name in _targets(list(layers), lora.target_mods, staged=bool(stages)):
                LoRAOptimizedLinear.adopt(layers[name], lora, quantization)
            if not lora.delay_lora_init:
                for root in roots:
                    if stages or any(isinstance(each, LoRAOptimizedLinear) for each in root.modules()):
                        init_lora(root)
            return
        assert quantization is not None, "one of both is given"
        if not layers:
            raise UsageError("linear.Init: no torch.nn.Linear was built inside; build the model in the context")
        for layer in layers.values():
            coded(layer, quantization.codec, quantization)
        log_dist(f"linear.Init: the weights of {len(layers)} linear layers rest as {quantization.form}")


Init = LinearInit
"""Its published name."""


def _plain_layers(root: nn.Module) -> dict[str, nn.Linear]:
    """Linear layers by name; without those whose weight another module has too, and subclasses with their own ways."""
    users = _users(root)
    return {
        name: module
        for name, module in root.named_modules()
        if type(module) is nn.Linear and users[id(module.weight)] == 1
    }


def _users(root: nn.Module) -> Counter[int]:
    """How many modules have a parameter, by its id."""
    return Counter(id(param) for module in root.modules() for param in module.parameters(recurse=False))


def _near(parts: Sequence[str], names: Sequence[str]) -> str:
    """What a reader may have meant."""
    known = sorted({name.rpartition(".")[2] for name in names})
    near = [each for part in parts for each in get_close_matches(part, known, 2, 0.4)] or known[:6]
    return f"names here: {', '.join(dict.fromkeys(near)) or 'none'}"


def _is_stage(root: nn.Module) -> bool:
    """Whether a module is a stage of a pipeline, which names the ranks of all stages."""
    return callable(getattr(root, "mpu", None)) and comm.is_initialized()


def _targets(names: Sequence[str], wanted: Sequence[str], *, staged: bool) -> list[str]:
    """The names that have one of the wanted parts; an error if a part that the user chose finds nothing.

    Of a pipeline it may find something on another stage, of which other ranks tell.
    """
    everywhere = list(names)
    if staged:
        told: list[list[str]] = [[] for _ in range(comm.get_world_size())]
        comm.all_gather_object(told, everywhere)
        everywhere = list(dict.fromkeys(chain(*told)))
    idle = [part for part in wanted if not any(part in name for name in everywhere)]
    if len(idle) == len(wanted) or (idle and tuple(wanted) != TARGETS):
        raise UsageError(
            f"LoRAConfig: target_mods {idle} match none of the {len(everywhere)} linear layers of the model; "
            f"{_near(idle, everywhere)}"
        )
    return [name for name in names if any(part in name for part in wanted)]


def init_lora(model: nn.Module) -> None:
    """Freeze a model, let the weights of its LoRA layers rest as their configs say, and add adapters, which train."""
    layers = [module for module in model.modules() if isinstance(module, LoRAOptimizedLinear)]
    samples = _ranks_of_stage(model, layers)
    if not layers and samples is None:
        raise UsageError(
            "init_lora: the model has no LoRAOptimizedLinear; build it inside deepspeed.linear.Init(lora_config=...), "
            "or of deepspeed.linear.OptimizedLinear"
        )
    if not layers or any(not layer.initialized for layer in layers):
        model.requires_grad_(False)
    for layer in layers:
        layer.init_lora(samples)
        if layer.initialized:
            layer.lora_weight_1.requires_grad_(True)
            layer.lora_weight_2.requires_grad_(True)
    place_weights(model)


def _ranks_of_stage(model: nn.Module, layers: Sequence[LoRAOptimizedLinear]) -> AxisGroup | None:
    """Of a stage of a pipeline: the ranks that have it, too; None for a whole model."""
    if not _is_stage(model):
        return None
    staged: Any = model
    samples = current_layout.keep(layout_from_mpu(staged.mpu())).samples
    _make_groups(samples, {layer.lora_config.base_weight_sharding for layer in layers})
    return samples


def _make_groups(samples: AxisGroup, sizes: Collection[int]) -> None:
    """Make the groups of ranks that share weights; all ranks call it, those of a stage without adapters, too."""
    told: list[list[int]] = [[] for _ in range(comm.get_world_size())]
    comm.all_gather_object(told, sorted(sizes))
    for size in sorted(set(chain(*told)) - {1}):
        if samples.size % size == 0:
            for axis in samples.split(size=size):
                _ = axis.group


def place_weights(model: nn.Module) -> None:
    """Let the share of frozen weights that each `offload_ratio` names rest in host memory, the last layers of it."""
    ratios: dict[float, list[LoRAOptimizedLinear]] = {}
    for layer in model.modules():
        if isinstance(layer, LoRAOptimizedLinear) and layer.part is not None:
            ratios.setdefault(layer.lora_config.offload_ratio, []).append(layer)
    for ratio, layers in ratios.items():
        sizes = [layer.input_dim * layer.output_dim for layer in layers]
        for layer, tier in zip(layers, ShareInTier(Tier.HOST, ratio).place(sizes), strict=True):
            if tier is not layer.tier:
                layer.rest_in(tier)


def settle(model: nn.Module, dtype: torch.dtype, layout: ParallelLayout) -> None:
    """Before an engine takes the model: frozen weights that are no parameters get their tier and the dtype."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, LoRAOptimizedLinear)}
    samples = layout.samples
    waiting = [n for n, m in layers.items() if not (m.initialized or m.disabled)]
    if waiting:
        raise UsageError(
            f"{len(waiting)} LoRA layers, {waiting[0]!r} the first, have no adapters yet: delay_lora_init is set. Call "
            "deepspeed.linear.init_lora(model) before deepspeed.initialize"
        )
    for name, layer in layers.items():
        axis, layer.samples = layer.axis, samples
        if axis is not None and not set(axis.ranks) <= set(layout.stage.ranks):
            raise UsageError(
                f"LoRAConfig: base_weight_sharding is {axis.size}, so that the ranks {list(axis.ranks)} share the "
                f"frozen weight of {name!r}, of which {sorted(set(axis.ranks) & set(layout.stage.ranks))} alone have "
                "this part of the model. Build a PipelineModule inside linear.Init, or use base_weight_sharding 1"
            )
        if axis is not None and samples.size % axis.size:
            raise UsageError(
                f"LoRAConfig: base_weight_sharding is {axis.size}, which does not divide the {samples.size} ranks that "
                f"have the same part of {name!r}, since {layout.tensor.size} ranks split it; use a divisor"
            )
    if layout.tensor.size > 1 and layout.pipeline.size > 1:
        _make_groups(samples, {layer.axis.size for layer in layers.values() if layer.axis is not None})
    place_weights(model)
    for layer in layers.values():
        layer.hold_in(dtype)


def quantise_named(model: nn.Module, section: WeightQuantizationConfig) -> None:
    """Let the layers that `weight_quantization.post_init_quant` names rest as codes, frozen."""
    wanted = section.post_init_quant if section.enabled else {}
    matches = {part: [name for name, _ in _with_weights(model) if part in name] for part in wanted}
    for part, names in matches.items():
        if not names:
            _refuse(part, "it finds no linear layer or embedding", _near([part], [n for n, _ in _with_weights(model)]))
        for other in wanted:
            both = [] if other == part else [name for name in names if name in matches[other]]
            if both:
                _refuse(part, f"{both[0]} matches {other!r}, too", "let one of them match it")
    layers, users = dict(_with_weights(model)), _users(model)
    for part, groups in wanted.items():
        for name in matches[part]:
            layer: Any = layers[name]
            if type(layer) not in (nn.Linear, nn.Embedding) or getattr(layer, "max_norm", None) is not None:
                _refuse(part, f"{name} is a {type(layer).__name__} that computes in its own way", "leave it out")
            if users[id(layer.weight)] > 1:
                _refuse(part, f"the weight of {name} is that of another module, too", "leave it out")
            shape, dim = whole_shape(layer.weight), groups.group_dim
            if shape[dim] % groups.group_size:
                found = f"group_size {groups.group_size} does not divide dim {dim} of {name} {tuple(shape)}"
                _refuse(part, found, f"use one that divides {shape[dim]}")
            codec = group_codec(groups.num_bits, groups.group_size, symmetric=groups.symmetric)
            coded(layer, codec, transposed=dim == 0)
    if wanted:
        count = sum(map(len, matches.values()))
        log_dist(f"weight_quantization: the weights of {count} layers rest as codes", [0])


def _with_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Linear layers and embeddings that do not rest as codes yet."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and not isinstance(module, CodedWeight):
            yield name, module


def _refuse(part: str, found: str, instead: str) -> NoReturn:
    path = f"weight_quantization.post_init_quant.{part}"
    raise DeepSpeedConfigError(f"{path}: {found}; {instead}", path=path)
