"""Which ranks hold which experts of a model, and what these are called in the whole model.

`zero` asks for the ranks of each parameter and does not know why; checkpoints ask for names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from deepspeed.errors import LayoutError
from deepspeed.fragments import Split, even
from deepspeed.moe.experts import Experts
from deepspeed.moe.layer import MoE, meet
from deepspeed.moe.stacked import SpreadStack
from deepspeed.moe.utils import is_moe_param
from deepspeed.parallel import AxisGroup, ExpertGroups, ParallelLayout
from deepspeed.parallel.current import current_layout

__all__ = ["SpreadExperts", "SpreadLayer", "cuts_of_experts", "spread_experts"]


@dataclass(frozen=True)
class SpreadLayer:
    """One layer of experts."""

    begin: str
    """What the names of its experts begin with."""
    group_name: str
    experts: int
    local: int
    """Experts on each rank."""
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
        """This rank's parameters of experts that are not trained, by their names here."""
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
        """The ranks of the experts that are spread over the largest number of ranks."""
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
    def splits(self) -> Mapping[str, Split]:
        """How stacked parameters are cut over the ranks that share them."""
        return {
            name: Split.of(0, [even(layer.experts, layer.groups.ep.size)])
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
    spread = SpreadExperts(layers, layout["dp", "sp"], data_first=data_first)
    spread.note_buffers(module)
    return spread


def cuts_of_experts(module: nn.Module) -> dict[str, tuple[Split, int]]:
    """Stacked parameters by name → how they are cut, and which part this rank has."""
    return {
        f"{path}.{name}": (
            Split.of(0, [even(each.stack.experts, each.stack.groups.ep.size)]),
            each.stack.groups.ep.rank,
        )
        for path, each in module.named_modules()
        if isinstance(each, SpreadStack)
        for name, _ in each.named_parameters(recurse=False)
    }


def _forget(name: str, groups: ExpertGroups) -> None:
    if current_layout.experts.get(name) is groups:
        del current_layout.experts[name]
