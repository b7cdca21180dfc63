"""A training's module made ready to generate, and made ready to train again to the same bits.

[Note: two spans] Around every call the module is in eval mode, without hooks of stage 3, with adapters fused, on
kernels for inference and with random numbers of its own. Around a phase, one call or several of them in eval mode,
parameters are whole and optimizer states may wait in host memory: that is what costs time.

[Note: slices] With `inference_tp_size` no rank ever has a whole layer: a parameter is whole for the moment in which
its slice is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.config.inference import DeepSpeedInferenceConfig, RaggedInferenceEngineConfig
from deepspeed.config.memory import size_text
from deepspeed.config.parallel import TPTrainingConfig
from deepspeed.config.zero import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.generate import weights
from deepspeed.generate.llm import Completion
from deepspeed.generate.paged import PagedGenerate
from deepspeed.log import log_dist
from deepspeed.parallel.regions import GroupMembers
from deepspeed.runtime.offload_states import move_states, require_here, return_states
from deepspeed.runtime.parts import Parts
from deepspeed.runtime.rng import capture_states, restore_states
from deepspeed.runtime.saving.model_state import WeightBuckets
from deepspeed.tensor_parallel import split
from deepspeed.transformers.lora import LoraFusion
from deepspeed.zero.interface import GatheredParameters, Shard, shard_of

_AWAY = (OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params)
METHODS = ("generate", "generate_batch")
"""Of a module, that an engine replaces."""
_OTHER_NUMBERS = 0x5DEECE66D


class Generation:
    """Generates with the module of an engine; all ranks call it together, each with prompts of its own."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._module = parts, parts.module
        self._config = parts.config.schema.hybrid_engine
        _refuse(parts)
        base, size = _without_adapters(parts.module), self._config.inference_tp_size
        self._sliced: SlicedModel | None = None
        if size > 1 and base is not None and parts.config.schema.zero_optimization.shards_parameters:
            self._sliced = SlicedModel(parts, base, size)
            base = self._sliced.model
        whole = parts.module if self._sliced is None else base
        self._own = {name: getattr(whole, name) for name in METHODS if hasattr(whole, name)}
        self._paged = None if base is None else PagedGenerate(base, self._paged_config())
        self._phase = ExitStack()
        self._kernels = weights.RepeatedInjection(parts.module if self._sliced is None else self._sliced.model)
        self._open = self._inside = False
        self.lora = LoraFusion(parts.module)
        self._seed: int | None = None
        self._states: Mapping[str, Any] | None = None

    def _paged_config(self) -> DeepSpeedInferenceConfig:
        graphs, device = self._config.enable_cuda_graph, self._parts.device.type
        if graphs and (device != "cuda" or self._parts.precision.autocast is not None):
            why = f"{device} has no graphs of kernels" if device != "cuda" else "autocast casts weights outside of them"
            log_dist(f"hybrid_engine.enable_cuda_graph: no effect: {why}")
            graphs = False
        ragged = RaggedInferenceEngineConfig(cuda_graphs=graphs)
        return DeepSpeedInferenceConfig(max_out_tokens=self._config.max_out_tokens, ragged=ragged)

    # ---- calls

    def generate(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], *, keep: bool) -> Any:
        """What Transformers' `generate` returns; by Transformers itself where pages cannot serve it."""

        def make(inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            found = None if self._paged is None else self._paged(*inputs, **kwargs)
            return self._own["generate"](*inputs, **kwargs) if found is None else found

        with self.call(keep=keep):
            return self._made(make, inputs, kwargs)

    def _made(self, make: Call, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a call, in which the ranks that share slices help each other."""
        return make(inputs, kwargs) if self._sliced is None else self._sliced.each(make, inputs, kwargs)

    def generate_batch(self, prompts: Sequence[Sequence[int]], kwargs: Mapping[str, Any], *, keep: bool) -> Any:
        """What Transformers' `generate_batch` returns."""
        if not prompts:
            return {}
        from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

        given = {name: kwargs[name] for name in ("generation_config", "max_new_tokens") if name in kwargs}
        with self.call(keep=keep):
            ids, mask = _padded(prompts, self._parts.device)
            found = self.complete(input_ids=ids, attention_mask=mask, **given)
            if found is None and self._sliced is not None:
                raise UsageError("generate_batch(): this call needs Transformers, which has no slices; use generate()")
            if found is None:
                return self._own["generate_batch"](prompts, **kwargs)
        return {
            name: GenerationOutput(
                name, one.prompt_token_ids, one.token_ids, one.logprobs or [], status=RequestStatus.FINISHED
            )
            for name, one in ((f"req_{one.uid}_{one.index}", one) for one in found)
        }

    def complete(self, **kwargs: Any) -> list[Completion] | None:
        """Inside of a call: continuations with log-probabilities of a call of `generate`; None where pages cannot."""
        paged = self._paged
        return None if paged is None else self._made(lambda _, given: paged.complete(**given), (), kwargs)

    @contextmanager
    def call(self, *, keep: bool = False) -> Iterator[None]:
        """The module as it generates; `keep`: the phase goes on afterwards. See [Note: two spans]."""
        if self._inside:  # Transformers' generate calls others
            yield
            return
        if not self._own:
            raise UsageError(
                f"{type(self._module).__name__} has no generate(); the hybrid engine needs a model of text"
            )
        require_here(self._parts.moved - set(_AWAY), "engine.generate()", trains=False)
        self.open()
        fused = self.lora.active
        with torch.inference_mode(False), ExitStack() as stack:
            if not keep and not fused:
                stack.callback(self.close_phase)
            if self._config.release_inference_cache:
                stack.callback(self.free_cache)
            stack.enter_context(self._random_numbers())
            stack.enter_context(torch.no_grad())
            if self._sliced is None:
                self._prepare(stack, fuse=not fused)
            if self._parts.device.type == "cuda":
                self._kernels.put(stack)
            stack.enter_context(self._parts.precision.forward_context())
            self._inside = True
            stack.callback(setattr, self, "_inside", False)
            yield

    def _prepare(self, stack: ExitStack, *, fuse: bool) -> None:
        """Let the module of training generate; the stack undoes it."""
        stack.enter_context(_evaluating(self._module))
        hooks = self._parts.sharded.hooks
        if hooks is not None:
            stack.enter_context(hooks.paused())
        if fuse:
            self.lora.fuse()
            stack.callback(self.lora.unfuse)

    @contextmanager
    def _random_numbers(self) -> Iterator[None]:
        """Draw from generators of this object: a training's random states stay what they are."""
        seed, before = torch.initial_seed(), capture_states()
        try:
            if seed != self._seed or self._states is None:
                self._seed = seed
                torch.manual_seed(self._shared((seed ^ _OTHER_NUMBERS) % 2**62 + self._parts.layout.samples.rank))
            else:
                restore_states(self._states)
            yield
        finally:
            self._states = capture_states()
            restore_states(before)

    def _shared(self, seed: int) -> int:
        """The seed of the first of the ranks that share layers: they draw the same tokens."""
        tensor = self._parts.layout.tensor
        ranks, axis = (tensor.ranks, tensor) if self._sliced is None else (self._sliced.ranks, self._sliced.axis)
        if axis.size == 1:
            return seed
        told = torch.tensor([seed], device=comm.group_device())
        comm.broadcast(told, src=ranks[0], group=axis.group)
        return int(told)

    # ---- phases

    def fuse(self) -> None:
        """Begin a phase with adapters fused until it ends; slices have them anyway."""
        self.open()
        if self._sliced is None:
            self.lora.fuse()

    @torch.inference_mode(False)  # parameters stay whole in training's modes
    def open(self) -> None:
        """Begin a phase, if none is open: parameters become whole, states leave."""
        if self._open:
            return
        with ExitStack() as stack:
            if self._config.offload_states and self._parts.states is not None and not self._parts.moved:
                move_states(self._parts, _AWAY, OffloadDeviceEnum.cpu, pinned=True, blocking=True)
                stack.callback(return_states, self._parts)
            if self._sliced is not None:
                stack.callback(self._sliced.empty)
                self._sliced.fill()
            else:
                self._gather(stack)
            self._phase = stack.pop_all()
        self._open = True

    def _gather(self, stack: ExitStack) -> None:
        """Make all parameters whole, some layers at a time; refused on all ranks where one has no room."""
        groups = _layers(self._module, self._config.tp_gather_partition_size)
        missing = [shard for group in groups for shard in group if not shard.whole]
        if missing:
            self._require_room(missing)
        for group in groups:
            stack.enter_context(GatheredParameters([shard.param for shard in group]))

    def _require_room(self, missing: list[Shard]) -> None:
        needed = sum(shard.chunk * shard.axis.size * shard.dtype.itemsize for shard in missing)
        free = int(get_accelerator().available_memory())
        short = torch.tensor([needed - free], device=comm.group_device())
        comm.all_reduce(short, op=comm.ReduceOp.MAX)
        if int(short) > 0:
            raise UsageError(
                f"engine.generate() makes {size_text(needed)} of parameters whole, and {size_text(int(short))} of "
                "memory are missing for that on some rank. Set hybrid_engine.inference_tp_size, so that a rank "
                "has a slice of every layer, or hybrid_engine.offload_states."
            )

    def close_phase(self) -> None:
        """End the phase: adapters are taken out, parameters released, states back."""
        if not self._open:
            return
        self.lora.unfuse()
        if self._parts.config.schema.zero_optimization.shards_parameters:
            self.free_cache()  # graphs know where whole parameters were
        self._open = False
        self._phase.close()

    def free_cache(self) -> None:
        """Free keys, values and graphs; the next call makes new ones."""
        if self._paged is not None:
            self._paged.close()

    def close(self) -> None:
        """Let go of everything."""
        self.close_phase()
        self.free_cache()


def _refuse(parts: Parts) -> None:
    """Refuse layouts whose ranks need each other for a token."""
    sequence, experts = parts.layout.sequence.size, parts.experts
    found = ""
    if not parts.kind.whole:
        found = "the stages of a pipeline, each of which has a part of the model"
    elif sequence > 1:
        found = f"sequences that {sequence} ranks share (sequence_parallel_size)"
    elif experts is not None:
        found = "experts that lie on several ranks (expert_parallel)"
    if found:
        raise DeepSpeedConfigError(
            f"hybrid_engine.enabled: generation on {found} is not supported; every rank, or the ranks of "
            "tensor_parallel.autotp_size, must hold a whole model. Leave that key or hybrid_engine out.",
            path="hybrid_engine.enabled",
        )


def _padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask [prompts, longest], padded on the left."""
    longest = max(map(len, prompts))
    ids = [[0] * (longest - len(each)) + [int(token) for token in each] for each in prompts]
    mask = [[0] * (longest - len(each)) + [1] * len(each) for each in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _without_adapters(module: nn.Module) -> nn.Module | None:
    """The model of Transformers in it; None where only its own `generate` knows how it begins."""
    config = getattr(module, "active_peft_config", None)
    if config is not None:
        module = None if config.is_prompt_learning else module.get_base_model()  # type: ignore[assignment,operator]
    return module if hasattr(module, "generation_config") else None


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """All modules in eval mode; afterwards each is as it was."""
    training = [each for each in module.modules() if each.training]
    try:
        for each in training:
            each.training = False
        yield
    finally:
        for each in training:
            each.training = True


def _layers(module: nn.Module, count: int) -> list[list[Shard]]:
    """The shards of the module, in groups of so many repeated layers; what is in none comes first."""
    blocks = [each for every in module.modules() if isinstance(every, nn.ModuleList) for each in every]
    seen: set[int] = set()
    groups: list[list[Shard]] = []

    def take(modules: list[nn.Module]) -> None:
        found = [shard for each in modules for param in each.parameters() if (shard := shard_of(param)) is not None]
        new = {id(shard): shard for shard in found if id(shard) not in seen}
        seen.update(new)
        if new:
            groups.append(list(new.values()))

    for first in range(0, len(blocks), count):
        take(blocks[first : first + count])
    take([module])
    return groups


_BUCKET = 64 << 20
Call = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]


class SlicedModel:
    """A model's architecture on the ranks of a group, and its weights while a phase lasts."""

    def __init__(self, parts: Parts, base: nn.Module, size: int) -> None:
        world, rank = comm.get_world_size(), comm.get_rank()
        if world % size or parts.layout.tensor.size > 1:
            found = f"{world} ranks" if world % size else "tensor_parallel.autotp_size, by which training splits layers"
            raise DeepSpeedConfigError(
                f"hybrid_engine.inference_tp_size is {size}, which does not go with {found}. Set it to a divisor of "
                "the number of ranks, or to 1 where training splits layers.",
                path="hybrid_engine.inference_tp_size",
            )
        groups = [list(range(first, first + size)) for first in range(0, world, size)]
        self.ranks = groups[rank // size]
        self.axis = [GroupMembers(comm.new_group(each)) for each in groups][rank // size]
        self._parts, self._base = parts, base
        self.model = self._split()

    def _split(self) -> nn.Module:
        """The model cut into slices, without memory but for its buffers, which are those of training."""
        from accelerate import init_empty_weights

        with init_empty_weights(include_buffers=False):
            model: nn.Module = type(self._base)(self._base.config)
        model.tie_weights()  # type: ignore[operator]
        model.to(self._parts.precision.param)
        split(model, self.axis, TPTrainingConfig(autotp_size=self.axis.size))
        own = dict(self._base.named_modules())
        for name, module in model.named_modules():
            if module._buffers:
                module._buffers = dict(own[name]._buffers)
        model.generation_config = self._base.generation_config
        return model.eval().requires_grad_(False)

    def fill(self) -> None:
        """Take memory, and this rank's slice of every parameter; all ranks of the world call this."""
        self._place(self._parts.device)
        for bucket in WeightBuckets(self._parts, _BUCKET, None, merge=True):
            weights.update(self.model, bucket, self.axis)

    def empty(self) -> None:
        """Give the memory back."""
        self._place(torch.device("meta"))

    def _place(self, device: torch.device) -> None:
        """Put new parameters without values in the place of all, tied ones tied."""
        made: dict[Tensor, nn.Parameter] = {}
        for module in self.model.modules():
            for name, param in module._parameters.items():
                if param is not None:
                    if param not in made:
                        made[param] = nn.Parameter(torch.empty_like(param, device=device), False)
                    module._parameters[name] = made[param]

    def each(self, call: Call, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Make the calls of all ranks of the group, one after the other; the result of this rank's own."""
        told: list[Any] = [None] * self.axis.size
        comm.all_gather_object(told, _moved((inputs, dict(kwargs)), torch.device("cpu")), group=self.axis.group)
        results = [call(*_moved(each, self._parts.device)) for each in told]
        return results[self.axis.rank]


def _moved(value: Any, device: torch.device) -> Any:
    """The same with its tensors on another device."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)
