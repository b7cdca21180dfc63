"""Hooks on unmodified modules: parameters become whole before a module runs and before its backward does.

[Note: views] Writing into a view in place cuts the view's own hooks off the graph. The output of a linear layer with an
input of three dims is a view, and an activation in place writes into it. So what an output is a view of is hooked, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from deepspeed.errors import UsageError
from deepspeed.zero.parameters import gather as fetch
from deepspeed.zero.parameters.coordinator import FetchCoordinator
from deepspeed.zero.parameters.nested_tensors import tensors_in
from deepspeed.zero.parameters.shapes import WholeShapes
from deepspeed.zero.parameters.shard import Shard, shard_of, shards_of
from deepspeed.zero.parameters.uses import ModuleUse, blocks_of, joined_blocks
from deepspeed.zero.public.leaf import set_z3_leaf_module, z3_leaf_module

F = TypeVar("F", bound=Callable[..., Any])


def hidden(function: F) -> F:
    """The function, hidden from torch.compile; `torch.compiler.disable` would load the compiler, which is slow."""
    runs_in_python(function)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def passed_over(function: F) -> F:
    """The function, which does nothing where torch.compile captures its caller, and runs as it is elsewhere."""

    def call(*args: Any) -> Any:
        return None if torch.compiler.is_compiling() else function(*args)

    runs_in_python(call)
    return call  # type: ignore[return-value]


def runs_in_python(function: Callable[..., Any]) -> None:
    """Where nothing is captured that calls a function, neither is the function itself."""
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


_KEY = "_external_params"


class WatchedParameters(dict[str, Any]):
    """A module's own parameters; reading one that is not whole while the model runs makes it whole.

    The module that is running then uses it from now on: it is gathered with that module's own parameters. Where
    backward computes a function again that no module is, it is gathered as for the backward of its own module.
    """

    def __init__(self, parameters: Mapping[str, Any], coordinator: FetchCoordinator) -> None:
        super().__init__(parameters)
        self._coordinator = coordinator

    def __getitem__(self, name: str) -> Any:
        param = dict.__getitem__(self, name)
        shard = shard_of(param)
        if shard is None or shard.whole:
            return param
        coordinator = self._coordinator
        if param.numel() if coordinator.shapes is None else torch.compiler.is_compiling():
            return param
        if shard.numel:
            coordinator.also(shard)
        return param

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def external_parameters(module: nn.Module) -> dict[int, nn.Parameter]:
    """The parameters that the module uses and does not own, by number."""
    found: dict[int, nn.Parameter] = module.__dict__.get(_KEY, {})
    return found


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Gather a parameter of another module whenever this module runs, forward and backward."""
    if not isinstance(parameter, nn.Parameter):
        raise UsageError(f"register_external_parameter takes a parameter, found {type(parameter).__name__}")
    module.__dict__.setdefault(_KEY, {})[id(parameter)] = parameter


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter`."""
    if id(parameter) not in external_parameters(module):
        raise UsageError("unregister_external_parameter: this parameter is not registered with this module")
    del module.__dict__[_KEY][id(parameter)]


class ModuleHooks:
    """Connects the modules of a model to a coordinator; can be taken off and put on again."""

    def __init__(self, root: nn.Module, coordinator: FetchCoordinator) -> None:
        self._root = root
        self._coordinator = coordinator
        self._uses = 0
        self._blocks: dict[int, int] = {}
        self._joinable: set[int] = set()
        self._joined: dict[int, ModuleUse] = {}
        """Blocks that are one use, by their numbers; see [Note: joined blocks]."""
        self._watched: list[nn.Module] = []
        self._known: set[int] = set()
        self._hooked: list[tuple[nn.Module, Callable[..., None] | None, Callable[..., None] | None]] = []
        """What runs before and after each module."""
        self._made = Shard.made
        self._returning: list[Any] = []
        """Hooks that bring back, once, parameters that stay whole and were let go."""
        self.handles: list[Any] = []
        self._captured = False
        """Graphs gather what they use: hooks act on modules that run outside of them."""
        self.watches_inputs = False
        """Tell when the gradients of a module's inputs are known, also where it trains all of its parameters."""

    def install(self) -> None:
        """Hook every module that owns parameters which are not always whole, and the root."""
        self._expect_return()
        if not any(not shard.persistent for shard in shards_of(self._root.parameters())):
            return
        self._blocks, _ = blocks_of(self._root)
        limits = self._coordinator.schedule.limits
        if not self._captured:
            self._joinable = joined_blocks(self._root, self._blocks, min(limits.ahead, limits.live))
        for name, module, shards in self._units():
            self._hook(name, module, shards)
        self._joinable, self._joined = set(), {}

    def look_again(self) -> None:
        """Hook modules that were added to the model since, if any parameter was sharded since."""
        if self._made == Shard.made:
            return
        self._made = Shard.made
        self._blocks, _ = blocks_of(self._root)
        if self.handles and any(id(module) not in self._known for module in self._root.modules()):
            for name, module, shards in self._units():
                if id(module) not in self._known:
                    self._hook(name, module, shards)
            self._coordinator.schedule.invalidate()

    def forget_plans(self) -> None:
        """Let the next passes be traced anew."""
        self._coordinator.schedule.invalidate()

    def as_units(self, modules: Iterable[nn.Module]) -> None:
        """Gather each of these modules with all that is below it: nothing of ours runs inside them any more."""
        for module in modules:
            set_z3_leaf_module(module, True)
        if self.handles:
            self.remove()
            self.install()

    def give_way(self, shapes: WholeShapes) -> None:
        """Let graphs gather what they use; modules that run outside of them are gathered as before."""
        self._captured, self._coordinator.shapes = True, shapes
        runs_in_python(WatchedParameters.__getitem__)
        if self.handles:
            self.remove()
            self.install()

    def remove(self) -> None:
        """Take every hook off; parameters that are whole stay so."""
        self._take_off()
        self._hooked.clear()
        self._watched.clear()
        self._known.clear()
        self._coordinator.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No module has a hook, parameters being whole; what a backward of earlier forwards needs stays known."""
        self._take_off()
        try:
            yield
        finally:
            for each in self._hooked:
                self._put_on(*each)
            for module in self._watched:
                module._parameters = WatchedParameters(module._parameters, self._coordinator)
            self._expect_return()

    def _take_off(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self._forget_return()
        for module in self._watched:
            module._parameters = dict(module._parameters)

    def _put_on(
        self, module: nn.Module, pre: Callable[..., None] | None, post: Callable[..., None] | None, first: bool = False
    ) -> None:
        if pre is not None:
            self.handles.append(module.register_forward_pre_hook(pre, prepend=True, with_kwargs=True))
        if post is not None:
            self.handles.append(module.register_forward_hook(post, prepend=first, always_call=True))

    def let_go(self) -> None:
        """Free every whole parameter that is not in use; those that stay whole return before the model is used again.

        All ranks call it together. On an axis of one rank there is nothing to free.
        """
        whole = [s for s in shards_of(self._root.parameters()) if s.whole or s.pending is not None]
        idle = [shard for shard in whole if not shard.holds and shard.numel and not shard.alone]
        for shard in idle:
            if shard.persistent and shard.edited:
                shard.store()
            shard.release()
        if idle:
            self._coordinator.schedule.invalidate()  # plans may count on what is whole between passes
        self._coordinator.free_copies()
        self._expect_return()

    def _absent(self) -> list[Shard]:
        """Parameters that stay whole, and were let go all the same."""
        return [s for s in shards_of(self._root.parameters()) if s.persistent and not s.whole and s.numel]

    def _expect_return(self) -> None:
        absent = {id(shard.param) for shard in self._absent()}
        if not absent or self._returning:
            return
        self._coordinator.bring = self._bring
        for module in self._root.modules():
            if module is self._root or any(id(param) in absent for param in module.parameters(recurse=False)):
                self._returning.append(module.register_forward_pre_hook(self._bring_before(module), prepend=True))

    def _bring_before(self, owner: nn.Module) -> Callable[..., None]:
        def bring(module: nn.Module, _: Any) -> None:
            if module is owner:  # no copy of it
                self._bring()

        return hidden(bring)

    def _bring(self) -> None:
        self._forget_return()
        fetch.gather(self._absent())

    def _forget_return(self) -> None:
        self._coordinator.bring = None
        for handle in self._returning:
            handle.remove()
        self._returning.clear()

    def _units(self) -> Iterator[tuple[str, nn.Module, list[Shard]]]:
        """Modules that are gathered as one: leaves with all below them, others with their own parameters."""
        below: set[int] = set()
        for name, module in self._root.named_modules():
            if id(module) in below:
                self._known.add(id(module))
                continue
            leaf = z3_leaf_module(module)
            if leaf:
                below.update(id(child) for child in module.modules() if child is not module)
            shards = [s for s in shards_of(module.parameters(recurse=leaf)) if s.numel]
            shards += [s for s in shards_of(external_parameters(module).values()) if s not in shards]
            outermost = module is self._root or id(module) in self._joinable
            if outermost or any(not shard.persistent for shard in shards):
                yield name or type(module).__name__, module, shards
            else:
                self._known.add(id(module))

    def _hook(self, name: str, module: nn.Module, shards: list[Shard]) -> None:
        use = ModuleUse(self._uses, name, module, tuple(shards), self._blocks.get(id(module), -1))
        self._uses += 1
        self._known.add(id(module))
        if id(module) in self._joinable:
            self._joined[use.block] = use
        elif use.block in self._joined:
            self._joined[use.block].join(use)
        self._coordinator.add(use)
        pre, post = self._make(use)
        self._hooked.append((module, pre, post if use.inside is None else None))
        self._put_on(*self._hooked[-1])
        for owner in module.modules() if z3_leaf_module(module) else (module,):
            if owner._parameters and not isinstance(owner._parameters, WatchedParameters):
                owner._parameters = WatchedParameters(owner._parameters, self._coordinator)
                self._watched.append(owner)

    def _make(self, use: ModuleUse) -> tuple[Callable[..., None], Callable[..., None]]:
        coordinator = self._coordinator
        stack = coordinator.stack
        unended: list[Callable[..., None]] = []
        """The hook on the end of a module that is followed by its block."""

        def pre(module: nn.Module, args: Any, kwargs: Any) -> None:
            if module is not use.module:
                return  # a copy of the module, which got the hook with everything else
            if stack and stack[-1][0] is use.inside:
                use.ran = True
                return
            if unended:  # from now on, since it runs outside of its block
                self._hooked.append((module, None, unended.pop()))
                self._put_on(*self._hooked[-1], first=True)
            freezes = coordinator.enter(use)
            if (freezes or (self.watches_inputs and use.shards)) and torch.is_grad_enabled():
                self._watch_inputs(use, (args, kwargs))

        def post(module: nn.Module, args: Any, output: Any) -> None:
            if module is not use.module or (stack and stack[-1][0] is use.inside):
                return
            tensors: tuple[Tensor, ...] = (output,)
            if type(output) is not Tensor:
                tensors = tuple(tensors_in(output))
                for shard in shards_of(tensors):  # whoever called the module uses them then
                    coordinator.hand_over(use, shard)
            coordinator.leave(use)
            if torch.is_grad_enabled() and use.shards:
                for tensor in tensors:
                    if tensor.requires_grad and (type(tensor) is Tensor or shard_of(tensor) is None):
                        tensor.register_hook(before)
                        base = tensor._base  # see [Note: views]
                        if base is not None and base.grad_fn is not None:
                            base.register_hook(before)

        def before(_: Tensor) -> None:
            coordinator.before_backward(use, recorded=torch.is_grad_enabled())  # as create_graph says

        if self._captured:
            return passed_over(hidden(pre)), passed_over(hidden(post))
        unended += [hidden(post)] * (use.inside is not None)
        return hidden(pre), hidden(post)

    def _watch_inputs(self, use: ModuleUse, inputs: Any) -> None:
        """Tell when backward has reported the gradients of all inputs of one call."""
        watched = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        left = len(watched)

        def fired(_: Tensor) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._coordinator.inputs_done(use)

        for tensor in watched:
            tensor.register_hook(fired)
