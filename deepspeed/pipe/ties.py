"""Weights that several stages share: equal at the beginning, and their gradients summed before every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.log import warn_once
from deepspeed.parallel.topology import PipelineParallelGrid
from deepspeed.zero.agreement import RankAgreement

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_ELSEWHERE, _TRAINED, _FROZEN = 0, 1, 2


@dataclass
class TiedWeights:
    """One key of tied layers."""

    key: str
    attributes: tuple[str, ...]  # what of the module is shared; everything else is each stage's own
    ranks: list[int] = field(default_factory=list)  # the pipeline ranks that have it, in the order of the stages


class StageTies:
    """The tied weights of a rank."""

    def __init__(
        self, ties: Iterable[TiedWeights], grid: PipelineParallelGrid, module_of: Callable[[str], nn.Module]
    ) -> None:
        """`module_of` gives this rank's module of a key."""
        self._ties = list(ties)
        self._grid = grid
        self._module_of = module_of

    def mine(self) -> Iterator[tuple[TiedWeights, nn.Parameter, list[int]]]:
        """(tie, weight, global ranks that share it), in an order that all ranks have."""
        here = self._grid.stage_id
        for tie in self._ties:
            if here in tie.ranks and len(tie.ranks) > 1:
                ranks = [self._grid.stage_to_global(rank) for rank in tie.ranks]
                for attribute in tie.attributes:
                    yield tie, _weight(self._module_of(tie.key), tie.key, attribute), ranks

    def shared(self) -> Iterator[nn.Parameter]:
        """The weights of this rank that get gradients from several stages, wherever these lie."""
        for tie in self._ties:
            if self._grid.stage_id in tie.ranks:
                yield from self._module_of(tie.key).parameters()

    def counted_elsewhere(self) -> set[int]:
        """Ids of weights whose gradient an earlier stage counts in the norm."""
        return {id(param) for tie, param, _ in self.mine() if tie.ranks[0] != self._grid.stage_id}

    def require_alike(self, hosts: RankAgreement) -> None:
        """Raise where a weight is trained on one stage and frozen on another: its copies would go apart."""
        self._warn_of_own()
        weights = [(tie, attribute) for tie in self._ties for attribute in tie.attributes]
        if not weights:
            return
        said = hosts.exchange([self._word(*each) for each in weights], "tied weights that are trained").tolist()
        for place, (tie, attribute) in enumerate(weights):
            ranks = {row[place]: rank for rank, row in reversed([*enumerate(said)])}
            if _TRAINED in ranks and _FROZEN in ranks:
                raise UsageError(
                    f"the tied weight {attribute!r} of {tie.key!r} is trained on rank {ranks[_TRAINED]} and frozen on "
                    f"rank {ranks[_FROZEN]}, so that its copies would go apart. Set requires_grad alike on all stages; "
                    "a layer that shall give it no gradient uses weight.detach()"
                )

    def _warn_of_own(self) -> None:
        for tie in self._ties:
            if self._grid.stage_id in tie.ranks[1:]:
                named = self._module_of(tie.key).named_parameters()
                own = [name for name, param in named if param.requires_grad and name not in tie.attributes]
                if own:
                    warn_once(
                        f"the tied layer {tie.key!r} has parameters that its stages do not share: {', '.join(own)}. "
                        "Each stage trains its own, and checkpoints keep those of one stage only. Name them in "
                        "tied_weight_attr, too, or freeze them"
                    )

    def _word(self, tie: TiedWeights, attribute: str) -> int:
        if self._grid.stage_id not in tie.ranks:
            return _ELSEWHERE
        return _TRAINED if _weight(self._module_of(tie.key), tie.key, attribute).requires_grad else _FROZEN

    @torch.no_grad()
    def share(self) -> None:
        """Give every stage the weights of the first that has them."""
        for _, param, ranks in self.mine():
            if ranks[0] == self._grid.global_rank:
                for other in ranks[1:]:
                    comm.send(param.data, other, self._group)
            else:
                comm.recv(param.data, ranks[0], self._group)

    @torch.no_grad()
    def reduce(self, replace: Callable[[nn.Parameter, Callable[[Tensor | None], Tensor]], None]) -> None:
        """Sum gradients over stages; `replace(weight, change)` puts what `change` makes of a gradient in its place."""
        for tie, param, ranks in self.mine():
            replace(param, partial(self._sum, tie, param, ranks))

    def _sum(self, tie: TiedWeights, param: nn.Parameter, ranks: list[int], grad: Tensor | None) -> Tensor:
        """Each stage sends its own to the others, and all add in the order of the stages."""
        shape = getattr(param, "ds_shape", param.shape)
        own = torch.zeros(shape, dtype=param.dtype, device=param.device) if grad is None else grad.contiguous()
        here = self._grid.stage_id
        parts = [own if rank == here else torch.empty_like(own) for rank in tie.ranks]
        operations: list[Any] = []
        for part, rank in zip(parts, ranks, strict=True):
            if rank != self._grid.global_rank:
                operations.append(comm.P2POp(comm.isend, own, rank, self._group))
                operations.append(comm.P2POp(comm.irecv, part, rank, self._group))
        with comm.labelled(f"gradient of the tied weight {tie.key!r}"):
            for work in comm.batch_isend_irecv(operations):
                work.wait()
        return reduce(torch.add, parts)

    @property
    def _group(self) -> ProcessGroup:
        return self._grid.get_pipe_parallel_group()


def _weight(module: nn.Module, key: str, attribute: str) -> nn.Parameter:
    found: object = module
    for name in attribute.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, nn.Parameter):
        raise UsageError(
            f"the tied layer {key!r} is a {type(module).__name__}, which has no parameter {attribute!r}; name what is "
            "shared by tied_weight_attr"
        )
    return found
