"""Which ranks hold which experts of a model, and what these are called in the whole model.

`zero` asks for the ranks of each parameter and does not know why; checkpoints ask for names.

[Note: whole state dicts] `state_dict()` is called on any rank, so it gives what this rank has. Whoever copies it for a
file by `clone_tensors_for_torch_save`, as Accelerate does on every rank, gets whole experts: the dict brings the way to
them along, in its metadata. That takes all ranks. One that calls alone gets an error after some seconds: ranks meet
in the job's store before anything is sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.checkpoint.storage.rank_meeting import RankExchange, default_exchange
from deepspeed.checkpoint.utils import WHOLE
from deepspeed.errors import CheckpointError, LayoutError, UsageError
from deepspeed.fragments import DimSplit, even
from deepspeed.log import warn_once
from deepspeed.moe.experts import Experts
from deepspeed.moe.layer import MoE, meet
from deepspeed.moe.stacked_experts import SpreadStack
from deepspeed.moe.utils import is_moe_param
from deepspeed.parallel import AxisGroup, ExpertGroups, ParallelLayout
from deepspeed.parallel.mpu import current_layout
from deepspeed.parallel.regions import Uncopied


@dataclass(frozen=True)
class SpreadLayer:
    """One layer of experts."""

    begin: str  # what the names of its experts begin with
    group_name: str
    experts: int
    local: int  # experts on each rank
    groups: ExpertGroups
    stacked: frozenset[str] = frozenset()
    """Parameters in which the experts lie one behind the other: each rank has a slice, under the name of the whole."""

    def holds(self, name: str) -> bool:
        """True for the name of a parameter of which ranks have different experts."""
        return name in self.stacked if self.stacked else name.startswith(self.begin)

    @property
    def listed(self) -> str:
        """What names in files begin with: there a slice of stacked experts is called as an expert is."""
        return f"{self.begin}deepspeed_experts." if self.stacked else self.begin

    @property
    def first(self) -> int:
        """The number in the whole model of this rank's first expert."""
        return self.groups.ep.rank * self.local


class SpreadExperts:
    """The layers of experts of a model."""

    def __init__(self, layers: Iterable[SpreadLayer], everybody: AxisGroup, *, data_first: bool) -> None:
        self.layers = tuple(layers)
        self.data_first = data_first
        self._everybody = everybody
        self._groups = {layer.group_name: layer.groups for layer in self.layers}
        self._buffers: dict[int, str | None] = {}

    def note_buffers(self, module: nn.Module) -> None:
        """Remember which buffers are those of experts; parameters tell by themselves."""
        for each in module.modules():
            if isinstance(each, Experts):
                self._buffers.update({id(buffer): each.group_name for buffer in each.buffers()})

    def lies_on(self, tensor: Tensor) -> AxisGroup:
        """The ranks that hold the same elements of a parameter or buffer."""
        if not is_moe_param(tensor) and id(tensor) not in self._buffers:
            return self._everybody
        name = self._buffers.get(id(tensor)) or getattr(tensor, "group_name", None)
        if name not in self._groups:
            raise LayoutError(
                f"a parameter of shape {tuple(tensor.shape)} has allreduce=False and the group {name!r}, but the model "
                f"has experts in {sorted(self._groups)} only. Set group_name to one of these, or remove the mark."
            )
        return self._groups[name].edp

    def frozen(self, module: nn.Module) -> list[str]:
        named = module.named_parameters()
        return [name for name, param in named if is_moe_param(param) and not param.requires_grad]

    def size_of(self, param: Tensor) -> int:
        """Over how many ranks the expert of a parameter is spread; 0 for one that is of no expert."""
        return self._groups[param.group_name].ep.size if is_moe_param(param) else 0  # type: ignore[attr-defined]

    def name_of(self, name: str) -> str:
        """What a parameter of this rank is called in the whole model."""
        for layer in self.layers:
            if layer.first and not layer.stacked and layer.holds(name):
                number, _, rest = name.removeprefix(layer.begin).partition(".")
                return f"{layer.begin}{int(number) + layer.first}.{rest}"
        return name

    def elsewhere(self, name: str) -> bool:
        """True for the name of an expert, whichever rank has it."""
        return any(layer.holds(name) for layer in self.layers if not layer.stacked)

    def crosses(self, param: Tensor) -> bool:
        """True for an expert that is spread or copied over tensor-parallel ranks, as if these were data-parallel."""
        return is_moe_param(param) and self._wide(self._groups[param.group_name])  # type: ignore[attr-defined]

    def dealt(self, layer: SpreadLayer) -> bool:
        """True if the experts of a layer lie on tensor-parallel ranks as if these were data-parallel."""
        return self._wide(layer.groups)

    @property
    def wide(self) -> bool:
        """True if experts lie on several tensor-parallel ranks, which then have to agree as data-parallel ranks do."""
        return any(self._wide(layer.groups) for layer in self.layers)

    def _wide(self, groups: ExpertGroups) -> bool:
        return not {*groups.ep.ranks, *groups.edp.ranks} <= set(self._everybody.ranks)

    @property
    def most(self) -> ExpertGroups:
        return max(self._groups.values(), key=lambda groups: groups.ep.size)

    @property
    def numbers(self) -> Mapping[str, int]:
        """Beginning of names in files → experts, or slices of them, in the order of the model."""
        return {layer.listed: layer.groups.ep.size if layer.stacked else layer.experts for layer in self.layers}

    @property
    def slices(self) -> Mapping[str, tuple[int, int]]:
        """Stacked parameters → which slice this rank has, of how many."""
        axes = {name: layer.groups.ep for layer in self.layers for name in layer.stacked}
        return {name: (axis.rank, axis.size) for name, axis in axes.items()}

    def cut(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict of whole values as this rank holds them; values that have the size of a slice already stay."""
        cut = dict(state)
        for name, split in self.splits.items():
            value = state.get(name)
            if isinstance(value, Tensor) and value.dim() and len(value) == split.total:
                cut[name] = split.cut(value, self.slices[name][0])
        return cut

    @property
    def splits(self) -> Mapping[str, DimSplit]:
        return {
            name: DimSplit.of(0, [even(layer.experts, layer.groups.ep.size)])
            for layer in self.layers
            for name in layer.stacked
        }


def spread_experts(
    module: nn.Module, layout: ParallelLayout, stack: ExitStack, *, data_first: bool
) -> SpreadExperts | None:
    """Join every layer of experts to its ranks; None for a model without any."""
    layers = []
    for path, each in module.named_modules():
        if isinstance(each, MoE):
            groups = each.join(layout, data_first=data_first)
            begin = f"{path}{'.' * bool(path)}deepspeed_moe.experts.deepspeed_experts."
            made = SpreadLayer(begin, each.expert_group_name, each.num_experts, each.num_local_experts, groups)
        elif isinstance(each, SpreadStack):
            known = each.stack
            groups = meet(known.groups, known.group_name)
            own = frozenset(f"{path}.{name}" for name, _ in each.named_parameters(recurse=False))
            made = SpreadLayer(f"{path}.", known.group_name, known.experts, known.local, groups, own)
        else:
            continue
        stack.callback(_forget, made.group_name, groups)
        layers.append(made)
    if not layers:
        return None
    spread = SpreadExperts(layers, layout.samples, data_first=data_first)
    spread.note_buffers(module)
    return spread


def cuts_of_experts(module: nn.Module) -> dict[str, tuple[DimSplit, int]]:
    """Stacked parameters by name → how they are cut, and which part this rank has."""
    stacks = [(path, each, each.stack) for path, each in module.named_modules() if isinstance(each, SpreadStack)]
    return {
        f"{path}.{name}": (DimSplit.of(0, [even(stack.experts, stack.groups.ep.size)]), stack.groups.ep.rank)
        for path, each, stack in stacks
        for name, _ in each.named_parameters(recurse=False)
    }


def _forget(name: str, groups: ExpertGroups) -> None:
    if current_layout.experts.get(name) is groups:
        del current_layout.experts[name]


_WAYS = (
    "engine.save_16bit_model(), engine.module_state_dict() or, with Accelerate, accelerator.get_state_dict(model), on "
    "all ranks"
)


def export_whole(module: nn.Module, experts: SpreadExperts | None, stack: ExitStack) -> None:
    """Let the state dicts of a module bring along how they become whole, as long as the stack is open."""
    if experts is None or all(layer.groups.ep.size == 1 for layer in experts.layers):
        return
    exchange = default_exchange()
    stack.callback(exchange.close)
    export = StateDictExport(experts, exchange)
    for handle in (
        module.register_state_dict_pre_hook(export.begin),
        module._register_state_dict_hook(export.mark),  # torch's public name returns no way to remove it
    ):
        stack.callback(handle.remove)


class StateDictExport(Uncopied):
    """The way from one rank's state dict to that of the whole model."""

    def __init__(self, experts: SpreadExperts, exchange: RankExchange) -> None:
        self._experts, self._exchange = experts, exchange
        self._asked = False

    def begin(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Somebody calls `state_dict()`; with `keep_vars` it is the parameters themselves that he wants."""
        self._asked = not keep_vars
        if self._asked:
            warn_once(
                "state_dict() of a model whose experts are spread over ranks has those of this rank, and so would a "
                f"file that is made of it on one rank. A whole model comes from {_WAYS}."
            )

    def mark(self, module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any]) -> None:
        """The dict is there; one of empty tensors, as of parameters in shards, leads nowhere."""
        if self._asked and all(param.numel() for param in module.parameters()):
            metadata[WHOLE] = self
        self._asked = False

    def whole(self, state: Mapping[str, Any], prefix: str) -> OrderedDict[str, Any]:
        """The state dict with the experts of all ranks, as the whole model has them; all ranks call this."""
        try:
            with self._exchange.meeting("the state dict of a model with spread experts") as meeting:
                meeting.gather(sorted(state)[:1])
        except CheckpointError as error:
            raise UsageError(
                f"this state dict has the experts of rank {self._exchange.rank} alone, and those of other ranks can be "
                f"had only if all ranks ask for them together: {error}. Call {_WAYS}."
            ) from error
        found: OrderedDict[str, Any] = OrderedDict(state)
        for layer in self._experts.layers:
            join_layer(found, self._experts, layer, prefix)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()  # in a file it means nothing


def join_layer(state: dict[str, Any], experts: SpreadExperts, layer: SpreadLayer, prefix: str = "") -> None:
    """Put the experts of a layer together on all ranks, which call this, by their names in the whole model."""
    if layer.groups.ep.size == 1:
        return
    names = [name.removeprefix(prefix) for name in state if name.startswith(prefix)]
    names = [name for name in names if layer.holds(name)]
    own = {experts.name_of(name): state[prefix + name].detach().cpu() for name in names}
    told: list[Any] = [None] * layer.groups.ep.size
    comm.all_gather_object(told, own, group=layer.groups.ep.group)
    if layer.stacked:
        state.update({prefix + name: torch.cat([each[name] for each in told]) for name in own})
        return
    for name in names:
        del state[prefix + name]
    state.update({prefix + name: value for each in told for name, value in each.items()})
