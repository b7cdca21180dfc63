"""What the library's optimizers share: gradients collected into batches, checks, wide copies.

An update rule is an op over lists of tensors. An optimizer sorts its parameters into batches whose lists have one
device and one dtype each and the same step number, and hands every batch to the op.

[Note: many tensors] A model of tiny layers has thousands of tensors and next to nothing to compute, so that what is
done once per tensor and step in Python is what a step costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed.errors import UsageError
from deepspeed.ops.moments import Group, MomentKeeper, scale_name, wide
from deepspeed.ops.one_pass import Conditions, OnePass

Closure = Callable[[], Any]
TensorLists = Sequence[list[Tensor]]

# Elements that are copied to float32 at once: the copies of a batch never take more than a few hundred megabytes.
WIDE_ELEMENTS = 2**24

# What a parameter group may have of its own, and a rule computes with.
_OF_GROUPS = ("lr", "betas", "eps", "weight_decay", "momentum")

# The place of the gradients among the lists of a batch; they are read, all other lists are written.
_GRADS = 1


@dataclass(slots=True)
class ParameterBatch:
    """Parameters that one call of an update rule takes: lists of one device and one dtype each, and one step number."""

    step: int
    moments: tuple[list[Tensor], ...]
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    factor: float = 1.0
    """Gradients are multiplied by this first."""
    outs: list[Tensor] = field(default_factory=list)
    """Where updated parameters are written as well; empty, or one per parameter."""
    scales: tuple[list[Tensor], ...] = ()
    """The scales of moments that are 8-bit codes; empty for any other."""


class BatchOptimizer(MomentKeeper):
    """Base of the optimizers; a subclass names its moments and updates one parameter group."""

    cpu_only: ClassVar[bool] = False
    """Updates parameters in host memory."""

    takes_sparse: ClassVar[bool] = False
    """Updates the elements of a parameter that a sparse gradient has."""

    one_pass: OnePass | None = None
    """What the next steps do besides; set and cleared by whoever takes them."""

    mixed: bool = False
    """One for host memory also updates parameters on a device: those of an engine that stay there."""

    def takes_one_pass(self, device: torch.device) -> bool:
        """True if steps over parameters on `device` take `one_pass`; the same on all ranks, whatever each holds."""
        return self.cpu_only and (device.type == "cpu" or self.mixed)

    conditions: Conditions | None = None
    """Under which the next steps are taken; set and cleared by whoever takes them."""

    counted: Sequence[dict[str, Any]] = ()
    """The states whose steps were counted under these conditions."""

    def takes_conditions(self, device: torch.device) -> bool:
        """True if a step over parameters on `device` can be taken under `conditions`.

        The answer is the same on all ranks, whatever each of them holds, and also for one that holds nothing.
        """
        return not self.cpu_only and self.takes_one_pass(device)

    @contextmanager
    def under(self, conditions: Conditions) -> Iterator[None]:
        """Steps that are taken inside obey these conditions; `take_back` undoes their count."""
        self.conditions, self.counted = conditions, []
        try:
            yield
        finally:
            self.conditions = None

    def take_back(self) -> None:
        """The last step was skipped by its conditions: do not count it."""
        for state in self.counted:
            state["step"] -= 1
        self.counted = ()

    def _conditions_on(self, device: torch.device) -> Conditions | None:
        return None if self.conditions is None else self.conditions.on(device)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch does; a group's own numbers are checked as those of all are."""
        if isinstance(param_group, dict):
            own = {key: param_group[key] for key in _OF_GROUPS if key in param_group}
            check_hyperparameters(f"{type(self).__name__}, group {len(self.param_groups)}", **own)
        super().add_param_group(param_group)

    def _update_group(self, group: Group) -> None:
        """Apply the rule to every parameter of `group` that has a gradient."""
        for batch in self._batches(group, self.moments):
            self._apply(group, batch)

    def _apply(self, group: Group, batch: ParameterBatch) -> None:
        raise TypeError(f"{type(self).__name__} defines no update rule")

    @torch.no_grad()
    def _step(self, closure: Closure | None, groups: Sequence[Group] | None = None) -> Any:
        """The whole step: the closure's loss, the checks, then every group."""
        loss = evaluate(closure)
        groups = self.param_groups if groups is None else groups
        self._check(groups)
        for group in groups:
            self._update_group(group)
        return loss

    def _check(self, groups: Iterable[Group]) -> None:
        """Refuse what no rule can update, before anything has changed."""
        host = self.one_pass
        for group in groups:
            for param in group["params"]:
                if host is not None:
                    self._check_one_pass(host, param)
                grad = param.grad if host is None else host.gradient(param)
                if grad is None:
                    continue
                if grad.layout is not torch.strided and not (grad.is_sparse and self.takes_sparse):
                    raise RuntimeError(
                        f"{type(self).__name__} found a {grad.layout} gradient of a parameter of shape "
                        f"{tuple(param.shape)}, which it does not take. Turn sparse gradients off in the layer "
                        "(nn.Embedding(sparse=False)), or use torch.optim.SparseAdam or DeepSpeedCPUAdagrad, which "
                        "take those of torch.sparse_coo"
                    )
                if not param.dtype.is_floating_point:
                    raise TypeError(
                        f"{type(self).__name__} updates floating-point parameters, found {param.dtype} of shape "
                        f"{tuple(param.shape)}"
                    )
                if self.cpu_only and not self.mixed and param.device.type != "cpu":
                    raise RuntimeError(
                        f"{type(self).__name__} found a parameter of shape {tuple(param.shape)} on {param.device}; it "
                        "updates parameters on the CPU. Move them there, or use the Fused class of the same name"
                    )

    def _check_one_pass(self, one_pass: OnePass, param: Tensor) -> None:
        if not self.takes_one_pass(param.device):
            raise UsageError(
                f"{type(self).__name__} has a one_pass, which it does not take for parameters on {param.device}; clear "
                "it, or use the DeepSpeedCPU class of the same name for parameters in host memory"
            )
        one_pass.check(param)

    def _gradient(self, param: Tensor) -> Tensor | None:
        return param.grad if self.one_pass is None else self.one_pass.gradient(param)

    def _batches(self, group: Group, names: Sequence[str]) -> list[ParameterBatch]:
        """Advance the step of every parameter with a gradient and sort them into batches; the empty ones have none."""
        host = self.one_pass
        counted: list[dict[str, Any]] = []
        found: dict[tuple[Any, ...], ParameterBatch] = {}
        latest: tuple[Any, ...] | None = None
        for param in group["params"]:
            grad = param.grad if host is None else host.gradient(param)
            if grad is None:
                continue
            state = self.state[param]
            if "step" not in state:
                self._begin(group, param, state, names)
            step = state["step"] + 1
            state["step"] = step
            if self.conditions is not None:
                counted.append(state)
            if not param.numel():
                continue
            coded = state[names[0]].dtype
            out = None if host is None else host.out(param)
            dense = param.is_contiguous() and grad.is_contiguous()
            key = (step, param.device, param.dtype, grad.dtype, coded, dense, out is not None and out.dtype)
            if key != latest:
                latest = key
                batch = found.get(key) or found.setdefault(key, _empty_batch(step, names, coded, host))
            batch.params.append(param)
            batch.grads.append(grad)
            if out is not None:
                batch.outs.append(out)
            for place, name in enumerate(names):
                batch.moments[place].append(state[name])
                if batch.scales:
                    batch.scales[place].append(state[scale_name(name)])
        self.counted = [*self.counted, *counted] if counted else self.counted
        return list(found.values())


def _empty_batch(step: int, names: Sequence[str], moments: torch.dtype, one_pass: OnePass | None) -> ParameterBatch:
    lists: tuple[list[Tensor], ...] = tuple([] for _ in names)
    scales: tuple[list[Tensor], ...] = tuple([] for _ in names) if moments == torch.uint8 else ()
    return ParameterBatch(step, lists, factor=1.0 if one_pass is None else one_pass.factor, scales=scales)


def evaluate(closure: Closure | None) -> Any:
    """The loss that the closure computes; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def refuse(step: str, **given: Any) -> None:
    """Arguments of a `step` that the public signature names, and that no version of it has a use for any more."""
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise RuntimeError(
            f"{step} was given {', '.join(names)}: gradients come from param.grad, already unscaled and clipped. "
            "Leave the argument out; loss scaling and clipping are the engine's (fp16, gradient_clipping)"
        )


def check_hyperparameters(name: str, *, betas: Any = (0.0, 0.0), **amounts: Any) -> None:
    """Refuse what is no number or outside its range: betas are in [0, 1), every other amount is at least 0."""
    for key, value in amounts.items():
        if not 0 <= _as_number(value) < math.inf:
            raise ValueError(f"{name}: {key} is {value!r}; it must be a finite number of at least 0")
    pair = isinstance(betas, (list, tuple)) and len(betas) == 2
    if not pair or not all(0 <= _as_number(beta) < 1 for beta in betas):
        raise ValueError(f"{name}: betas is {betas!r}; it must be two numbers of at least 0 and below 1")


def _as_number(value: Any) -> float:
    """NaN, which is in no range, for what is none: text that looks like one would fail in the first step."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else math.nan
    return math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)


def contiguous(lists: TensorLists) -> bool:
    """True if every tensor is: torch's fused CPU kernels walk memory and do not look at strides."""
    return all(map(Tensor.is_contiguous, chain.from_iterable(lists)))  # no loop of Python's: see [Note: many tensors]


def widely(kernel: Callable[[TensorLists], Any], lists: TensorLists, *, elementwise: bool = True) -> list[Any]:
    """Run `kernel` on float32 copies of the narrower lists and write the results back, rounded once.

    The lists are params, grads and moments. A rule that is not `elementwise` sees whole tensors.
    """
    if not lists[0]:
        return []
    dtype = wide(lists[0][0].dtype)
    if all(tensors[0].dtype == dtype for tensors in lists):
        return [kernel(lists)]
    results = []
    for piece in _pieces(lists, split=elementwise):
        copies = [[tensor.to(dtype) for tensor in tensors] for tensors in piece]
        results.append(kernel(copies))
        for place, (tensors, computed) in enumerate(zip(piece, copies, strict=True)):
            if place != _GRADS and tensors[0].dtype != dtype:
                torch._foreach_copy_(tensors, computed)
    return results


def _pieces(lists: TensorLists, *, split: bool) -> Iterator[list[list[Tensor]]]:
    """The lists in portions of about WIDE_ELEMENTS; larger tensors are cut if that may be."""
    rows: list[tuple[Tensor, ...]] = []
    size = 0
    for row in zip(*lists, strict=True):
        parts: Iterable[tuple[Tensor, ...]] = [row]
        if split and row[0].numel() > WIDE_ELEMENTS and all(tensor.is_contiguous() for tensor in row):
            parts = zip(*(tensor.view(-1).split(WIDE_ELEMENTS) for tensor in row), strict=True)
        for part in parts:
            if rows and size + part[0].numel() > WIDE_ELEMENTS:
                yield [list(column) for column in zip(*rows, strict=True)]
                rows, size = [], 0
            rows.append(part)
            size += part[0].numel()
    yield [list(column) for column in zip(*rows, strict=True)]
