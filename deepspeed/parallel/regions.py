"""What goes over the wire between tensors that ranks have whole, in parts, or as summands; autograd knows the way back.

| function | forward | backward |
|---|---|---|
| `enter` | as it is | summed over ranks |
| `leave` | summed over ranks | as it is |
| `between` | one of `joined`, `own`, `summed_part` | another one |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, library, nn
from torch.distributed import ProcessGroup

from deepspeed import comm
from deepspeed.fragments import DimSplit


class RankGroup(Protocol):
    """Ranks that have parts of a tensor, and the place of this one among them: an axis, or the members of a group."""

    @property
    def group(self) -> ProcessGroup:
        """Their process group."""

    @property
    def rank(self) -> int:
        """The place of this rank."""

    @property
    def size(self) -> int:
        """How many they are."""


class Uncopied:
    """What refers to groups of processes, which a copy of a module shares."""

    def __deepcopy__(self, _: Any) -> Any:
        return self


@dataclass(frozen=True)
class GroupMembers(Uncopied):
    """The ranks of a process group that belongs to no layout."""

    group: ProcessGroup

    @property
    def rank(self) -> int:
        """The place of this rank."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """How many they are."""
        return self.group.size()


Way = Callable[[Tensor, RankGroup, Sequence[int], int], Tensor]
"""(tensor, ranks, sizes of their parts, dim) → tensor: `joined`, `own` or `summed_part`."""


def _captured(tensor: Tensor, axis: RankGroup, way: str, sizes: Sequence[int] = (), dim: int = 0) -> Tensor:
    """The same as an operation of a graph, which names the ranks by their group."""
    found: Tensor = torch.ops.deepspeed_regions.wire(tensor, axis.group.group_name, way, list(sizes), dim)
    return found


def summed(tensor: Tensor, axis: RankGroup) -> Tensor:
    """The sum over ranks, in memory of its own."""
    if torch.compiler.is_compiling():
        return _captured(tensor, axis, "summed")
    result = tensor.contiguous()
    result = result.clone() if result.data_ptr() == tensor.data_ptr() else result
    comm.all_reduce(result, group=axis.group)
    return result


def joined(part: Tensor, axis: RankGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """All ranks' parts along a dim; parts may be of unequal sizes, which all ranks know."""
    if torch.compiler.is_compiling():
        return _captured(part, axis, "joined", sizes, dim)
    longest, given = max(sizes), part.contiguous()
    if min(sizes) < longest:
        given = part.new_zeros((*part.shape[:dim], longest, *part.shape[dim + 1 :]))
        given.narrow(dim, 0, part.shape[dim]).copy_(part)
    flat = given.new_empty((len(sizes) * given.shape[0], *given.shape[1:]))
    comm.all_gather_into_tensor(flat, given, group=axis.group)
    parts = flat.view(len(sizes), *given.shape)
    return torch.cat([parts[rank].narrow(dim, 0, size) for rank, size in enumerate(sizes)], dim=dim)


def whole_of(part: Tensor, split: DimSplit, axis: RankGroup) -> Tensor:
    """The whole tensor, on every rank; all of them call this."""
    sizes = [split.size(rank) for rank in range(axis.size)]
    side_by_side = joined(part.detach(), axis, sizes, split.dim)
    return split.join(side_by_side.split(sizes, split.dim))


def summed_part(whole: Tensor, axis: RankGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """This rank's part along a dim of the sum over ranks."""
    if torch.compiler.is_compiling():
        return _captured(whole, axis, "summed_part", sizes, dim)
    longest = max(sizes)
    stacked = whole.new_zeros((len(sizes), *whole.shape[:dim], longest, *whole.shape[dim + 1 :]))
    for place, piece in enumerate(whole.split(list(sizes), dim)):
        stacked[place].narrow(dim, 0, piece.shape[dim]).copy_(piece)
    result = whole.new_empty(stacked.shape[1:])
    comm.reduce_scatter_tensor(result, stacked.flatten(0, 1), group=axis.group)
    return result.narrow(dim, 0, sizes[axis.rank])


def own(whole: Tensor, axis: RankGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """This rank's part along a dim."""
    return whole.narrow(dim, sum(sizes[: axis.rank]), sizes[axis.rank]).contiguous()


def highest(tensor: Tensor, axis: RankGroup) -> Tensor:
    """The largest of each element over ranks."""
    if torch.compiler.is_compiling():
        return _captured(tensor, axis, "highest")
    result = tensor.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(result, op=comm.ReduceOp.MAX, group=axis.group)
    return result


_WAYS: Mapping[str, Way] = MappingProxyType(
    {
        "summed": lambda tensor, axis, sizes, dim: summed(tensor, axis),
        "highest": lambda tensor, axis, sizes, dim: highest(tensor, axis),
        "joined": joined,
        "summed_part": summed_part,
    }
)


def named_group(group: str) -> ProcessGroup:
    """The group that a graph calls so."""
    groups: Any = torch.distributed.distributed_c10d
    found: ProcessGroup = groups._resolve_process_group(group)
    return found


def _wire(tensor: Tensor, group: str, way: str, sizes: list[int], dim: int) -> Tensor:
    return _WAYS[way](tensor, GroupMembers(named_group(group)), sizes, dim)


def _shaped(tensor: Tensor, group: str, way: str, sizes: list[int], dim: int) -> Tensor:
    shape = list(tensor.shape)
    if way == "joined":
        shape[dim] = sum(sizes)
    elif way == "summed_part":
        shape[dim] = sizes[named_group(group).rank()]
    return tensor.new_empty(shape)


_LIBRARY = library.Library("deepspeed_regions", "DEF")
_LIBRARY.define("wire(Tensor tensor, str group, str way, int[] sizes, int dim) -> Tensor")
_LIBRARY.impl("wire", _wire, "CompositeExplicitAutograd")
library.register_fake("deepspeed_regions::wire", _shaped, lib=_LIBRARY)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: RankGroup) -> Tensor:
        ctx.axis = axis
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return summed(grads[0], ctx.axis), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: RankGroup) -> Tensor:
        return summed(tensor, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _Between(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, axis: RankGroup, sizes: Sequence[int], dim: int, pair: tuple[Way, Way]
    ) -> Tensor:
        ctx.given = axis, sizes, dim
        ctx.back = pair[1]
        return pair[0](tensor, axis, sizes, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.back(grads[0], *ctx.given), None, None, None, None


def enter(tensor: Tensor, axis: RankGroup) -> Tensor:
    """Into a split region: every rank's computation has a share in the gradient."""
    return _Enter.apply(tensor, axis)  # type: ignore[no-any-return,no-untyped-call]


def leave(tensor: Tensor, axis: RankGroup, *, fresh: bool = False) -> Tensor:
    """Out of a split region: every rank has a summand.

    A `fresh` tensor is read nowhere else: where no gradients are wanted, it becomes the sum in its own memory.
    """
    if fresh and not torch.is_grad_enabled() and not torch.compiler.is_compiling() and tensor.is_contiguous():
        comm.all_reduce(tensor, group=axis.group)
        return tensor
    return _Leave.apply(tensor, axis)  # type: ignore[no-any-return,no-untyped-call]


def between(tensor: Tensor, axis: RankGroup, sizes: Sequence[int], dim: int, pair: tuple[Way, Way]) -> Tensor:
    """From one form into another: the first way of the pair forward, the second backward."""
    dim = dim % tensor.dim()
    return _Between.apply(tensor, axis, tuple(sizes), dim, pair)  # type: ignore[no-any-return,no-untyped-call]


@dataclass
class ParameterCut(Uncopied):
    """Parameters of which every rank of an axis holds a part."""

    axis: RankGroup
    splits: dict[str, DimSplit]
    """How each of the module's own parameters is cut, by its name in the module."""

    @property
    def plain(self) -> bool:
        """Whether the layer has a method `product`, which computes with its weights as they lie here."""
        return False

    @property
    def by_outputs(self) -> bool:
        """Whether it is a plain linear layer that takes the whole input and returns this rank's outputs."""
        return False


class OwnProduct(nn.Module, ABC):
    """A layer over a weight in a form of its own, which may have adapters: ranks that share it ask it for products."""

    @abstractmethod
    def weight_cut(self, split: DimSplit, axis: RankGroup) -> DimSplit | None:
        """Take a rank's part of the weight from now on; returns how its parameter is cut then, None if it has none."""

    @abstractmethod
    def base_product(self, inputs: Tensor, *, with_bias: bool) -> Tensor:
        """The product without adapters."""

    def adapted(self, inputs: Tensor, output: Tensor) -> Tensor:
        """The output with what adapters add, which read the inputs as they come from outside."""
        return output

    def adapters(self) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
        """The adapters' layers that read its input, and those that write its output, by their names in it."""
        return {}, {}


def cut_of(module: nn.Module) -> ParameterCut | None:
    """How a module is cut; None if all of it is here."""
    share = getattr(module, "share", None)
    return share if isinstance(share, ParameterCut) else None


class _CrossEntropy(torch.autograd.Function):
    """logits [tokens, this rank's vocabulary], target [tokens] → the loss of each token, zero where it is ignored."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, start: int, group: Any, ignore: int) -> Tensor:
        stop = start + logits.shape[-1]
        most = logits.max(dim=-1).values
        if group is not None:
            most = highest(most, GroupMembers(group))
        shifted = logits - most.unsqueeze(-1)
        foreign = (target < start) | (target >= stop)
        place = (target - start).masked_fill(foreign, 0)
        found = shifted.gather(-1, place.unsqueeze(-1)).squeeze(-1)
        exps = shifted.exp_()
        sums = torch.stack([exps.sum(-1), found.masked_fill(foreign, 0)])  # [2, tokens]
        if group is not None:
            sums = summed(sums, GroupMembers(group))
        ignored = target == ignore
        ctx.save_for_backward(exps.div_(sums[0].unsqueeze(-1)), place, foreign | ignored, ignored)
        return (sums[0].log() - sums[1]).masked_fill(ignored, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        shares, place, elsewhere, ignored = ctx.saved_tensors
        grad = shares.clone()
        ones = (~elsewhere).to(grad.dtype).neg_().unsqueeze(-1)
        grad.scatter_add_(-1, place.unsqueeze(-1), ones)
        grad.mul_(grads[0].masked_fill(ignored, 0).unsqueeze(-1))
        return grad, None, None, None, None


def split_cross_entropy(logits: Tensor, target: Tensor, start: int, group: Any, ignore_index: int = -100) -> Tensor:
    """The loss of each token, in float32; `start` is the first token of this rank's vocabulary.

    The ranks of `group` have the other parts of the vocabulary; None where this rank has all of it.
    """
    flat = logits.reshape(-1, logits.shape[-1]).float()
    losses = _CrossEntropy.apply(flat, target.reshape(-1), start, group, ignore_index)  # type: ignore[no-untyped-call]
    return losses.view(target.shape)  # type: ignore[no-any-return]
