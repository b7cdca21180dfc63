"""Which optimizer and schedule an engine uses (the caller's, else the config's), and the optimizer it returns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from logging import WARNING
from typing import Any

from torch import nn
from torch.optim import Optimizer

from deepspeed.config.data import LayerTokenLRConfig
from deepspeed.config.optimizer import SchedulerConfig
from deepspeed.config.schema import Schema
from deepspeed.data.random_ltd import RandomLTDScheduler
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.log import log_dist
from deepspeed.ops.muon import tag_attention_heads
from deepspeed.runtime.base_optimizer import MixedPrecisionOptimizer, ZeroOptimizer
from deepspeed.runtime.lr_schedules import LayerTokenLR, build_scheduler
from deepspeed.runtime.parts import Parts
from deepspeed.runtime.place_module import spread
from deepspeed.runtime.step.optimizers import build_optimizer
from deepspeed.runtime.step.stepper import Stepper
from deepspeed.zero.interface import OptimizerStates, ParameterOffload, RankAgreement, StateOwner, attach, in_one_pass


def watch_modes(optimizer: Optimizer, states: OptimizerStates, stack: ExitStack) -> None:
    """Watch `train` and `eval` of a schedule-free optimizer over masters until the stack is closed.

    Clients call them on the optimizer itself. Comparing version counters before the next forward would find the
    exchange too, but ranks that hold no element would not, and publishing needs all of them.
    """

    def followed(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def follow(*args: Any, **kwargs: Any) -> Any:
            states.adopt_edits()
            result = method(*args, **kwargs)
            states.publish()
            return result

        return follow

    for name in ("train", "eval"):
        if callable(method := getattr(optimizer, name, None)):
            setattr(optimizer, name, followed(method))
            stack.callback(vars(optimizer).pop, name, None)


def choose_optimizer(
    schema: Schema,
    given: Optimizer | Callable[..., Optimizer] | None,
    parameters: list[Any] | None,
    module: nn.Module,
) -> Optimizer | None:
    """The client's optimizer, else the one of the config, else None."""
    section = schema.optimizer
    offloaded = schema.zero_optimization.offloads_optimizer or schema.memory.device is not None
    if isinstance(given, Optimizer):
        return _fit_for_host(schema, given)
    if parameters is None:
        parameters = list(module.parameters())  # frozen ones too: they may be unfrozen later
    if given is not None:
        made = given(parameters)
        if not isinstance(made, Optimizer):
            raise UsageError(
                f"optimizer: the callable given to deepspeed.initialize returned {type(made).__name__}; it takes the "
                "parameters and returns a torch.optim.Optimizer"
            )
        return _fit_for_host(schema, made)
    if section.type is None or not parameters:
        if section.type is not None and next(module.parameters(), None) is not None:
            log_dist(
                f"optimizer: no {section.type} is made, because model_parameters is empty. Are all parameters frozen?",
                level=WARNING,
            )
        return None
    if section.params.get("per_head_muon"):
        tag_attention_heads(module)
    return build_optimizer(
        section,
        parameters,
        named_parameters=list(module.named_parameters()),
        offloaded=offloaded,
        bf16_states=offloaded and schema.bf16.bf16_optimizer_states,
    )


def _fit_for_host(schema: Schema, given: Optimizer) -> Optimizer:
    """Refuse a client's optimizer that is slow in host memory, unless the config says that it may be."""
    if schema.zero_optimization.offloads_optimizer and schema.zero_force_ds_cpu_optimizer and not in_one_pass(given):
        raise DeepSpeedConfigError(
            f"zero_optimization.offload_optimizer: {type(given).__name__} would update states in host memory with "
            "operations that pass over it several times. Use deepspeed.ops.adam.DeepSpeedCPUAdam (or "
            "DeepSpeedCPULion, DeepSpeedCPUAdagrad), or set zero_force_ds_cpu_optimizer to false.",
            path="zero_force_ds_cpu_optimizer",
        )
    return given


def require_real(optimizer: Optimizer, module: nn.Module) -> None:
    """Refuse trained parameters of complex numbers, which no norm, update or shard of ours knows."""
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for name, param in module.named_parameters():
        if param.is_complex() and param.requires_grad and id(param) in held:
            raise UsageError(
                f"{name} is a trained parameter of {param.dtype}, and trained parameters are real numbers. Make "
                f"torch.view_as_real({name}) the parameter and call torch.view_as_complex on it in forward."
            )


def warn_without_optimizer(schema: Schema, training_data: Any) -> None:
    """Where something was asked for that only training needs, say now what `step` would say after a whole backward."""
    zero = schema.zero_optimization
    only = zero.shards_states and not zero.shards_parameters
    asked = [f"zero_optimization.stage {int(zero.stage)} spreads the states of an optimizer"] if only else []
    asked += ["training_data was given"] if training_data is not None else []
    if asked:
        log_dist(
            f"there is no optimizer, although {' and '.join(asked)}: engine.step() will be an error. Add the section "
            "'optimizer' to the config, or pass optimizer=... to deepspeed.initialize.",
            level=WARNING,
        )


def warn_if_frozen(module: nn.Module, optimizer: Optimizer | None, stages: RankAgreement | None = None) -> None:
    """Say now that there is nothing to train; `stages` are the ranks of a pipeline, which all call this."""
    trained = any(param.requires_grad for param in module.parameters())
    trains = optimizer is not None
    if stages is not None:
        found = stages.exchange([trained, trains], "whether any parameter is trained")
        trained, trains = found.any(dim=0).tolist()
    if trains and not trained:
        log_dist(
            "there is an optimizer, but all parameters of the model are frozen (requires_grad is False): nothing is "
            "trained until some are unfrozen. To evaluate only, leave the optimizer out.",
            level=WARNING,
        )


def choose_scheduler(
    section: SchedulerConfig,
    given: Any,
    given_optimizer: Optimizer | Callable[..., Optimizer] | None,
    optimizer: Optimizer | None,
) -> Any:
    """The client's schedule, made or called with the optimizer, else the one of the config, else None."""
    if given is None:
        if section.type is not None and optimizer is None:
            log_dist(
                "scheduler: no effect, since there is no optimizer whose learning rate it could set", level=WARNING
            )
        return build_scheduler(section, optimizer) if section.type and optimizer else None
    if callable(given) and not hasattr(given, "step"):
        if optimizer is None:
            raise UsageError("lr_scheduler: a callable was given, but there is no optimizer to call it with")
        return given(optimizer)
    if not isinstance(given_optimizer, Optimizer):
        raise UsageError(
            f"lr_scheduler: a ready {type(given).__name__} was given without the optimizer that it acts on. Pass that "
            "optimizer too, or a callable that takes the optimizer and returns the schedule."
        )
    return given


def returned_optimizer(
    parts: Parts, basic: Optimizer, stepper: Stepper, owner: StateOwner, stack: ExitStack
) -> Optimizer | MixedPrecisionOptimizer:
    """The torch optimizer itself where it updates the model's own parameters with unscaled gradients."""
    zero = parts.config.schema.zero_optimization
    plain = not zero.shards_states and not stepper.states.copies
    if plain and parts.scale.value == 1.0 and not parts.scale.dynamic:
        return basic
    watch_modes(basic, stepper.states, stack)
    axis = parts.layout.samples
    common: dict[str, Any] = {
        "backward": parts.backward.run,
        "clip_grad": parts.config.schema.gradient_clipping,
        "extend": partial(_extend, parts, owner),
    }
    if not zero.shards_states:
        return MixedPrecisionOptimizer(basic, stepper, parts.scale, **common)
    made = ZeroOptimizer(basic, stepper, parts.scale, **common, axis=axis)
    if zero.shards_parameters:
        made.resting = parts.sharded.resting
        made.parameter_offload = ParameterOffload(parts.module, parts.sharded.hooks)
        stack.callback(made.parameter_offload.close)
    return made


def _extend(parts: Parts, owner: StateOwner, params: list[nn.Parameter]) -> None:
    """Prepare parameters that `add_param_group` brings: equal on all ranks, sharded, hooked, reduced."""
    names = {id(param): name for name, param in parts.module.named_parameters()}
    named = [(names.get(id(param), f"added parameter of shape {tuple(param.shape)}"), param) for param in params]
    spread(named, parts.lies_on)
    attach(params, owner)
    parts.sharded.extend(named)


def schedule_by_tokens(
    section: LayerTokenLRConfig, given: Any, optimizer: Optimizer | None, tokens: RandomLTDScheduler | None
) -> Any:
    """The schedule of `layer_token_lr_schedule`, in place of which there may be no other."""
    path = "data_efficiency.data_routing.random_ltd.layer_token_lr_schedule.enabled"
    if given is not None or optimizer is None or tokens is None:
        found = "there is no optimizer" if given is None else f"{type(given).__name__} sets the learning rate, too"
        raise DeepSpeedConfigError(f"{path} is true, and {found}; set it to false, or change the other", path=path)
    total = section.total_layer_tokens or 1
    return LayerTokenLR(
        optimizer, total, section.warmup_layer_tokens, section.warmup_type, lambda: tokens.consumed_layer_tokens
    )
