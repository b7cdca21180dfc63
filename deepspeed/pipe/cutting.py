"""A Transformers decoder as the layers of a pipeline: embeddings, one layer for each block, norm and head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from deepspeed.errors import UsageError
from deepspeed.pipe.ghosts import BLOCK_INPUT, Blank, Call, Ghosts, view_of
from deepspeed.pipe.outline import Outline, TiedName, outline_of

__all__ = ["Logits", "ModelCut", "Part", "Sequences"]

Passed = tuple[Tensor, dict[str, Any], bool]
"""Hidden states, the model's inputs, and whether blocks give tuples: what goes from layer to layer."""


class Sequences(Protocol):
    """Sequences that ranks share; see `pipe/sequences`."""

    def part(self, inputs: dict[str, Any]) -> dict[str, Any]: ...
    def arguments(self, inputs: dict[str, Any]) -> AbstractContextManager[dict[str, Any]]: ...
    def numbers(self, layer: nn.Module) -> AbstractContextManager[None]: ...
    def block(self, block: nn.Module) -> AbstractContextManager[None]: ...
    def loss(self, function: Callable[..., Tensor], logits: Tensor, labels: Tensor) -> Tensor: ...


class Logits(Protocol):
    """A loss that takes logits of which each rank has a part; see `tensor_parallel/loss`."""

    def kept(self) -> AbstractContextManager[None]: ...
    def __call__(self, logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Tensor: ...


class Part:
    """One layer of a model that was cut: some of its modules, and how they are run."""

    def __init__(self, name: str, modules: Sequence[nn.Module], run: Callable[[Any], Any]) -> None:
        self.__name__ = name
        self._modules = tuple(modules)
        self._run = run

    def parameters(self) -> Iterator[nn.Parameter]:
        """The weights of its modules."""
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
        self._model = model
        self._config: Any = model.config
        self._loss: Any = getattr(model, "loss_function", None)
        outline, path = self.outline, self.outline.blocks
        self._list = model.get_submodule(path)
        self._ghosts = Ghosts(self._list)
        self._whole = view_of(model, outline.containers, {path: self._ghosts.modules})
        self._blanks = {each: Blank(model.get_submodule(each)) for each in outline.before}
        silent = {each: nn.Identity() for each in outline.bare if isinstance(model.get_submodule(each), nn.Dropout)}
        self._instead: dict[str, nn.Module] = {path: self._ghosts.modules, **self._blanks, **silent}
        self._rest = view_of(model, outline.containers, self._instead)  # both anew when layers have left
        self._known: tuple[dict[str, Any], list[Call]] = ({}, [])
        self._names = tuple(model.state_dict())
        self.sequences: Sequences | None = None
        """Where ranks share sequences, how."""
        self._logits: Logits | None = None
        self.layers = [*self._parts()]

    def _parts(self) -> Iterator[Part]:
        get = self._model.get_submodule
        yield Part("Embeddings", [get(path) for path in self.outline.before], self._enter)
        for number, block in enumerate(self._list.children()):
            yield Part(type(block).__name__, [block], partial(self._block, number))
        yield Part("Head", [get(path) for path in self.outline.after], self._leave)

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
            self._model.get_submodule(parent)._modules[name] = None
        self._rest = view_of(self._model, outline.containers, self._instead)
        self._whole = view_of(self._model, outline.containers, {outline.blocks: self._ghosts.modules})
        return {name: child for name, child in self._model._modules.items() if child is not None}

    @property
    def _last(self) -> int:
        return self.outline.count + 1

    @property
    def ties(self) -> tuple[TiedName, ...]:
        """Weights that the first layer shares with the last."""
        return self.outline.ties

    @property
    def config(self) -> Any:
        """The model's own configuration."""
        return self._config

    @property
    def model(self) -> nn.Module:
        """What lies on this rank, as a model."""
        return self._model

    def block(self, number: int) -> nn.Module | None:
        """A block of the model, counted from its end if negative; None where it lies on another rank."""
        return self._list._modules.get(str(number % self.outline.count))

    def blocks(self) -> tuple[nn.Module, ...]:
        """The blocks that lie on this rank."""
        return tuple(self._list.children())

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
        """The model's own loss."""
        function: Callable[..., Tensor] = partial(self._loss, vocab_size=self._config.vocab_size)
        with self._splitting():
            if self.sequences is not None:
                return self.sequences.loss(function, logits, labels)
            return function(logits=logits, labels=labels)

    def keep_split(self, logits: Logits) -> None:
        """In training, let each rank compute its part of the logits only, of which the model's own loss is made."""
        self._logits = self._loss = logits

    def _splitting(self) -> AbstractContextManager[None]:
        return self._logits.kept() if self._logits is not None and self._list.training else nullcontext()

    @property
    def has_loss(self) -> bool:
        """Whether `loss` is that of the model: it predicts the next token."""
        return self._loss is not None and type(self._model).__name__.endswith(("ForCausalLM", "LMHeadModel"))

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
            hidden, _ = self._ghosts.until(0, self._whole, arguments, tuples=False)
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
            outputs = self._ghosts.pass_by(self._rest, arguments, hidden, tuples=tuples)
        logits = getattr(outputs, "logits", None)
        return outputs[0] if logits is None else logits

    def _call_of(self, number: int, hidden: Tensor, inputs: dict[str, Any], tuples: bool) -> Call:
        """How the model calls a block; found once for a micro-batch, since its layers follow each other."""
        known, calls = self._known
        if known is not inputs or number >= len(calls):
            self._dress(hidden)
            stop = self.outline.count - 1 if number else 0  # what blocks give is known after the first one
            with torch.no_grad(), self._arguments(inputs) as arguments:
                _, calls = self._ghosts.until(stop, self._rest, arguments, tuples=tuples)
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
