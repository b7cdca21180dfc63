"""What every checkpoint format can be asked: names, shapes, and any interval of any tensor, read when it is needed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.formats.checked_files import Opened
from deepspeed.checkpoint.formats.guard import guarded
from deepspeed.checkpoint.formats.training_state import Counters
from deepspeed.errors import CheckpointError
from deepspeed.fragments import intersection


@dataclass(frozen=True, slots=True)
class StoredInterval:
    """An interval of a tensor and where a file holds it."""

    interval: tuple[int, int]
    load: Callable[[], tuple[Tensor, Opened]]
    """Opens the file; gives a tensor, of which nothing is read yet, and the file, which reads parts of it."""
    offset: int = 0
    """Where the interval begins in that tensor."""
    file: str = ""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Elements in a file."""

    values: Tensor
    """A flat view of the file's memory map; good to use once `opened` has checked or read it."""
    opened: Opened


def find(pieces: Iterable[StoredInterval], start: int, stop: int, what: str) -> list[StoredPart]:
    """Where the elements [start, stop) of a tensor are, from whichever pieces hold them: all resharding is this."""
    parts: list[StoredPart] = []
    reached, files = start, []
    for piece in sorted(pieces, key=lambda piece: piece.interval):
        low, high = intersection(piece.interval, (reached, stop))
        files.append(piece.file)
        if low >= high or low > reached:
            continue
        tensor, opened = piece.load()
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise CheckpointError(f"{piece.file} holds no ordinary tensor with {what}, but {type(tensor).__name__}")
        flat = tensor.reshape(-1)
        first = piece.offset + low - piece.interval[0]
        if first + high - low > flat.numel():
            raise CheckpointError(
                f"{piece.file} holds {flat.numel()} elements of the tensor with {what}, expected at least "
                f"{first + high - low}: the file is damaged or belongs to another checkpoint"
            )
        parts.append(StoredPart(flat[first : first + high - low], opened))
        reached = high
    if reached < stop:
        raise CheckpointError(
            f"elements {reached} to {stop} of {what} are in no file of the checkpoint"
            + (f" (looked in {', '.join(dict.fromkeys(files))})" if any(files) else "")
        )
    return parts


def join(parts: Sequence[StoredPart]) -> Tensor:
    """The elements of all parts, checked; of a single one as a view of its file's memory map."""
    checked = [part.opened.require(part.values) for part in parts]
    if len(checked) == 1:
        return checked[0]
    return torch.cat(checked) if checked else torch.empty(0)


@dataclass(frozen=True, slots=True)
class Small:
    """What a checkpoint holds besides tensors of the model and the optimizer."""

    counters: Counters = field(default_factory=Counters)
    lr_scheduler: Any = None
    loss_scale: Mapping[str, Any] | None = None
    overflow: bool = False
    clip: float | None = None
    client_state: Mapping[str, Any] = field(default_factory=dict)
    ds_config: Mapping[str, Any] = field(default_factory=dict)
    version: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What the model's state dict held besides tensors."""


@dataclass(slots=True)
class IntervalIndex:
    """Where a checkpoint has its tensors: name → kind → pieces."""

    directory: str
    aliases: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    index: dict[str, dict[str, list[StoredInterval]]] = field(default_factory=dict)

    def add(self, name: str, kind: str, piece: StoredInterval) -> None:
        """One more place where elements of a tensor are."""
        self.index.setdefault(name, {}).setdefault(kind, []).append(piece)

    def hold(self, name: str, kind: str, tensor: Tensor, opened: Opened, file: str, offset: int = 0) -> None:
        """All elements of `name` are in `tensor`, from `offset` on."""
        self.add(name, kind, StoredInterval((0, self.shapes[name].numel()), lambda: (tensor, opened), offset, file))

    def sort(self, names: Iterable[str]) -> None:
        """Bring the shapes into the order of `names`; others follow."""
        first = {name: self.shapes[name] for name in names if name in self.shapes}
        rest = {name: shape for name, shape in self.shapes.items() if name not in first}
        self.shapes.clear()
        self.shapes.update(first | rest)

    def kinds(self, name: str) -> tuple[str, ...]:
        """What can be read of a parameter."""
        return with_both(self.index.get(self.owner(name), {}))

    def owner(self, name: str) -> str:
        """The name under which a tied parameter is kept."""
        return self.aliases.get(name, name)

    def find(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> list[StoredPart]:
        """Where the flat elements [start, stop) of a tensor are."""
        owner = self.owner(name)
        found = self.index.get(owner)
        if stop is not None and not 0 <= start <= stop:
            raise CheckpointError(f"{self.directory}: elements {start} to {stop} of {name} were asked for")
        if found is None or owner not in self.shapes:
            raise CheckpointError(f"{self.directory}: no parameter {name!r} among the {len(self.index)} of it")
        other = {"param": "master", "master": "param"}.get(kind, kind)
        pieces = found[kind] if kind in found else found.get(other)
        if pieces is None:
            raise CheckpointError(
                f"{self.directory}: {name} has no {kind!r}; it has {', '.join(found)}. "
                "It was saved with another optimizer, or before its first step"
            )
        stop = self.shapes[owner].numel() if stop is None else stop
        return find(pieces, start, stop, f"{kind} of {name}")


def with_both(kinds: Iterable[str]) -> tuple[str, ...]:
    """Kinds that are stored, with "param" and "master" where there is either."""
    found = tuple(kinds)
    both = ("param", "master") if {"param", "master"} & set(found) else ()
    return (*both, *(kind for kind in found if kind not in both))


@guarded
class Source:
    """A checkpoint of any format, whatever the topology that wrote it.

    Kinds are "param" (what the model computed with), "master" (what the optimizer updated) and the names of
    optimizer states. Where a format holds only one of param and master, either name reads it.
    """

    format: str
    """A few words on what this is, for people."""
    stage: int
    """ZeRO's stage when it was written."""
    world: int
    """Ranks over which ZeRO sharded when it was written."""
    copies: int = 1
    """Groups of so many ranks that had equal shards, of which one wrote them."""
    shapes: Mapping[str, torch.Size]
    """Every parameter and buffer by name, without tied names."""
    aliases: Mapping[str, str]
    """Tied name → the name in `shapes`."""
    _pieces: IntervalIndex

    @property
    def writers(self) -> int:
        """Ranks that may have written what they alone knew."""
        return self.world * self.copies

    @functools.cached_property
    def files(self) -> Sequence[str]:
        """Every file that belongs to it, by name."""
        return ()

    @functools.cached_property
    def buffers(self) -> Mapping[str, Tensor]:
        """The buffers, whole, in the dtype they had."""
        return {}

    @functools.cached_property
    def groups(self) -> Sequence[tuple[Sequence[str], Mapping[str, Any]]]:
        """Of the optimizer: the names that it trained and their hyperparameters; empty where unknown."""
        return ()

    @functools.cached_property
    def small(self) -> Small:
        """What is not a tensor."""
        return Small()

    def kinds(self, name: str) -> tuple[str, ...]:
        """What can be read of a parameter; "param" and "master" where there is either."""
        return self._pieces.kinds(name)

    def dtype(self, name: str) -> torch.dtype | None:
        """What the model computed with, where known."""

    def find(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> list[StoredPart]:
        """Where the flat elements [start, stop) of a tensor are; opens only the files that hold them."""
        return self._pieces.find(name, kind, start, stop)

    def read(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> Tensor:
        """The flat elements [start, stop) of a tensor; touches only the files that hold them."""
        return join(self.find(name, kind, start, stop))

    def scalars(self, name: str) -> Mapping[str, Any]:
        """The optimizer's state of a parameter that has no elements of its own, such as `step`."""
        return {}

    def rank_state(self, rank: int) -> Mapping[str, Any]:
        """`rng` and `data` of a rank that wrote it; empty if there is none."""
        return {}
