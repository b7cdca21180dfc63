"""Whether an optimizer here can go on with the optimizer states of a checkpoint.

No file says which class wrote it, DeepSpeed's least of all; but its states and its options tell. Classes that keep the
same states by the same options, such as the Adams of torch and of this library, are taken for one optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from logging import WARNING
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from deepspeed.errors import CheckpointError
from deepspeed.log import log_dist
from deepspeed.ops.optimizer import BatchOptimizer

__all__ = ["expected_kinds", "fitting", "rates", "require_match", "tell_of_rates"]

# Options that say how an update is computed or where it is listed, not which update it is.
_SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum", "step")
_LISTED = ("params", "param_names", "name", "use_muon", "weight_decay", "amsgrad", "bias_correction")
_COMPUTED = ("foreach", "fused", "maximize", "capturable", "differentiable", "decoupled_weight_decay")
_NEUTRAL = frozenset((*_SCHEDULED, *_LISTED, *_COMPUTED))
_WRITERS = {
    ("exp_avg", "exp_avg_sq"): "an optimizer like Adam or AdamW",
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"): "Adam or AdamW with amsgrad",
    ("exp_avg",): "an optimizer like Lion",
    ("momentum_buffer",): "an optimizer like SGD with momentum",
    ("sum",): "an optimizer like Adagrad",
    ("square_avg",): "an optimizer like RMSprop",
    (): "an optimizer without states, like SGD",
}


def expected_kinds(optimizer: Optimizer) -> frozenset[str] | None:
    """The states of a parameter's shape that the optimizer keeps; None if that cannot be told without training."""
    if isinstance(optimizer, BatchOptimizer):
        return frozenset(optimizer.moments)
    found = frozenset(kind for param, state in optimizer.state.items() for kind in _shaped(state, param))
    if found:
        return found
    if isinstance(optimizer, LBFGS) or not type(optimizer).__module__.startswith("torch.optim."):
        return None
    return _tried(optimizer)


def _tried(optimizer: Optimizer) -> frozenset[str] | None:
    """By a step over a parameter of its own; the optimizer is as before then."""
    first = next((param for group in optimizer.param_groups for param in group["params"]), None)
    if first is None:
        return None
    trial = nn.Parameter(torch.zeros(2, 2, device=first.device))
    trial.grad = torch.zeros_like(trial)
    groups, states = optimizer.param_groups, optimizer.state
    optimizer.param_groups, optimizer.state = [{**groups[0], "params": [trial]}], defaultdict(dict)
    try:
        type(optimizer).step(optimizer)
        return _shaped(optimizer.state[trial], trial)
    except (RuntimeError, TypeError, ValueError):
        return None  # one that cannot be tried is not judged by this
    finally:
        optimizer.param_groups, optimizer.state = groups, states


def _shaped(state: Mapping[str, Any], param: Tensor) -> frozenset[str]:
    return frozenset(key for key, value in state.items() if isinstance(value, Tensor) and value.shape == param.shape)


def require_match(optimizer: Optimizer, kinds: Iterable[str], saved: Iterable[Mapping[str, Any]]) -> None:
    """Refuse states of another optimizer; `kinds` are those that were saved, `saved` the options of its groups."""
    found, expected = frozenset(kinds), expected_kinds(optimizer)
    theirs = {key for options in saved for key in options} - _NEUTRAL
    ours = {key for options in optimizer.param_groups for key in options} - _NEUTRAL
    if not theirs:
        return
    foreign, lacking = theirs - ours, ours - theirs
    other = bool(foreign and lacking)
    if found and expected is not None and found != expected:
        needed = isinstance(optimizer, BatchOptimizer) or bool(found - expected)
        other = other or bool(foreign or lacking) or bool(needed and expected - found)
    if not other:
        return
    writer = _WRITERS.get(tuple(sorted(found)), "another optimizer")
    name = type(optimizer).__name__
    needs = "" if expected is None else f", which keeps {', '.join(sorted(expected)) or 'no states'}"
    raise CheckpointError(
        f"the optimizer states of this checkpoint were written by {writer} "
        f"(states {', '.join(sorted(found)) or 'none'}; options {', '.join(sorted(theirs))}), "
        f"but this engine trains with {name}{needs}. Resume with the optimizer that wrote it, or pass "
        "load_optimizer_states=False to load the weights and begin with a new optimizer."
    )


def fitting(saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a saved group that the optimizer here knows too."""
    return {key: value for key, value in saved.items() if key in own or key in ("initial_lr", "step")}


def rates(optimizer: Optimizer | None) -> list[Any]:
    """The learning rate of each group."""
    return [] if optimizer is None else [group.get("lr") for group in optimizer.param_groups]


def tell_of_rates(optimizer: Optimizer | None, before: list[Any]) -> None:
    """A learning rate that was edited in the config does not survive a resume, which is told where nothing sets it."""
    if optimizer is None or any("initial_lr" in group for group in optimizer.param_groups):
        return  # a schedule of the caller's sets it
    changed = [(old, new) for old, new in zip(before, rates(optimizer), strict=True) if old != new]
    if changed:
        old, new = changed[0]
        log_dist(
            f"the learning rate of the checkpoint, {new}, replaces that of the optimizer as it was built, {old}. To "
            "train with the latter, pass load_optimizer_states=False, or set 'lr' in engine.optimizer.param_groups "
            "after the load.",
            level=WARNING,
        )
