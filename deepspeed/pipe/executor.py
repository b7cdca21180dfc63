"""The executor: plays one rank's part of any schedule, with the same forward and backward that an engine runs.

A layer may change its input in place, as `nn.ReLU(inplace=True)` does. Of a leaf that needs a gradient autograd does
not allow that; so layers get the result of an operation that does nothing, over the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from deepspeed.errors import CommError, PipelineError
from deepspeed.events import Phase
from deepspeed.pipe.messages import FAILED, StageLinks, flatten, map_tensors
from deepspeed.pipe.module import PipelineModule
from deepspeed.pipe.schedule.actions import Action, Message, PassKind, Schedule
from deepspeed.pipe.split_backward import WeightBackward, backward_inputs
from deepspeed.runtime.parts import Parts
from deepspeed.runtime.phases import phase

_as_new: Callable[[Tensor, torch.Size], Tensor] = torch.ops.aten._unsafe_view.default
"""The same tensor as one of its own: no view, and what happens to it is not counted as a change of what was given."""


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, value: Tensor) -> Tensor:
        ctx.mark_dirty(value)  # so that it is no view of what was given, and may be changed
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def entered(value: Any, *, shared: bool) -> tuple[Any, list[Tensor]]:
    """(the structure for layers, its leaves that need a gradient, each once).

    Of memory that is `shared` with the stage before, on one rank, autograd must know what changes: that stage may need
    it in its backward. What another rank sent is nobody else's.
    """
    leaves: list[Tensor] = []

    def enter(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        leaves.append(tensor)
        if not shared:
            return _as_new(tensor, tensor.shape)
        value = tensor.detach()
        with _unsafe_preserve_version_counter(value):  # nothing was changed yet
            entering: Tensor = _Enter.apply(tensor, value)  # type: ignore[no-untyped-call]
        return entering

    return (enter(value) if isinstance(value, Tensor) else map_tensors(value, _once(enter))), leaves


def cut_off(value: Any) -> Any:
    """The same structure without what it comes from; its tensors get gradients of their own if they need some."""
    return map_tensors(value, _once(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad)))


def _once(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A tensor that is at two places of a structure stays one tensor."""
    known: dict[int, Tensor] = {}

    def changed(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = change(tensor)
        return known[id(tensor)]

    return changed


# What brings gradients to the same weights as an operation does: I to those that cannot wait, W to the others.
_ALIKE = {
    PassKind.BACKWARD: (PassKind.BACKWARD, PassKind.INPUT, PassKind.WEIGHT),
    PassKind.INPUT: (PassKind.BACKWARD, PassKind.INPUT),
    PassKind.WEIGHT: (PassKind.BACKWARD, PassKind.WEIGHT),
}


@dataclass(frozen=True)
class Pass:
    """One action as a rank runs it."""

    action: Action
    received: Message | None = None  # what another rank sends for it
    sent: Message | None = None  # what it gives to another rank
    final: bool = False  # the weights that it brings gradients to get no more of them
    more: bool = False  # another final pass follows on this rank


def passes_of(schedule: Schedule, rank: int, *, splits: bool) -> list[Pass]:
    """The passes of a rank; where backward is not split, or nobody waits for the inputs' gradients, I is B."""
    row = [each for action in schedule.ranks[rank] for each in _whole(action, splits=splits and action.stage > 0)]
    found: list[Pass] = []
    later: set[tuple[PassKind, int]] = set()
    more = False
    for action in reversed(row):
        alike = _ALIKE.get(action.op, ())
        final = bool(alike) and not any((op, action.stage) in later for op in alike)
        found.append(Pass(action, schedule.received(action), schedule.sent(action), final, more))
        later.add((action.op, action.stage))
        more = more or final
    return found[::-1]


def _whole(action: Action, *, splits: bool) -> list[Action]:
    if splits or action.op in (PassKind.FORWARD, PassKind.BACKWARD):
        return [action]
    return [action._replace(op=PassKind.BACKWARD)] if action.op is PassKind.INPUT else []


_AHEAD = 2  # actions whose receives are posted before one is computed

T = TypeVar("T")

Batch = tuple[Any, Any]
"""What the first stage takes and what the loss is compared with."""


@dataclass(frozen=True)
class Failure:
    action: Action
    error: Exception

    def __str__(self) -> str:
        what = {PassKind.FORWARD: "forward", PassKind.WEIGHT: "backward of weights"}.get(self.action.op, "backward")
        return (
            f"stage {self.action.stage} failed in the {what} of micro-batch {self.action.micro_batch}: "
            f"{type(self.error).__name__}: {self.error}"
        )


@dataclass
class Results:
    """What became of a batch on this rank."""

    losses: list[Tensor] = field(default_factory=list)  # on the last stage: of each micro-batch
    outputs: list[Any] = field(default_factory=list)  # on the last stage, where they are asked for
    loss: float | None = None
    """The mean of those of all ranks, where it was computed on hosts; they tell it when they agree upon the end."""
    extra: list[dict[str, Tensor]] = field(default_factory=list)  # further losses of the module, of each micro-batch
    failed: bool = False  # this stage, or one that it depends on, could not do its part
    failure: Failure | None = None  # what this rank itself could not do


@dataclass
class _Held:
    leaves: list[Tensor]  # inputs for which a gradient goes back
    roots: list[Tensor]  # outputs for which a gradient comes, or the loss


@dataclass
class _Run:
    schedule: Schedule
    batches: Sequence[Batch]
    train: bool
    compute_loss: bool
    keep_outputs: bool
    results: Results = field(default_factory=Results)
    held: dict[tuple[int, int], _Held] = field(default_factory=dict)
    rests: dict[tuple[int, int], WeightBackward] = field(default_factory=dict)
    nearby: dict[tuple[str, int, int], Any] = field(default_factory=dict)  # between two stages of this rank


class Executor:
    """Runs batches through the stages of this rank."""

    def __init__(self, parts: Parts, module: PipelineModule, links: StageLinks, *, splits: bool) -> None:
        """Without `splits` the gradients of weights are computed together with those of inputs."""
        self._parts = parts
        self._module = module
        self._links = links
        self._splits = splits
        self._passes: dict[int, tuple[Schedule, list[Pass]]] = {}
        """By the id of the schedule, which is a long thing to compare."""

    def run(
        self,
        schedule: Schedule,
        batches: Sequence[Batch],
        *,
        ask: Callable[[], None] | None = None,
        before_last: Callable[[], None] | None = None,
        before: Mapping[int, Sequence[Callable[[], Any]]] | None = None,
        compute_loss: bool = True,
        keep_outputs: bool = False,
    ) -> Results:
        """Play a schedule; a failure of this rank is part of the results, and its messages are sent all the same.

        `ask` is called before the first message, and raises if there must not be any; a stage to which nothing comes
        computes before. `before_last` is called before the last pass, when everything that it needs has come; what
        `before` has for the number of a pass is called before that.
        """
        train = not schedule.forward_only
        run = _Run(schedule, batches, train, compute_loss, keep_outputs)
        passes = self._of_this_rank(schedule)
        for place, each in enumerate(passes):
            ahead = passes[place : place + _AHEAD]
            if ask is not None and any(one.received is not None for one in ahead):
                ask()
                ask = None
            self._post(ahead)
            value = self._take(run, each)
            self._announce(each)
            if before_last is not None and place + 1 == len(passes):
                before_last()
            for call in before.get(place, ()) if before else ():
                call()
            result = self._guarded(run, each, value)
            if ask is not None:
                ask()
                ask = None
            self._give(run, each, result)
        for call in before.get(len(passes), ()) if before else ():
            call()
        if train:
            self._parts.reducer.hooks.part()
        self._links.settle()
        return run.results

    def _of_this_rank(self, schedule: Schedule) -> list[Pass]:
        if id(schedule) not in self._passes:
            passes = passes_of(schedule, self._module.stage_id, splits=self._splits)
            self._passes[id(schedule)] = schedule, passes
        return self._passes[id(schedule)][1]

    @property
    def _coordinator(self) -> Any:
        """What gathers parameters; None where they are whole."""
        return self._parts.sharded.coordinator

    def _announce(self, each: Pass) -> None:
        """Tell what gathers parameters which layers run next, and how."""
        coordinator = self._coordinator
        if coordinator is not None:
            coordinator.kind = (each.action.op.value, each.action.stage, each.final, each.more)
            coordinator.inputs_only = each.action.op is PassKind.INPUT

    # ---- messages

    def _post(self, passes: Sequence[Pass]) -> None:
        blocked = set()
        for each in passes:
            message = each.received
            if message is not None and message.channel not in blocked and not self._links.post(message):
                blocked.add(message.channel)

    def _take(self, run: _Run, each: Pass) -> Any:
        """What an action works on: from another rank, from another stage of this one, or nothing."""
        if each.received is not None:
            return self._links.receive(each.received)
        action = each.action
        kind = "activation" if action.op is PassKind.FORWARD else "gradient"
        return run.nearby.pop((kind, action.stage, action.micro_batch), None)

    def _give(self, run: _Run, each: Pass, result: Any) -> None:
        action = each.action
        if each.sent is not None:
            try:
                self._links.send(each.sent, result)
            except PipelineError as error:
                self._fail(run, action, error)
                self._links.send(each.sent, FAILED)
        elif action.op is PassKind.FORWARD and action.stage + 1 < run.schedule.stages:
            cut = result if result is FAILED else cut_off(result)
            run.nearby["activation", action.stage + 1, action.micro_batch] = cut
        elif action.op.passes_back and action.stage > 0:
            run.nearby["gradient", action.stage - 1, action.micro_batch] = result

    # ---- computations

    def _guarded(self, run: _Run, each: Pass, value: Any) -> Any:
        """The result of an action, or FAILED."""
        if value is FAILED:
            run.results.failed = True
        if run.results.failed:
            run.held.clear()
            run.rests.clear()
            self._pass_by(each)
            return FAILED
        try:
            return self._compute(run, each, value)
        except CommError:
            raise
        except Exception as error:  # noqa: BLE001 - the model's own error is raised on all ranks after the batch
            self._fail(run, each.action, error)
            return FAILED

    def _pass_by(self, each: Pass) -> None:
        """Take part in what replicas of this stage do together while they compute and this rank does not."""
        if each.action.op is not PassKind.FORWARD:
            self._passing(each, lambda: None)
        elif self._coordinator is not None:
            self._coordinator.pass_by()

    def _fail(self, run: _Run, action: Action, error: Exception) -> None:
        run.results.failed = True
        if run.results.failure is None:
            run.results.failure = Failure(action, error)

    def _compute(self, run: _Run, each: Pass, value: Any) -> Any:
        if not run.train:
            return self._forward(run, each, value)
        if each.action.op is PassKind.FORWARD:
            with self._phase(Phase.FORWARD, each.action):
                return self._forward(run, each, value)
        with self._phase(Phase.BACKWARD, each.action):
            return self._passing(each, lambda: self._differentiate(run, each.action, value))

    def _passing(self, each: Pass, differentiate: Callable[[], T]) -> T:
        backward = self._parts.backward
        try:
            backward.begin_pass(final=each.final, more=each.more)
            return differentiate()
        finally:
            backward.end_pass()

    def _differentiate(self, run: _Run, action: Action, value: Any) -> list[Tensor | None] | None:
        with self._phase(Phase.BACKWARD_INNER, action):
            if action.op is not PassKind.WEIGHT:
                return self._backward(run, action, value)
            self._weights(run, action)
            return None

    def _phase(self, which: Phase, action: Action) -> AbstractContextManager[None]:
        return phase(self._parts.events, which, self._parts.accumulation, ahead=action.micro_batch)

    def _weights(self, run: _Run, action: Action) -> None:
        rest = run.rests.pop((action.stage, action.micro_batch), None)
        if rest is not None:
            rest.run(None if self._coordinator is None else self._coordinator.before_weights)

    def _forward(self, run: _Run, each: Pass, value: Any) -> Any:
        action, device = each.action, self._parts.device
        leaves: list[Tensor] = []
        if action.stage == 0:
            inputs = map_tensors(run.batches[action.micro_batch][0], lambda t: t.to(device))
        else:
            inputs, leaves = entered(value, shared=each.received is None) if run.train else (value, leaves)
        outputs = self._parts.forward(inputs, stage=action.stage)
        if action.stage == run.schedule.stages - 1:
            return self._finish(run, action, leaves, outputs)
        if run.train:
            run.held[action.stage, action.micro_batch] = _Held(leaves, _trained(outputs))
        return outputs

    def _finish(self, run: _Run, action: Action, leaves: list[Tensor], outputs: Any) -> None:
        """The end of a forward: the loss, and what else was asked for."""
        if run.keep_outputs:
            run.results.outputs.append(map_tensors(outputs, Tensor.detach))
        if not run.compute_loss:
            return
        loss = self._loss(outputs, run.batches[action.micro_batch][1])
        run.results.losses.append(loss.detach().float())
        extra = self._module.get_additional_losses()
        if extra:  # the module may change these for the next micro-batch
            numbers = {name: torch.as_tensor(value).detach().float().clone() for name, value in extra.items()}
            run.results.extra.append(numbers)
        if run.train:
            run.held[action.stage, action.micro_batch] = _Held(leaves, [loss])

    def _loss(self, outputs: Any, labels: Any) -> Tensor:
        loss_fn, device = self._module.loss_fn, self._parts.device
        loss = outputs if loss_fn is None else loss_fn(outputs, map_tensors(labels, lambda t: t.to(device)))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"the shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            source = "the last layer's output, which is the loss without loss_fn," if loss_fn is None else "loss_fn"
            raise PipelineError(f"{source} must give one number; found {found}")
        return loss

    def _backward(self, run: _Run, action: Action, value: Any) -> list[Tensor | None]:
        held = run.held.pop((action.stage, action.micro_batch))
        roots, grads = held.roots, value
        if action.stage == run.schedule.stages - 1:
            if not roots[0].requires_grad:
                raise PipelineError("the loss does not require a gradient: no trained parameter took part in it")
            roots, grads = [self._parts.scale.apply(roots[0] / run.schedule.micro_batches)], [None]
        if roots and action.op is PassKind.INPUT and held.leaves:
            run.rests[action.stage, action.micro_batch] = self._inputs(roots, grads, held.leaves)
        elif roots:
            torch.autograd.backward(roots, grads)
        return [leaf.grad for leaf in held.leaves]

    def _inputs(self, roots: list[Tensor], grads: list[Tensor | None], leaves: list[Tensor]) -> WeightBackward:
        again = WeightBackward()
        self._module.later.collect(again)
        try:
            rest = backward_inputs(roots, grads, leaves)
        finally:
            self._module.later.collect(None)
        rest.junctions += again.junctions
        return rest


def _trained(value: Any) -> list[Tensor]:
    """The tensors of a structure that need a gradient, each once."""
    tensors = [value] if isinstance(value, Tensor) else flatten(value)[1]
    return [tensor for tensor in tensors if tensor.requires_grad]
