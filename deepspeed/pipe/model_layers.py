"""A Transformers model as the layers of a pipeline: where its blocks are, its own forward without them, its parts.

Its forward runs over a view: copies of the containers around its blocks, with stubs in the place of blocks. Stopped at
a stub, it has computed embeddings, masks and positions; run to the end, it computes norm and head.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed.data.pacing import NumberedBlocks
from deepspeed.errors import UsageError
from deepspeed.tensor_parallel.loss import SplitLogits
from deepspeed.zero.parameters.nested_tensors import tensors_in

if TYPE_CHECKING:
    from deepspeed.pipe.axes import StageSequences

BLOCK_INPUT = "input_ids"
"""What a tensor alone means as the input of a model."""
_HIDDEN = "hidden_states"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class BlockCall:
    """How a model calls a block, but for the hidden states."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    by_name: bool  # hidden states are passed by their name

    def run(self, block: nn.Module, hidden: Tensor) -> Any:
        if self.by_name:
            return block(**{_HIDDEN: hidden}, **self.kwargs)
        return block(hidden, *self.args, **self.kwargs)


class _Stop(Exception):
    """Ends a forward that has told enough."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class BlockStubs:
    """Stand in for the blocks of a model: note how they are called, and compute nothing."""

    def __init__(self, blocks: nn.Module) -> None:
        self.modules = _twin(blocks)
        children = blocks._modules.items()
        self.modules._modules = {name: self._stub(int(name), block) for name, block in children if block is not None}
        self._last = len(self.modules._modules) - 1
        self._calls: list[BlockCall] = []
        self._stop_at = -1
        self._tuples = False
        self._given: Tensor | None = None

    def until(
        self, number: int, view: nn.Module, inputs: Mapping[str, Any], *, tuples: bool
    ) -> tuple[Tensor, list[BlockCall]]:
        """Run a view until it calls a block: the hidden states at that point, and the calls until then."""
        self._calls, self._stop_at, self._tuples, self._given = [], number, tuples, None
        try:
            view(**inputs, use_cache=False)
        except _Stop as stop:
            return stop.hidden, self._calls
        finally:
            self._calls = []
        raise UsageError(f"the forward of {type(view).__name__} does not call its blocks one after another")

    def pass_by(self, view: nn.Module, inputs: Mapping[str, Any], hidden: Tensor, *, tuples: bool) -> Any:
        """Run a view to its end, as if the last block had given these hidden states."""
        self._calls, self._stop_at, self._tuples, self._given = [], -1, tuples, hidden
        try:
            return view(**inputs, use_cache=False)
        finally:
            self._calls, self._given = [], None

    def _stub(self, number: int, block: nn.Module) -> nn.Module:
        stub = _twin(block)
        stub._modules, stub._buffers = {}, {}
        stub.forward = partial(self._called, number)
        return stub

    def _called(self, number: int, *args: Any, **kwargs: Any) -> Any:
        by_name = not args
        hidden = kwargs.pop(_HIDDEN) if by_name else args[0]
        self._calls.append(BlockCall(args[1:], kwargs, by_name))
        if number == self._stop_at:
            raise _Stop(hidden)
        if number == self._last and self._given is not None:
            hidden = self._given
        return (hidden,) if self._tuples else hidden


class ZeroModule(nn.Module):
    """In place of a module with weights that another stage has: gives out zeros of the shape that it would."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._width = getattr(module, "embedding_dim", getattr(module, "out_features", None))
        self._adds = isinstance(module, nn.Embedding)
        self.like: Tensor | None = None  # whose dtype and device they have

    def forward(self, value: Tensor, *_: Any, **__: Any) -> Tensor:
        assert self.like is not None, "set before a view runs"
        shape = value.shape if self._adds else value.shape[:-1]
        width = value.shape[-1] if self._width is None else self._width
        return self.like.new_zeros(()).expand(*shape, width)


def view_of(model: nn.Module, containers: Sequence[str], instead: Mapping[str, nn.Module], at: str = "") -> nn.Module:
    view = _twin(model)
    for name, child in model._modules.items():
        path = f"{at}.{name}" if at else name
        if path in instead:
            view._modules[name] = instead[path]
        elif path in containers and child is not None:
            view._modules[name] = view_of(child, containers, instead, path)
    return view


def _twin(module: nn.Module) -> nn.Module:
    """A module with the same attributes and submodules, but no hooks and no parameters of its own."""
    twin = copy.copy(module)
    twin._modules, twin._buffers, twin._parameters = dict(module._modules), dict(module._buffers), {}
    for hooks in _HOOKS:
        setattr(twin, hooks, OrderedDict())
    twin.training = False
    return twin


@dataclass(frozen=True)
class TiedName:
    """A parameter that a module before the blocks shares with one after them."""

    path: str  # the module before the blocks, by whose name the parameter goes
    attribute: str
    layers: tuple[str, ...] = ()  # the layers after the blocks that have it, too

    @property
    def name(self) -> str:
        return f"{self.path}.{self.attribute}"


@dataclass(frozen=True)
class Outline:
    """The parts of a model, by their paths."""

    containers: tuple[str, ...]  # from the model itself, "", down to the module whose forward calls the blocks
    blocks: str  # the list of them
    count: int
    before: tuple[str, ...]  # what has weights and runs before the first block
    after: tuple[str, ...]  # what else has weights outside of the blocks
    bare: tuple[str, ...]  # what has none, such as rotary embeddings; every stage keeps it
    ties: tuple[TiedName, ...]


def outline_of(model: nn.Module) -> Outline:
    """The parts of a model; a UsageError says why it cannot be cut."""
    path, blocks = _find_blocks(model)
    names = path.split(".")
    containers = tuple(".".join(names[:length]) for length in range(len(names)))
    outside = list(_outside(model, containers, path))
    _require_plain(model, containers, path)
    early = _run_before_blocks(model, containers, path, outside)
    bare = tuple(each for each in outside if not model.get_submodule(each).state_dict())
    before = tuple(each for each in outside if each in early and each not in bare)
    after = tuple(each for each in outside if each not in early and each not in bare)
    ties = tuple(_ties(model, path, before, after))
    return Outline(containers, path, len(blocks), before, after, bare, ties)


def _find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    config: Any = getattr(model, "config", None)
    count = getattr(config, "num_hidden_layers", None)
    lists = [(path, each) for path, each in model.named_modules() if isinstance(each, nn.ModuleList)]
    found = [(path, each) for path, each in lists if len(each) == count and any(True for _ in each.parameters())]
    if len(found) == 1:
        return found[0]
    told = ", ".join(f"{path} ({len(each)})" for path, each in lists) or "none"
    raise UsageError(
        f"PipelineModule cuts an nn.Sequential, a list of layers, or a model of Transformers with one list of blocks; "
        f"{type(model).__name__} has {len(found)} lists with config.num_hidden_layers = {count} blocks. Its lists: "
        f"{told}. Write the model as a list of layers (LayerSpec)"
    )


def _outside(model: nn.Module, containers: Sequence[str], blocks: str) -> Iterator[str]:
    for container in containers:
        for name, _ in model.get_submodule(container).named_children():
            path = f"{container}.{name}" if container else name
            if path != blocks and path not in containers:
                yield path


def _require_plain(model: nn.Module, containers: Sequence[str], blocks: str) -> None:
    for container in containers:
        for name, _ in model.get_submodule(container).named_parameters(recurse=False):
            raise UsageError(
                f"the parameter {name!r} of {container or type(model).__name__} belongs to no layer, so that the model "
                "cannot be cut; write it as a list of layers (LayerSpec)"
            )
    owners: dict[int, str] = {}
    for number, block in enumerate(model.get_submodule(blocks).children()):
        for name, param in block.named_parameters():
            if owners.setdefault(id(param), f"{blocks}.{number}") != f"{blocks}.{number}":
                raise UsageError(
                    f"{blocks}.{number}.{name} is shared with {owners[id(param)]}: blocks that share weights are not "
                    "cut. Write the model as a list of layers (TiedLayerSpec)"
                )
    named = list(model.named_parameters())
    sharded = [name for name, param in named if getattr(param, "ds_shape", param.shape) != param.shape]
    if sharded:
        raise UsageError(
            f"{sharded[0]} was sharded by zero.Init when the model was built; a pipeline shards each stage over its "
            "own replicas. Build the model outside of zero.Init"
        )
    meta = [name for name, param in named if param.is_meta]
    if meta:
        raise UsageError(f"{meta[0]} has no values (device meta); build the model on the CPU before it is cut")
    config: Any = model.config
    for key in ("output_router_logits", "layerdrop"):
        if getattr(config, key, None):
            raise UsageError(
                f"config.{key} is {getattr(config, key)!r}, which needs all blocks of {type(model).__name__} in one "
                "place; set it off before the model is cut"
            )


def _run_before_blocks(model: nn.Module, containers: Sequence[str], blocks: str, outside: Sequence[str]) -> set[str]:
    """The modules that the model's forward calls before its first block, found by running it that far."""
    called: set[str] = set()
    stubs = BlockStubs(model.get_submodule(blocks))
    view = view_of(model, containers, {blocks: stubs.modules})
    handles = [
        model.get_submodule(path).register_forward_pre_hook(lambda *_, path=path: called.add(path)) for path in outside
    ]
    tokens = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
    try:
        with torch.random.fork_rng(devices=[]):
            _, calls = stubs.until(0, view, {BLOCK_INPUT: tokens}, tuples=False)
    finally:
        for handle in handles:
            handle.remove()
    if any(each.requires_grad for each in tensors_in((calls[0].args, calls[0].kwargs))):
        raise UsageError(
            f"{type(model).__name__} gives its blocks more than hidden states that needs a gradient; it cannot be cut. "
            "Write it as a list of layers (LayerSpec)"
        )
    return called


def _ties(model: nn.Module, blocks: str, before: Sequence[str], after: Sequence[str]) -> Iterator[TiedName]:
    named: OrderedDict[int, TiedName] = OrderedDict()
    for path in before:
        for name, param in model.get_submodule(path).named_parameters():
            named.setdefault(id(param), TiedName(path, name))
    inside = {id(param) for param in model.get_submodule(blocks).parameters()}
    late: dict[int, list[str]] = {}
    for path in after:
        for name, param in model.get_submodule(path).named_parameters():
            late.setdefault(id(param), []).append(f"{path}.{name}".rpartition(".")[0])
    for key, tie in named.items():
        every = model.get_submodule(tie.path).parameters()
        if key in inside or (key in late and not all(id(param) in late for param in every)):
            raise UsageError(f"{tie.name} is shared in a way that cannot be cut; untie it, or write a list of layers")
        if key in late:
            yield replace(tie, layers=tuple(late[key]))
    if inside.intersection(late):
        raise UsageError(f"a block of {blocks} shares a weight with what follows the blocks; that cannot be cut")


Passed = tuple[Tensor, dict[str, Any], bool]
"""Hidden states, the model's inputs, and whether blocks give tuples: what goes from layer to layer."""


class ModelLayer:
    """One layer of a model that was cut: some of its modules, and how they are run."""

    def __init__(self, name: str, modules: Sequence[nn.Module], run: Callable[[Any], Any]) -> None:
        self.__name__ = name
        self._modules = tuple(modules)
        self._run = run

    def parameters(self) -> Iterator[nn.Parameter]:
        for module in self._modules:
            yield from module.parameters()

    def leave(self) -> None:
        """Another rank has it: let go of its modules."""
        self._modules = ()

    def __call__(self, value: Any) -> Any:
        return self._run(value)


class ModelCut:
    """A model that is cut into layers; `keep` leaves in it what lies on this rank."""

    def __init__(self, model: nn.Module) -> None:
        self.outline: Outline = outline_of(model)
        self.ties = self.outline.ties
        self.model = model  # what lies on this rank, as a model
        self.config: Any = model.config
        self._loss: Any = getattr(model, "loss_function", None)
        outline, path = self.outline, self.outline.blocks
        self._list = model.get_submodule(path)
        self._stubs = BlockStubs(self._list)
        self._whole = view_of(model, outline.containers, {path: self._stubs.modules})
        self._blanks = {each: ZeroModule(model.get_submodule(each)) for each in outline.before}
        silent = {each: nn.Identity() for each in outline.bare if isinstance(model.get_submodule(each), nn.Dropout)}
        self._instead: dict[str, nn.Module] = {path: self._stubs.modules, **self._blanks, **silent}
        self._rest = view_of(model, outline.containers, self._instead)  # both anew when layers have left
        self._known: tuple[dict[str, Any], list[BlockCall]] = ({}, [])
        self._names = tuple(model.state_dict())
        self.sequences: StageSequences | None = None  # where ranks share sequences, how
        self._logits: SplitLogits | None = None
        self.layers = [*self._parts()]

    def _parts(self) -> Iterator[ModelLayer]:
        get = self.model.get_submodule
        yield ModelLayer("Embeddings", [get(path) for path in self.outline.before], self._enter)
        for number, block in enumerate(self._list.children()):
            yield ModelLayer(type(block).__name__, [block], partial(self._block, number))
        yield ModelLayer("Head", [get(path) for path in self.outline.after], self._leave)

    # ---- what a rank has

    def keep(self, numbers: Iterable[int]) -> dict[str, nn.Module]:
        """Take everything out of the model but these layers; what remains, by the names of its top modules."""
        here, outline = set(numbers), self.outline
        for number, part in enumerate(self.layers):
            if number not in here:
                part.leave()
        for number in range(outline.count):
            if number + 1 not in here:
                del self._list._modules[str(number)]
        tied = {tie.path for tie in outline.ties} if self._last in here else set()
        gone = [path for path in outline.before if 0 not in here and path not in tied]
        gone += [path for path in outline.after if self._last not in here]
        for path in gone:
            parent, _, name = path.rpartition(".")
            self.model.get_submodule(parent)._modules[name] = None
        self._rest = view_of(self.model, outline.containers, self._instead)
        self._whole = view_of(self.model, outline.containers, {outline.blocks: self._stubs.modules})
        return {name: child for name, child in self.model._modules.items() if child is not None}

    @property
    def _last(self) -> int:
        return self.outline.count + 1

    def block(self, number: int) -> nn.Module | None:
        """A block of the model, counted from its end if negative; None where it lies on another rank."""
        return self._list._modules.get(str(number % self.outline.count))

    def blocks(self) -> tuple[nn.Module, ...]:
        return tuple(self._list.children())

    def numbered_blocks(self) -> NumberedBlocks:
        """Those of this rank, by their numbers in the whole model."""
        return NumberedBlocks([(int(name), block) for name, block in self._list.named_children()], self.outline.count)

    def knows(self, name: str) -> bool:
        """Whether a tensor of the whole model has this name."""
        return name in self._names

    def files(self) -> list[tuple[int, str]]:
        """(layer, what names of its tensors begin with) of each file of a checkpoint, in the order of the model."""
        outline = self.outline
        return [
            *((0, f"{path}.") for path in outline.before),
            *((number + 1, f"{outline.blocks}.{number}.") for number in range(outline.count)),
            *((self._last, f"{path}.") for path in outline.after),
        ]

    # ---- data

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        function: Callable[..., Tensor] = partial(self._loss, vocab_size=self.config.vocab_size)
        with self._splitting():
            if self.sequences is not None:
                return self.sequences.loss(function, logits, labels)
            return function(logits=logits, labels=labels)

    def keep_split(self, logits: SplitLogits) -> None:
        """In training, let each rank compute its part of the logits only, of which the model's own loss is made."""
        self._logits = self._loss = logits

    def _splitting(self) -> AbstractContextManager[None]:
        return self._logits.kept() if self._logits is not None and self._list.training else nullcontext()

    @property
    def has_loss(self) -> bool:
        return self._loss is not None and type(self.model).__name__.endswith(("ForCausalLM", "LMHeadModel"))

    @staticmethod
    def pair(batch: Any) -> Any:
        """A batch of Transformers, one mapping, as inputs and labels; any other as it is."""
        if isinstance(batch, Mapping) and "labels" in batch:
            return {name: value for name, value in batch.items() if name != "labels"}, batch["labels"]
        return batch

    # ---- running

    def _enter(self, value: Any) -> Passed:
        inputs = _named(value) if self.sequences is None else self.sequences.part(_named(value))
        for container in self.outline.containers:
            self._whole.get_submodule(container).training = self._list.training
        with self._arguments(inputs) as arguments, self._numbers():
            hidden, _ = self._stubs.until(0, self._whole, arguments, tuples=False)
        return hidden, inputs, False

    def _block(self, number: int, value: Passed) -> Passed:
        hidden, inputs, tuples = value
        block = self._list.get_submodule(str(number))
        call = self._call_of(number, hidden, inputs, tuples)
        with nullcontext() if self.sequences is None else self.sequences.block(block):
            result = call.run(block, hidden)
        if isinstance(result, tuple):
            return result[0], inputs, True
        return result, inputs, False

    def _leave(self, value: Passed) -> Any:
        hidden, inputs, tuples = value
        self._dress(hidden)
        with self._splitting(), self._arguments(inputs) as arguments, self._numbers():
            outputs = self._stubs.pass_by(self._rest, arguments, hidden, tuples=tuples)
        logits = getattr(outputs, "logits", None)
        return outputs[0] if logits is None else logits

    def _call_of(self, number: int, hidden: Tensor, inputs: dict[str, Any], tuples: bool) -> BlockCall:
        """How the model calls a block; found once for a micro-batch, since its layers follow each other."""
        known, calls = self._known
        if known is not inputs or number >= len(calls):
            self._dress(hidden)
            stop = self.outline.count - 1 if number else 0  # what blocks give is known after the first one
            with torch.no_grad(), self._arguments(inputs) as arguments:
                _, calls = self._stubs.until(stop, self._rest, arguments, tuples=tuples)
            self._known = inputs, calls
        return calls[number]

    def _arguments(self, inputs: dict[str, Any]) -> AbstractContextManager[dict[str, Any]]:
        """What the model is called with, while it makes its masks."""
        return nullcontext(inputs) if self.sequences is None else self.sequences.arguments(inputs)

    def _numbers(self) -> AbstractContextManager[None]:
        """Random numbers of what lies around the blocks."""
        return nullcontext() if self.sequences is None else self.sequences.numbers(self._list)

    def _dress(self, hidden: Tensor) -> None:
        for blank in self._blanks.values():
            blank.like = hidden.detach()


def _named(value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor):
        return {BLOCK_INPUT: value}
    if isinstance(value, Mapping):
        return dict(value)
    raise UsageError(
        f"a model of Transformers takes a tensor of tokens or a mapping of its arguments as inputs; found a "
        f"{type(value).__name__}. Make a pair (inputs, labels) of your batches by engine.set_batch_fn(fn)"
    )
