"""Which optimizer and which schedule an engine uses: the caller's, made or to be made, else the config's."""

from __future__ import annotations

from collections.abc import Callable
from logging import WARNING
from typing import Any

from torch import nn
from torch.optim import Optimizer

from deepspeed.config.optimizer import SchedulerConfig
from deepspeed.config.schema import Schema
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.log import log_dist
from deepspeed.ops.muon import tag_attention_heads
from deepspeed.runtime.lr_schedules import build_scheduler
from deepspeed.runtime.step.optimizers import build_optimizer
from deepspeed.zero.agreement import Hosts
from deepspeed.zero.states.afar import in_one_pass

__all__ = ["choose_optimizer", "choose_scheduler", "tell_if_frozen", "tell_without_optimizer"]


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


def tell_without_optimizer(schema: Schema, training_data: Any) -> None:
    """Where something was asked for that only training needs, say now what `step` would say after a whole backward."""
    stage = int(schema.zero_optimization.stage)
    asked = [f"zero_optimization.stage {stage} spreads the states of an optimizer"] if stage in (1, 2) else []
    asked += ["training_data was given"] if training_data is not None else []
    if asked:
        log_dist(
            f"there is no optimizer, although {' and '.join(asked)}: engine.step() will be an error. Add the section "
            "'optimizer' to the config, or pass optimizer=... to deepspeed.initialize.",
            level=WARNING,
        )


def tell_if_frozen(module: nn.Module, optimizer: Optimizer | None, stages: Hosts | None = None) -> None:
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
