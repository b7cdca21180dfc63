"""`deepspeed.checkpointing`: run a part of a model without keeping its activations, and run it again in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepspeed.runtime import rng
from deepspeed.runtime.activation_checkpointing.call import InnerBackward, recompute_by, run
from deepspeed.runtime.activation_checkpointing.configuration import (
    CONFIGURATION,
    ConfigurationSource,
    configure_from,
    given_settings,
    model_axis,
    section_of,
)
from deepspeed.runtime.activation_checkpointing.offload import CheckpointingError
from deepspeed.runtime.rng import CudaRNGStatesTracker, RandomStateError, get_cuda_rng_tracker

__all__ = [
    "CheckpointingError",
    "CudaRNGStatesTracker",
    "RandomStateError",
    "checkpoint",
    "configure",
    "configure_from",
    "detach_variable",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "recompute",
    "reset",
    "set_num_layers",
]


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `function(*args, **kwargs)` returns; of its activations only the inputs are kept.

    Backward runs the function again, from the same random states and under the same autocast. As with torch's
    reentrant variant, an input must require grad and gradients come from `backward()` alone; unlike it, tensors in
    tuples, lists and dicts are followed, in arguments and in results. `use_reentrant=False` chooses the other
    variant and `preserve_rng_state=False` spares the random states, as in torch; all other keywords are the
    function's.
    """
    reentrant = bool(kwargs.pop("use_reentrant", True))
    preserve = bool(kwargs.pop("preserve_rng_state", True))
    return run(CONFIGURATION.plan, function, args, kwargs, reentrant=reentrant, preserve_rng_state=preserve)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As `checkpoint`, without its limits: no input need require grad, and `torch.autograd.grad` works."""
    return run(CONFIGURATION.plan, function, args, kwargs, reentrant=False)


def recompute(function: Callable[..., Any], backward: InnerBackward, *args: Any) -> Any:
    """As the reentrant `checkpoint`, with a backward of the caller's own: `backward(outputs, grads, inputs)`."""
    return recompute_by(CONFIGURATION.plan, function, backward, args)


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Say how inputs are kept from now on; None leaves a setting to the config, and the group to the engine.

    The arguments come before the section of `deepspeed_config`, and that before the section of an engine's config.
    Each call replaces what earlier calls said.
    """
    arguments = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    values = {} if deepspeed_config is None else given_settings(section_of(deepspeed_config))
    values.update({key: value for key, value in arguments.items() if value is not None})
    CONFIGURATION.say(ConfigurationSource(values, None if mpu_ is None else model_axis(mpu_)))


def is_configured() -> bool:
    """True once `configure` was called. The config section of an engine applies without that."""
    return CONFIGURATION.is_explicit


def reset() -> None:
    """Free the contiguous buffers, for a while of evaluation say; the configuration stays."""
    CONFIGURATION.free_buffers()


def set_num_layers(nlayers: int) -> None:
    """The number of checkpointed calls in one forward pass, until `configure` gives another."""
    CONFIGURATION.switch("number_checkpoints", nlayers)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Whether saved inputs are sharded over the model-parallel ranks, until `configure` says otherwise."""
    CONFIGURATION.switch("partition_activations", partition_activation)


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device's generator with `seed`, and the model-parallel state with seed + 2718 + tensor rank."""
    rng.seed_model_parallel(seed, CONFIGURATION.plan.axis.rank)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the model-parallel state anew with seed + 2718 + tensor rank; everything else stays."""
    rng.reseed_model_parallel(seed, CONFIGURATION.plan.axis.rank)


def detach_variable(inputs: tuple[Any, ...], device: torch.device | str | None = None) -> tuple[Any, ...]:
    """The tuple with its tensors cut from their graph, each requiring grad as before; on `device` if that is given."""
    if not isinstance(inputs, tuple):
        raise CheckpointingError(f"detach_variable got a {type(inputs).__name__}; it takes a tuple")

    def detach(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        moved = value.detach() if device is None else value.detach().to(device)
        return moved.requires_grad_(value.requires_grad)

    return tuple(detach(value) for value in inputs)
