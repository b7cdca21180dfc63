"""`deepspeed.init_inference` and the engine that it makes of any module."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.config.inference import DeepSpeedInferenceConfig, idle_keys, read_inference_config
from deepspeed.config.read import ConfigSource
from deepspeed.errors import UsageError
from deepspeed.generate.graphs import GraphedModule
from deepspeed.generate.paged import PagedGenerate
from deepspeed.inference.modules import parts_of
from deepspeed.inference.prepare import Prepared, prepare
from deepspeed.log import log_dist
from deepspeed.transformers.replacement import put_whole, replacement


class InputTooLong(UsageError, RuntimeError):
    """A prompt has more tokens than `max_out_tokens`."""


def init_inference(model: Any, config: ConfigSource | DeepSpeedInferenceConfig | None = None, **kwargs: Any) -> Any:
    """An `InferenceEngine` of a module; the keys of the config can be given as arguments.

    Of an object that is no module, such as a pipeline of Diffusers, the parts that are modules become such, and the
    same object comes back.
    """
    read = read_inference_config(DeepSpeedInferenceConfig, config, kwargs)
    if isinstance(model, nn.Module):
        return InferenceEngine(model, read)
    parts = parts_of(model)
    if not parts:
        raise UsageError(
            f"init_inference takes a torch.nn.Module, or an object whose attributes are some; found "
            f"{type(model).__name__} without any"
        )
    for part in parts.values():
        _attach(part, read)
    return model


def default_inference_config() -> dict[str, Any]:
    """The keys of `init_inference` with their defaults."""
    return DeepSpeedInferenceConfig().model_dump()


class InferenceEngine(nn.Module):
    """A module as the config wants it for inference; what the engine has not, the module answers."""

    def __init__(self, model: nn.Module, config: DeepSpeedInferenceConfig | Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._config = read_inference_config(DeepSpeedInferenceConfig, config)
        self._times: list[float] | None = None
        self._compiled = False
        with ExitStack() as stack:
            self._prepared = prepare(model, self._config, stack)
            self._undo = stack.pop_all()
        self.module = model
        for line in idle_keys(self._config):
            log_dist(line)
        self._graphs = _graphs(model, self._config, self._prepared)
        self._paged = _paged(model, self._config, streams=self._prepared.stream is not None)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            return getattr(module, name)

    @property
    def config(self) -> Any:
        """The model's own, as clients of its class expect."""
        return getattr(self.module, "config", self._config)

    @property
    def mp_world_size(self) -> int:
        """Ranks that share layers."""
        return 1 if self._prepared.axis is None else self._prepared.axis.size

    @property
    def dtype(self) -> torch.dtype:
        """Of the computation."""
        return self._prepared.dtype

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self._prepared.device

    @torch.no_grad()
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the module computes."""
        call = self.module if self._graphs is None else partial(self._graphs, self.module)
        return self._timed(call, inputs, kwargs)

    def _timed(self, call: Callable[..., Any], inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._times is None:
            return call(*inputs, **kwargs)
        get_accelerator().synchronize()
        start = time.perf_counter()
        result = call(*inputs, **kwargs)
        get_accelerator().synchronize()
        self._times.append((time.perf_counter() - start) * 1000)
        return result

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Measure every forward from now on; the device is waited for, whichever clock was meant."""
        self._times = [] if self._times is None else self._times

    def model_times(self) -> list[float]:
        """Milliseconds of the forwards since the last call."""
        if self._times is None:
            raise UsageError("model_times(): nothing is measured; call profile_model_time() before the forwards")
        found, self._times = self._times, []
        return found

    def compile(self, backend: str = "inductor", compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """Compile the module by torch.compile."""
        self.module.compile(backend=backend, **dict(compile_kwargs or {}))
        self._compiled = True

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return self._compiled

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """What Transformers' `generate` takes and returns."""
        own = getattr(self.module, "generate", None)
        if own is None:
            raise UsageError(f"{type(self.module).__name__} has no generate(); call the engine for a forward")
        self._check_length(inputs, kwargs)
        with torch.no_grad():
            if self._paged is not None and (found := self._paged(*inputs, **kwargs)) is not None:
                return found
            return own(*inputs, **kwargs)

    def _check_length(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = next((kwargs[name] for name in ("input_ids", "inputs") if kwargs.get(name) is not None), None)
        given = inputs[0] if given is None and inputs else given
        if getattr(self.module.config, "is_encoder_decoder", False) or not isinstance(given, torch.Tensor):
            return
        if given.shape[-1] > self._config.max_out_tokens:
            raise InputTooLong(
                f"the prompt has {given.shape[-1]} tokens, more than max_out_tokens ({self._config.max_out_tokens}); "
                "give init_inference a larger max_out_tokens"
            )

    def destroy(self) -> None:
        """Free graphs and caches, and take replaced computations back; the module stays as it was split and cast."""
        if self._graphs is not None:
            self._graphs.clear()
            self._graphs = None
        if self._paged is not None:
            self._paged.close()
        self._undo.close()


def _attach(part: nn.Module, config: DeepSpeedInferenceConfig) -> None:
    """Prepare a part of a pipeline object in place; graphs run before its own forward."""
    with ExitStack() as stack:
        made = prepare(part, config, stack)
        stack.pop_all()
    graphs = _graphs(part, config, made)
    if graphs is not None:
        own = replacement(part) or type(part).forward
        put_whole(part, lambda module, *args, **kwargs: graphs(partial(own, module), *args, **kwargs))


def _paged(model: nn.Module, config: DeepSpeedInferenceConfig, *, streams: bool) -> PagedGenerate | None:
    """What generates text for models of Transformers; None for others."""
    generates = callable(getattr(model, "generate", None)) and hasattr(model, "generation_config")
    return PagedGenerate(model, config, streams=streams) if generates else None


def _graphs(model: nn.Module, config: DeepSpeedInferenceConfig, made: Prepared) -> GraphedModule | None:
    """What captures and replays the forwards of a model; None where the config or the device has none."""
    if not config.enable_cuda_graph:
        return None
    why = "a CPU has no graphs of kernels" if made.device.type == "cpu" else None
    if made.stream is not None:
        why = "weights that stream to the device are at other addresses in each forward"
    if why is not None:
        log_dist(f"enable_cuda_graph: no effect: {why}")
    return GraphedModule(model) if why is None else None
