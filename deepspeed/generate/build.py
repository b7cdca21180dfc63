"""A model and a config → the parts of an engine that generates."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed import comm
from deepspeed.config.inference import RaggedInferenceEngineConfig, idle_keys
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.generate import weights
from deepspeed.generate.blocks import CacheGroup
from deepspeed.generate.cache import CachePlan, PagedCache, plan_cache
from deepspeed.generate.drafts import FEW, Drafter, ModelDrafter, NgramDrafter
from deepspeed.generate.entry import adopt
from deepspeed.generate.guide import SchemaGuides
from deepspeed.generate.loop import GenerationLoop
from deepspeed.generate.runner import Runner
from deepspeed.generate.sampler import Sampler
from deepspeed.generate.scheduler import ScheduleLimits, Scheduler
from deepspeed.log import log_dist
from deepspeed.memory.streaming import WeightStream
from deepspeed.ops.capability import has_e4m3, on_cuda
from deepspeed.parallel.regions import GroupMembers

_DRAFTED = 8
"""Sequences of full length that a draft model's cache holds; usual ones are shorter."""


@dataclass(slots=True)
class EngineParts:
    """What an `LLM` is made of."""

    model: nn.Module
    folder: Path | None
    runner: Runner
    draft: Runner | None
    loop: GenerationLoop
    axis: GroupMembers | None
    vocabulary: int
    context: int
    eos_ids: frozenset[int]
    base_seed: int
    guides: SchemaGuides
    stream: WeightStream | None


def build(source: Any, config: RaggedInferenceEngineConfig, dtype: torch.dtype | str, stack: ExitStack) -> EngineParts:
    """Load, split, round and adopt a model, take memory for its cache; `stack` undoes it."""
    for line in idle_keys(config):
        log_dist(line)
    device = weights.device_here()
    if on_cuda.holds and not has_e4m3.holds:
        _refuse_eight_bits(config)
    axis = _ranks(config.tensor_parallel.tp_size)
    loaded = weights.load(source, config, dtype, device, axis, stack)
    model = loaded.model
    if config.kernels and device.type == "cuda":
        weights.inject(model, stack, streamed=not config.deterministic, joins=loaded.stream is None)
    if config.deterministic:
        weights.fix_rows(model, device, stack)
    entry = adopt(model, deterministic=config.deterministic, eight_bits=config.state_manager.kv_dtype == "fp8")
    stack.callback(entry.close)
    manager = config.state_manager
    text = model.config.get_text_config()  # type: ignore[union-attr,operator]
    context = min(manager.max_context, getattr(text, "max_position_embeddings", None) or manager.max_context)
    kind = next(param.dtype for param in model.parameters() if param.is_floating_point())
    if not entry.captured and context > entry.short_context:
        raise UsageError(
            f"{type(model).__name__} computes attention by itself, and rotates all sequences of a batch by the longest "
            f"one: set state_manager.max_context, which is {manager.max_context}, to at most {entry.short_context}"
        )
    drafter = _drafter(config, text.vocab_size, kind, context, stack)
    plan = _agreed(plan_cache(entry.layers, manager, kind, device), axis)
    cache = PagedCache(entry.layers, plan, manager.block_size, device, entry.scales)
    graphs = config.cuda_graphs and device.type == "cuda" and loaded.stream is None
    places, tokens = manager.max_ragged_sequence_count, manager.max_ragged_batch_size
    runner = Runner(entry, cache, places, -(-context // manager.block_size), most_tokens=tokens, graphs=graphs)
    stack.callback(runner.release)
    runner.warm_up()
    limits = ScheduleLimits(tokens, places, context, manager.block_size, manager.prefix_cache, entry.short_context)
    sampler, scheduler = Sampler(text.vocab_size, device), Scheduler(limits, plan.groups)
    loop = GenerationLoop(scheduler, runner, sampler, asynchronous=device.type != "cpu", drafter=drafter)
    log_dist(
        f"{type(model).__name__} enters by {entry.how}; a cache of "
        f"{sum(group.blocks for group in plan.groups)} blocks of {manager.block_size} tokens; "
        + ("graphs of the device" if graphs and entry.captured else "no graphs")
    )
    eos = eos_of(model)
    base_seed = _shared(random.SystemRandom().getrandbits(62), axis)
    return EngineParts(
        model,
        loaded.folder,
        runner,
        None if drafter is None else drafter.runner,
        loop,
        axis,
        text.vocab_size,
        context,
        eos,
        base_seed,
        SchemaGuides(text.vocab_size, eos),
        loaded.stream,
    )


def _refuse_eight_bits(config: RaggedInferenceEngineConfig) -> None:
    """An error for keys that ask for e4m3 on a device whose kernels cannot read it."""
    given = {
        "state_manager.kv_dtype": config.state_manager.kv_dtype,
        "quantization.quantization_mode": config.quantization.quantization_mode,
    }
    for name, value in given.items():
        if value == "fp8":
            raise DeepSpeedConfigError(f"{name} is 'fp8', but {has_e4m3.verdict.reason}; use another value")


def _ranks(size: int) -> GroupMembers | None:
    """The ranks that share the layers with this one: neighbours."""
    if size == 1:
        return None
    if not comm.is_initialized():
        raise UsageError(f"tensor_parallel.tp_size is {size}: call deepspeed.init_distributed() first, on {size} ranks")
    world, rank = comm.get_world_size(), comm.get_rank()
    if world % size:
        raise UsageError(f"tensor_parallel.tp_size is {size}, which does not divide {world} ranks")
    groups = [comm.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    return GroupMembers(groups[rank // size])


def _shared(value: int, axis: GroupMembers | None) -> int:
    """The smallest value of all ranks."""
    if axis is None:
        return value
    tensor = torch.tensor([value], dtype=torch.int64, device=comm.group_device())
    comm.all_reduce(tensor, op=comm.ReduceOp.MIN, group=axis.group)
    return int(tensor)


def _agreed(plan: CachePlan, axis: GroupMembers | None) -> CachePlan:
    """The plan that all ranks have room for."""
    if axis is None:
        return plan
    groups = (
        replace(each, blocks=_shared(each.blocks, axis), host_blocks=_shared(each.host_blocks, axis))
        for each in plan.groups
    )
    return replace(plan, groups=tuple(groups))


def eos_of(model: nn.Module) -> frozenset[int]:
    config = getattr(model, "generation_config", None)
    found = getattr(config, "eos_token_id", None)
    if found is None:
        found = getattr(model.config.get_text_config(), "eos_token_id", None)  # type: ignore[union-attr,operator]
    return frozenset([] if found is None else [found] if isinstance(found, int) else found)


def _drafter(
    config: RaggedInferenceEngineConfig, vocabulary: int, dtype: torch.dtype, context: int, stack: ExitStack
) -> Drafter | None:
    section = config.speculative
    if section is None:
        return None
    if section.method == "ngram":
        return NgramDrafter(section.tokens)
    device, manager = weights.device_here(), config.state_manager
    plain = RaggedInferenceEngineConfig()
    model = weights.load(section.model, plain, dtype, device, None, stack).model
    own = model.config.get_text_config().vocab_size  # type: ignore[union-attr,operator]
    if own != vocabulary:
        raise UsageError(
            f"speculative.model {type(model).__name__} has a vocabulary of {own} tokens, but the model has "
            f"{vocabulary}. A draft model needs the same tokens."
        )
    if config.kernels and device.type == "cuda":
        weights.inject(model, stack, streamed=True)
    entry = adopt(model)
    stack.callback(entry.close)
    longest = -(-(context + section.tokens) // manager.block_size)
    blocks = longest * _DRAFTED
    size = sum(layer.numel for layer in entry.layers) * manager.block_size * dtype.itemsize
    groups = (CacheGroup(tuple(layer.layer for layer in entry.layers), blocks),)  # no block leaves a window
    cache = PagedCache(entry.layers, CachePlan(groups, (size,), dtype), manager.block_size, device)
    graphs = config.cuda_graphs and device.type == "cuda"
    runner = Runner(entry, cache, FEW, longest, most_tokens=manager.max_ragged_batch_size, graphs=graphs)
    stack.callback(runner.release)
    return ModelDrafter(
        runner,
        Sampler(own, device),
        count=section.tokens,
        blocks=blocks,
        block_size=manager.block_size,
        tokens=manager.max_ragged_batch_size,
    )
