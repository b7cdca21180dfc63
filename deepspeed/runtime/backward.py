"""Backward passes, run by the engine or by the user, and what their gradients are worth.

[Note: unit of gradients] The gradients on the parameters are worth `unit` times their value: after
`engine.backward(loss)` they still carry the loss scale, after a plain `loss.backward()` they are not yet divided by
the number of accumulation steps. The optimizer step multiplies once by the unit (together with clipping). Where passes
of both kinds meet in one step, the gradients that are there are brought to the new unit first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from deepspeed.errors import DeepSpeedError, UsageError
from deepspeed.events import EventStream, Phase
from deepspeed.log import warn_once
from deepspeed.precision.scale import LossScale
from deepspeed.runtime.accumulation import Accumulation
from deepspeed.runtime.phases import phase
from deepspeed.zero.interface import GradientReducer, tensors_in, used_while_empty

if TYPE_CHECKING:
    from deepspeed.runtime.step.in_backward import InBackward

# What autograd says where a parameter was empty when it was used, and is whole when its gradient comes.
_EMPTY = re.compile(
    r"invalid gradient at index \d+ - got (\[0\] but|.* compatible with \[0\])"
    r"|size of tensor a \(0\) must match|must match the size of tensor b \(0\)"
    r"|(?P<freed>out of bounds for storage of size 0)"
)
_UNNOTICED = (
    "backward needs a parameter that is sharded and was not gathered for it: hooks on outputs do not see the backward "
    "of what ran inside torch.vmap, torch.func.jvp or torch.func.jacfwd. Run the forward and its backward in `with "
    "deepspeed.zero.GatheredParameters(model.parameters()):`, or train with zero_optimization.stage 2 or lower."
)


class Backward:
    """Scales losses, runs autograd, and has gradients reduced when the micro step is the last one."""

    def __init__(
        self,
        reducer: GradientReducer,
        accumulation: Accumulation,
        scale: LossScale,
        events: EventStream,
        *,
        module: nn.Module,
        listens: bool = True,
    ) -> None:
        """An engine that does not train must not `listen`: another one may train the same parameters."""
        self._reducer = reducer
        self._accumulation = accumulation
        self._scale = scale
        self._events = events
        self.parameters = ModelParameters(module)
        self._running = False
        self._plain_task = -1
        self._scaled_by_user = False
        self.has_gradients = False
        """True between a backward and the step that uses its gradients."""
        self._reduce = False
        self.suspended = False
        """While True gradients only accumulate on this rank."""
        self.unit = 1.0
        """What the gradients are worth; see [Note: unit of gradients]."""
        self.updates: InBackward | None = None
        """What updates parameters while backward runs; None: the step does."""
        if listens:
            reducer.announce(self._plain, self._noticed)

    def run(self, loss: Tensor, *, retain_graph: bool = False, divide: bool = True) -> Tensor:
        """Differentiate `loss`; returns it divided by the number of accumulation steps, without the loss scale."""
        self._check(loss)
        divided = loss / self._accumulation.steps if divide and self._accumulation.steps > 1 else loss
        self._reduce = self._begin(1.0 / self._scale.value)
        scaled = self._scale.apply(divided)
        self._running = True
        try:
            with phase(self._events, Phase.BACKWARD_INNER, self._accumulation):
                handle = scaled.register_hook(self._entered)
                scaled.backward(retain_graph=retain_graph)
                handle.remove()
        except BaseException as error:
            self._reducer.forget()
            if self.updates is not None:
                self.updates.abandon()
            if isinstance(error, RuntimeError) and (said := _EMPTY.search(str(error))):
                raise UsageError(_UNNOTICED if said["freed"] else used_while_empty("a parameter")) from error
            raise
        finally:
            self._running = False
        self._end()
        return divided.detach()

    def begin_pass(self, *, final: bool, more: bool) -> None:
        """The caller runs autograd next, over a part of a model; what it starts with carries the loss scale.

        Gradients that are `final` leave while the pass runs; everything else leaves with the optimizer step. There may
        be `more` final passes, over other parameters. `end_pass` follows, whatever happens, also here.
        """
        self._begin(1.0 / self._scale.value, reduces=final)
        self._reducer.hooks.expect(final=final, more=more)
        self._running, self._reduce = True, final
        self._entered()

    def end_pass(self) -> None:
        """It is over; a rank that failed helps the others through: they may need its parameters."""
        self._running = False
        self._reducer.leave_backward()

    def give_up(self) -> None:
        """A batch failed on some rank: what all have begun to reduce is reduced, and dropped; on all ranks together."""
        self._reducer.finish()
        self.forget()

    def watch(self, outputs: Any) -> None:
        """Notice a backward that the user runs through these outputs of the module."""
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                tensor.register_hook(self._plain)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for a backward that the user runs."""
        self._scaled_by_user = True
        return self._scale.apply(loss)

    def forget(self) -> None:
        """The gradients were used or dropped."""
        self.has_gradients = False
        self.unit = 1.0
        self._reducer.forget()

    def _check(self, loss: Tensor) -> None:
        if not isinstance(loss, Tensor):
            raise DeepSpeedError(f"engine.backward() takes a tensor, found {type(loss).__name__}; pass the loss")
        if loss.numel() != 1:
            raise DeepSpeedError(
                f"engine.backward() takes a scalar loss, found the shape {tuple(loss.shape)}; reduce it with .mean()"
            )
        if not loss.requires_grad:
            raise DeepSpeedError(
                "the loss does not require a gradient: no trained parameter took part in it, or it was computed under "
                "torch.no_grad() or detached"
            )

    def _begin(self, unit: float, reduces: bool | None = None) -> bool:
        """Prepare for gradients that are worth `unit`; True if they are to be reduced."""
        if self.updates is not None:
            self.updates.require_first()
        if self.has_gradients and unit != self.unit:
            self._reducer.rescale(self.unit / unit)
        self.unit = unit
        self.has_gradients = True
        self._accumulation.saw_micro_batch()
        self._reducer.reopen()
        reduce = (self._accumulation.reduces_in_backward or self._reducer.eager) and not self.suspended
        reduce = reduce if reduces is None else reduces
        if reduce:
            self._reducer.arm()
        return reduce

    def _entered(self, grad: Tensor | None = None) -> None:
        self._reducer.enter_backward()
        if self._reduce:
            self._reducer.hooks.begin()
            if self.updates is not None and self._accumulation.reduces_in_backward:
                self.updates.begin(self.unit)

    def _end(self) -> None:
        # Ranks that are still in backward may need this one's parameters before they can send their gradients.
        self._reducer.leave_backward()
        if self._reduce:
            with phase(self._events, Phase.BACKWARD_REDUCE, self._accumulation):
                self._reducer.settle()
            if self.updates is not None:
                self.updates.finish()

    def _plain(self, grad: Tensor | None = None) -> None:
        """A gradient flows into an output of a module; the first one of a user's backward prepares for the rest."""
        task = torch._C._current_graph_task_id()
        if self._running or task == self._plain_task:
            return
        if self._adds_up():
            self._begin_plain()
            return
        self._plain_task, self._reduce = task, False
        self._enter_plain()

    def _adds_up(self) -> bool:
        """False in `torch.autograd.grad` and `torch.func.grad`, which return gradients and add none to parameters'."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return False
        trained = (param for param in self.parameters() if param.requires_grad)
        if any(runs_in_backward(get_gradient_edge(param).node) for param in trained):
            return True
        node: Any = torch._C._current_autograd_node()
        while node is not None and node.next_functions:
            node = next((each for each, _ in node.next_functions if each is not None), None)
        return node is None or runs_in_backward(node)  # a backward through no parameter runs all leaves

    def _noticed(self) -> None:
        """A gradient has arrived in a user's backward through something else than our outputs."""
        unit = self._plain_unit()
        if self.has_gradients and unit != self.unit:
            raise DeepSpeedError(
                f"gradients of loss.backward() through a part of the module, worth {unit:g}, meet gradients worth "
                f"{self.unit:g} in one accumulation window: run all of its backward passes by engine.backward(loss), "
                "or call the engine itself in forward"
            )
        self._begin_plain()

    def _plain_unit(self) -> float:
        factor = self._scale.value if self._scaled_by_user else 1.0
        return 1.0 / (factor * self._accumulation.steps)

    def _begin_plain(self) -> None:
        self._plain_task = torch._C._current_graph_task_id()
        if self._scale.value != 1.0 and not self._scaled_by_user:
            warn_once(
                "loss.backward() does not scale the loss, so small fp16 gradients become zero; "
                "use engine.backward(loss), or engine.scale(loss).backward()"
            )
        self._reduce = self._begin(self._plain_unit())
        self._scaled_by_user = False
        self._enter_plain()

    def _enter_plain(self) -> None:
        self._entered()
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def expect_gradients(self) -> None:
        """An optimizer step begins: gradients of a backward that nothing has told of are those of a plain one."""
        if not self.has_gradients:
            self.unit = self._plain_unit()


def runs_in_backward(node: Any) -> bool:
    """Whether the backward that runs now comes to this node; torch raises for a leaf whose gradient it returns."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


_OWN, _BELOW = attrgetter("_parameters"), attrgetter("_modules")


class ModelParameters:
    """Calling it returns what `model.parameters()` yields.

    It compares what the dicts of all modules hold with what they held at the last call, which costs less than a third
    of a walk over the modules and notices what was added, replaced or deleted in any way.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [model]
        self._dicts: list[Any] = []
        self._values: list[Iterable[Any]] = []
        self._seen: list[Any] = []
        self._parameters: list[nn.Parameter] = []

    def __call__(self) -> list[nn.Parameter]:
        """The parameters of the model as it is now, each once."""
        dicts = [*map(_OWN, self._modules), *map(_BELOW, self._modules)]
        if not _same(dicts, self._dicts) or not _same(chain.from_iterable(self._values), self._seen):
            model = self._modules[0]
            self._modules, self._parameters = list(model.modules()), list(model.parameters())
            self._dicts = [*map(_OWN, self._modules), *map(_BELOW, self._modules)]
            self._values = [each.values() for each in self._dicts]  # as the dicts are when these are read
            self._seen = list(chain.from_iterable(self._values))
        return self._parameters


def _same(left: Iterable[Any], right: list[Any]) -> bool:
    """True if both hold the same objects; tensors and dicts are not compared by value."""
    found = list(left)
    return len(found) == len(right) and all(map(is_, found, right))
