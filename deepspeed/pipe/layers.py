"""The layers of a pipeline: specs that are built where they are needed, and which layers make up a stage."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import PipelineError, UsageError
from deepspeed.log import logger
from deepspeed.parallel.balance import partition_balanced, partition_uniform
from deepspeed.pipe.messages import MessageForm, flatten, map_tensors
from deepspeed.pipe.model_layers import ModelLayer
from deepspeed.zero.parameters.nested_tensors import tensors_in


class LayerSpec:
    """A class of modules and what to build one with: `LayerSpec(nn.Linear, 8, 8)`."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise UsageError(
                f"{type(self).__name__} takes a class of torch.nn.Module and its arguments; found {typename!r}"
            )
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs
        self.global_rank = -1

    def build(self, log: bool = False) -> nn.Module:
        if log:
            logger.info("rank %s builds %r", self.global_rank, self)
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        words = [*map(repr, self.module_args), *(f"{name}={value!r}" for name, value in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(words)})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares weights with the others of its key, on whichever stages they are."""

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        """`forward_fn(module, inputs)` runs in place of the module's forward; `tied_weight_attr`: what is shared."""
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


class RemoteLayer:
    """A module that another rank has: its name is all that remains."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: Any) -> Any:
        raise UsageError(f"the layer {self.__name__} lies on another stage")


Layer = nn.Module | LayerSpec | Callable[..., Any]
"""What a pipeline is made of."""


def name_of(layer: Any) -> str:
    """The name by which a layer is matched and shown: its class, or its function."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    if isinstance(layer, nn.Module):
        return type(layer).__name__
    return str(getattr(layer, "__name__", type(layer).__name__))


_ROUNDS = 3  # the first warms up, the fastest of the rest counts


def bounds_of(
    method: str, layers: Sequence[Layer], stages: int, example: Any = None, *, count: Callable[[], list[int]]
) -> list[int]:
    """The first layer of every stage, and the number of layers; `count` tells the trained parameters of each."""
    kind = method.lower()
    if len(layers) < stages:
        raise UsageError(
            f"{len(layers)} layers cannot make {stages} stages, of which each has at least one; use fewer stages or "
            "more layers"
        )
    if kind == "uniform":
        return partition_uniform(len(layers), stages)
    if kind == "parameters":
        return partition_balanced(count(), stages)
    if kind.startswith("type:"):
        return partition_balanced(_matches(method[len("type:") :], layers), stages)
    if kind == "profile":
        return partition_balanced(_agreed(lambda: measure_layers(layers, example), len(layers)), stages)
    raise UsageError(
        f"partition_method {method!r} is not known; expected 'uniform', 'parameters', 'type:REGEX' or 'profile'"
    )


def trained_parameters(layer: Layer) -> int:
    """Trained parameters of a layer; one that is not built yet is built without memory to count them."""
    if isinstance(layer, (nn.Module, ModelLayer)):
        return sum(param.numel() for param in layer.parameters() if param.requires_grad)
    if isinstance(layer, LayerSpec):
        try:
            with torch.device("meta"):
                built = layer.build()
        except RuntimeError:  # its constructor looks at values: build it, for a moment
            with torch.random.fork_rng(devices=[]):
                built = layer.build()
        return trained_parameters(built)
    return 0


def _matches(pattern: str, layers: Sequence[Layer]) -> list[int]:
    try:
        compiled = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise UsageError(f"partition_method 'type:{pattern}' is no regular expression: {error}") from error
    weights = [int(compiled.search(name_of(layer)) is not None) for layer in layers]
    if not any(weights):
        names = ", ".join(sorted({name_of(layer) for layer in layers}))
        raise UsageError(f"partition_method 'type:{pattern}' matches none of the layers, which are {names}")
    return weights


def measure_layers(layers: Sequence[Layer], example: Any) -> list[float]:
    """Seconds of forward and backward of each layer, in a row that begins with `example`; one layer lives at a time."""
    if example is None:
        raise UsageError(
            "partition_method 'profile' runs every layer to measure it: pass PipelineModule(..., example_input=...), "
            "what the first layer takes for one micro-batch"
        )
    device = torch.device(get_accelerator().current_device_name())
    inputs, times = map_tensors(example, lambda tensor: tensor.to(device)), []
    tied: dict[str, nn.Module] = {}
    with torch.random.fork_rng(devices=[]):
        for number, layer in enumerate(layers):
            call = callable_of(layer, tied, device)
            try:
                spent, inputs = _timed(call, inputs)
            except Exception as error:
                raise UsageError(
                    f"partition_method 'profile': layer {number} ({name_of(layer)}) failed: {error}"
                ) from error
            times.append(spent)
    return times


def callable_of(
    layer: Layer, tied: dict[str, nn.Module] | nn.ModuleDict, device: torch.device | None = None
) -> Callable[..., Any]:
    """What a layer is called by, built if it has to be, on a device if one is given; `tied`: what keys have so far."""
    if isinstance(layer, TiedLayerSpec):
        if layer.key not in tied:
            tied[layer.key] = _on(device, layer.build())
        forward, module = layer.forward_fn, tied[layer.key]
        return module if forward is None else partial(forward, module)
    if isinstance(layer, LayerSpec):
        return _on(device, layer.build())
    return _on(device, layer) if isinstance(layer, nn.Module) else layer


def _on(device: torch.device | None, module: nn.Module) -> nn.Module:
    return module if device is None else module.to(device)


def _timed(call: Callable[..., Any], inputs: Any) -> tuple[float, Any]:
    accelerator, spent = get_accelerator(), []
    for _ in range(_ROUNDS):
        accelerator.synchronize()
        began = time.perf_counter()
        outputs = call(inputs)
        roots = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        accelerator.synchronize()
        spent.append(time.perf_counter() - began)
    for param in call.parameters() if isinstance(call, (nn.Module, ModelLayer)) else ():
        param.grad = None
    return min(spent[1:]), map_tensors(outputs, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))


def _agreed(measure: Callable[[], list[float]], count: int) -> list[float]:
    """The first rank's times on every rank, since all must cut at the same places; its error, too."""
    error: UsageError | None = None
    told = torch.full((count,), -1.0, dtype=torch.float64)
    if comm.get_rank() == 0:
        try:
            told = torch.tensor(measure(), dtype=torch.float64)
        except UsageError as caught:
            error = caught
    device = get_accelerator().current_device_name() if comm.get_backend() == "nccl" else "cpu"
    shared = told.to(device)
    comm.broadcast(shared, src=0)
    if error is not None:
        raise error
    if float(shared.min()) < 0:
        raise UsageError("partition_method 'profile' failed on rank 0; its own error says why")
    return [float(each) for each in shared.tolist()]


def is_fake_world() -> bool:
    """Whether nobody answers but this process: torch's backend "fake"."""
    return comm.get_backend() == "fake"


def forms_of_inputs(
    layers: Sequence[Layer], parts: Sequence[int], stages: Sequence[int], example: Any
) -> dict[int, MessageForm]:
    """Stage → the form of what comes into it, for some stages behind the first; layers run without memory or values.

    `example` is what the first layer takes, `parts` where stages begin.
    """
    wanted = {parts[stage]: stage for stage in stages if stage > 0}
    found: dict[int, MessageForm] = {}
    tied: dict[str, Any] = {}
    before: tuple[Any, MessageForm] | None = None
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        value = map_tensors(example, mode.from_tensor)
        for number in range(max(wanted, default=-1) + 1):
            if number in wanted:
                found[wanted[number]] = flatten(value)[0]
            if len(found) == len(wanted):
                break
            known = _kind_and_form(layers[number], value)
            if known is None or known != before:  # else it gives what the one before gave, which is of this form
                value = _through(number, layers[number], value, tied)
            before = known
    return found


def _kind_and_form(layer: Layer, value: Any) -> tuple[Any, MessageForm] | None:
    """What decides the form of a layer's result; None where that is not known."""
    if isinstance(layer, ModelLayer):
        kind: Any = layer.__name__
    elif isinstance(layer, LayerSpec) and not isinstance(layer, TiedLayerSpec):
        kind = layer.typename, repr(layer)
    else:
        return None
    try:
        return kind, flatten(value)[0]
    except PipelineError:  # no message has such a value, but layers of one stage may
        return None


def _through(number: int, layer: Layer, value: Any, tied: dict[str, Any]) -> Any:
    try:
        return callable_of(layer, tied)(value)
    except Exception as error:
        raise UsageError(
            f"layer {number} ({name_of(layer)}) could not run over the shapes of example_input, from which a rank "
            f"among pretended ones knows what it would receive: {error}"
        ) from error
