"""What travels between stages: structures of tensors, their form as text, and the messages that carry them.

[Note: forms] Before the first activations into a stage their form is sent; after that both sides know it, and it is an
error if it changes, unless shapes are dynamic: then every message has its form. Gradients have the shapes of what they
are the gradients of, so nothing is said about them.

[Note: failed stages] A stage that failed continues with its messages: zeros where the form is known, else a note that
there is none. No gradient comes back for what was never sent.

[Note: pretended ranks] With torch's backend "fake" nothing is received: what comes into a stage has the form that was
foretold, and is zeros.

Receives are posted ahead of their use; sends are waited for at the end of the batch.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.comm.point_to_point import PeerChannel
from deepspeed.errors import PipelineError
from deepspeed.parallel import AxisGroup
from deepspeed.pipe.schedule.actions import Message

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class TensorForm:
    """One tensor: its dtype, its shape, and whether a gradient comes back for it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    trained: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


Structure = tuple[str, Any]
"""("tensor", its number), ("plain", type and value), ("tuple" or "list", parts) or ("dict", pairs of name and part)."""


@dataclass(frozen=True)
class MessageForm:
    """A structure without its tensors; equal forms are not sent again."""

    structure: Structure
    kinds: tuple[TensorForm, ...]

    @cached_property
    def trained(self) -> tuple[TensorForm, ...]:
        """The tensors for which a gradient comes back."""
        return tuple(kind for kind in self.kinds if kind.trained)

    @cached_property
    def lone(self) -> bool:
        """Whether it is that of a tensor by itself, as most stages give."""
        return self.structure == ("tensor", 0)

    def is_of(self, value: Any) -> bool:
        """Whether it is the form of a lone tensor; True saves `flatten`."""
        if not self.lone or not isinstance(value, Tensor):
            return False
        kind = self.kinds[0]
        return kind.dtype is value.dtype and kind.shape == value.shape and kind.trained == value.requires_grad

    def cast(self, dtype: torch.dtype) -> MessageForm:
        """What layers give of fp32 once their weights have this dtype."""
        kinds = (replace(kind, dtype=dtype) if kind.dtype is torch.float32 else kind for kind in self.kinds)
        return MessageForm(self.structure, tuple(kinds))

    def text(self) -> str:
        """All of it as text, for the stage that receives."""
        kinds = [(str(kind.dtype).removeprefix("torch."), kind.shape, kind.trained) for kind in self.kinds]
        return json.dumps([self.structure, kinds])

    @classmethod
    def parse(cls, text: str) -> MessageForm:
        structure, kinds = json.loads(text)
        known = tuple(TensorForm(getattr(torch, name), tuple(shape), bool(trained)) for name, shape, trained in kinds)
        return cls(_frozen(structure), known)

    def __str__(self) -> str:
        return ", ".join(map(str, self.kinds)) or "no tensors"


def flatten(value: Any) -> tuple[MessageForm, list[Tensor]]:
    """A structure as its form and its tensors; a tensor that is in it twice is one tensor."""
    tensors: list[Tensor] = []
    places: dict[int, int] = {}

    def walk(part: Any) -> Structure:
        if isinstance(part, Tensor):
            if id(part) not in places:
                places[id(part)] = len(tensors)
                tensors.append(part)
            return "tensor", places[id(part)]
        if isinstance(part, (tuple, list)):
            return "tuple" if isinstance(part, tuple) else "list", tuple(walk(each) for each in part)
        if isinstance(part, dict) and all(isinstance(name, str) for name in part):
            return "dict", tuple((name, walk(each)) for name, each in part.items())
        if isinstance(part, _PLAIN):
            return "plain", (type(part).__name__, part)  # 1 and True are equal, but not the same
        raise PipelineError(
            f"a stage gave a {type(part).__name__} to the next one; stages pass tensors, numbers, strings and None, in "
            "tuples, lists and dicts with names"
        )

    structure = walk(value)
    kinds = tuple(TensorForm(tensor.dtype, tuple(tensor.shape), tensor.requires_grad) for tensor in tensors)
    return MessageForm(structure, kinds), tensors


def unflatten(form: MessageForm, tensors: Sequence[Tensor]) -> Any:
    """The structure again."""

    def walk(part: Structure) -> Any:
        kind, inner = part
        if kind == "tensor":
            return tensors[inner]
        if kind == "dict":
            return {name: walk(each) for name, each in inner}
        if kind == "plain":
            return inner[1]
        parts = [walk(each) for each in inner]
        return tuple(parts) if kind == "tuple" else parts

    return walk(form.structure)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(each) for each in value) if isinstance(value, list) else value


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with other tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(each, change) for each in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(each, change) for each in value)
    if isinstance(value, dict):
        return {name: map_tensors(each, change) for name, each in value.items()}
    return value


FAILED = object()
"""In place of a value that a stage could not compute."""

_TAGS = {"activation": 11, "gradient": 12}  # gloo keeps messages of different tags apart


class _Posted(NamedTuple):
    form: MessageForm
    kinds: Sequence[TensorForm]
    tensors: list[Tensor]
    works: list[Any]


class StageLinks:
    """One rank's ends of the wires of its pipeline."""

    def __init__(
        self,
        axis: AxisGroup,
        device: torch.device,
        *,
        dynamic: bool,
        foretold: Mapping[int, MessageForm] | None = None,
    ) -> None:
        """`foretold`: stage → what comes into it; see [Note: pretended ranks]."""
        self._axis = axis
        self._device = device
        self._dynamic = dynamic
        self._groups: dict[tuple[str, bool], Any] = {}
        self._lines: dict[Message, tuple[PeerChannel, str]] = {}
        self._pretended = axis.size > 1 and comm.get_backend(axis.group) == "fake"
        self._by_tag = axis.size == 1 or self._pretended or comm.get_backend(axis.group) == "gloo"
        self._foretold = dict(foretold or {})
        self._forms: dict[int, MessageForm] = {}
        self._passed: dict[tuple[int, int], MessageForm] = {}
        self._posted: dict[Message, _Posted] = {}
        self._sending: deque[tuple[Any, Tensor]] = deque()
        self.sent = {"activation": 0, "gradient": 0, "form": 0}  # bytes since the beginning, by kind

    def open(self) -> None:
        """Make the groups that a backend without tags needs, one for each kind and direction; on all ranks together."""
        if not self._by_tag and not self._groups:
            self._groups = {(kind, up): self._axis.twin() for kind in _TAGS for up in (False, True)}

    def forget_forms(self) -> None:
        self._forms.clear()

    @contextmanager
    def other_forms(self) -> Iterator[None]:
        """Batches inside, of an evaluation, have forms of their own."""
        kept, self._forms = self._forms, {}
        try:
            yield
        finally:
            self._forms = kept

    # ---- sending

    def send(self, message: Message, value: Any) -> None:
        """Begin to send activations, a structure, or gradients, a list in the order of the trained tensors."""
        for tensor in self._to_send(message, value) or ():
            self._isend(tensor, message, message.kind)
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()

    def _to_send(self, message: Message, value: Any) -> Sequence[Tensor] | None:
        if message.kind == "gradient":
            form = self._passed.pop((message.stage + 1, message.micro_batch), None)
            if form is None:
                return None
            kinds = form.trained
            given = [None] * len(kinds) if value is FAILED else value
            return [self._zeros(kind) if each is None else each for kind, each in zip(kinds, given, strict=True)]
        known = self._forms.get(message.stage)
        tensors: list[Tensor] | None = None
        if value is FAILED:
            form = known
        elif known is not None and known.is_of(value):
            form, tensors = known, [value]
        else:
            form, tensors = flatten(value)
        if self._dynamic or known is None:
            told = None if value is FAILED else form
            self._tell(message, told)
            if told is None:
                return None
            self._forms[message.stage] = told
        elif form is not known and form != known:
            assert form is not None, "it was flattened just now"
            found, expected = (str(form), str(known)) if str(form) != str(known) else (form.text(), known.text())
            raise PipelineError(
                f"stage {message.stage - 1} gives {found} of micro-batch {message.micro_batch} to stage "
                f"{message.stage}, where {expected} was expected, as of the first micro-batch. Give all micro-batches "
                "one shape (dataloader_drop_last does so at the end of the data), pass "
                "PipelineModule(..., dynamic_shape=True), or call engine.reset_activation_shape() before a batch of "
                "another shape."
            )
        assert form is not None, "known, or just flattened"
        self._passed[message.stage, message.micro_batch] = form
        return [self._zeros(kind) for kind in form.kinds] if tensors is None else tensors

    def _tell(self, message: Message, form: MessageForm | None) -> None:
        data = b"" if form is None else form.text().encode()
        self._isend(torch.tensor([len(data)], dtype=torch.int64, device=self._device), message, "form")
        if data:
            self._isend(torch.tensor(list(data), dtype=torch.uint8, device=self._device), message, "form")

    def _isend(self, tensor: Tensor, message: Message, counted: str) -> None:
        data = self._sent_as(tensor.detach())
        size = data.nbytes
        if size == 0:
            return
        self.sent[counted] += size
        line, label = self._lines.get(message) or self._line(message, message.target)
        work = line.send(data, label)
        if work is not None and not self._pretended:  # whose work never says that it is done
            self._sending.append((work, data))

    # ---- receiving

    def post(self, message: Message) -> bool:
        """Begin to receive ahead of use; False if what comes is not known yet."""
        if message in self._posted:
            return True
        if message.kind == "gradient":
            form = self._passed.get((message.stage + 1, message.micro_batch))
        else:
            form = self._known_form(message)
        if form is None:
            return False
        self._posted[message] = self._begin(message, form, form.trained if message.kind == "gradient" else form.kinds)
        return True

    def _known_form(self, message: Message) -> MessageForm | None:
        if not self._pretended:
            return None if self._dynamic else self._forms.get(message.stage)
        if message.stage not in self._foretold:
            raise PipelineError(
                f"stage {message.stage} on rank {self._axis.ranks[message.target]} receives activations from rank "
                f"{self._axis.ranks[message.source]}, which is only pretended (backend 'fake'): nobody tells their "
                "shapes. Pass PipelineModule(..., example_input=...), what the first layer takes of a micro-batch"
            )
        return self._foretold[message.stage]

    def receive(self, message: Message) -> Any:
        """What was sent: a structure, or a list of gradients; FAILED if it could not be computed."""
        posted = self._posted.pop(message, None) or self._late(message)
        if posted is None:
            return FAILED
        for work in posted.works:
            work.wait()
        if message.kind == "gradient":
            del self._passed[message.stage + 1, message.micro_batch]
            return posted.tensors
        self._passed[message.stage, message.micro_batch] = posted.form
        for tensor, kind in zip(posted.tensors, posted.kinds, strict=True):
            tensor.requires_grad_(kind.trained)
        return posted.tensors[0] if posted.form.lone else unflatten(posted.form, posted.tensors)

    def _late(self, message: Message) -> _Posted | None:
        """A receive that is begun when its result is wanted; None for what was never sent."""
        if self.post(message):
            return self._posted.pop(message)
        form = self._hear(message) if message.kind == "activation" else None  # without activations no gradient comes
        if form is None:
            return None
        self._forms[message.stage] = form
        return self._begin(message, form, form.kinds)

    def _hear(self, message: Message) -> MessageForm | None:
        size = torch.empty(1, dtype=torch.int64, device=self._device)
        self._recv(size, message)
        if int(size) == 0:
            return None
        data = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        self._recv(data, message)
        return MessageForm.parse(bytes(data.tolist()).decode())

    def _recv(self, tensor: Tensor, message: Message) -> None:
        line, label = self._lines.get(message) or self._line(message, message.source)
        work = line.receive(self._sent_as(tensor), label)
        if work is not None:
            work.wait()

    def _begin(self, message: Message, form: MessageForm, kinds: Sequence[TensorForm]) -> _Posted:
        make = torch.zeros if self._pretended else torch.empty
        line, label = self._lines.get(message) or self._line(message, message.source)
        posted = _Posted(form, kinds, [], [])
        for kind in kinds:
            tensor = make(kind.shape, dtype=kind.dtype, device=self._device)
            posted.tensors.append(tensor)
            work = line.receive(self._sent_as(tensor), label) if tensor.numel() else None
            if work is not None:
                posted.works.append(work)
        return posted

    # ---- the end of a batch

    def settle(self) -> None:
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()
        assert not self._posted, "every receive that is posted belongs to an action"
        self._passed.clear()

    def abandon(self) -> None:
        """The wires are broken: forget what is under way."""
        self._sending.clear()
        self._posted.clear()
        self._passed.clear()
        self._forms.clear()

    def _line(self, message: Message, other: int) -> tuple[PeerChannel, str]:
        """The way to the `other` end of a message, and what it is called."""
        if self._by_tag:
            line = PeerChannel(self._axis.group, self._axis.ranks[other], _TAGS[message.kind])
        else:
            line = PeerChannel(self._groups[message.kind, message.target < message.source], self._axis.ranks[other])
        label = f"{message.kind} of micro-batch {message.micro_batch} into stage {message.stage}"
        return self._lines.setdefault(message, (line, label))

    def _sent_as(self, tensor: Tensor) -> Tensor:
        """The memory of a tensor, in one piece: as it is for gloo, as bytes for backends that know few dtypes."""
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        if self._by_tag:
            return torch.view_as_real(tensor) if tensor.dtype.is_complex else tensor
        return tensor.view(-1).view(torch.uint8)

    def _zeros(self, kind: TensorForm) -> Tensor:
        return torch.zeros(kind.shape, dtype=kind.dtype, device=self._device)
