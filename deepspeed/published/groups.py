"""Process groups without a handle: a facade over the current layout, for scripts and clients that call it so.

`groups.mpu` and `groups.mesh_device` may be assigned; the next call follows them. New code passes a
`deepspeed.parallel.ParallelLayout` instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from deepspeed.errors import DeepSpeedError, LayoutError
from deepspeed.parallel import hierarchy
from deepspeed.parallel.axes import MODEL_AXES, SAMPLE_AXES, expert_parallel_ranks
from deepspeed.parallel.layout import AxisGroup, ExpertGroups, ParallelLayout
from deepspeed.parallel.mpu import current_layout, layout_from_mpu

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    mpu: Any
    mesh_device: DeviceMesh | None

__all__ = [
    "DeprecatedException",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "initialize",
    "set_tensor_model_parallel_rank",
    "set_tensor_model_parallel_world_size",
]


class DeprecatedException(DeepSpeedError):
    """A call that no longer does anything."""


def initialize(ep_size: int = 1, mpu: Any = None) -> NoReturn:
    """Refuses: expert groups are made by the MoE layers that need them."""
    raise DeprecatedException(
        f"deepspeed.published.groups.initialize(ep_size={ep_size}) does nothing any more. Pass ep_size={ep_size} to "
        "deepspeed.moe.layer.MoE, and mpu to deepspeed.initialize."
    )


# --- axes of the layout ------------------------------------------------------------------------------------------

_Getters = tuple[Callable[[], "ProcessGroup"], Callable[[], int], Callable[[], int]]


def _of_axis(*names: str, needs_world: bool = False) -> _Getters:
    """Getters of the group, the rank in it and its size; 0 and 1 before there is a world unless it `needs_world`."""

    def group() -> ProcessGroup:
        return _axis(*names).group

    def rank() -> int:
        return _axis(*names).rank if needs_world or current_layout.is_known else 0

    def size() -> int:
        return _axis(*names).size if needs_world or current_layout.is_known else 1

    return group, rank, size


# The ranks that hold the same part of the model and see other data.
get_data_parallel_group, get_data_parallel_rank, get_data_parallel_world_size = _of_axis("dp", needs_world=True)
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_world_size = get_data_parallel_world_size
# Those that together hold one copy of the model: stages × tensor slices.
get_model_parallel_group, get_model_parallel_rank, get_model_parallel_world_size = _of_axis(*MODEL_AXES)
_get_model_parallel_group = get_model_parallel_group
_get_model_parallel_rank = get_model_parallel_rank
_get_model_parallel_world_size = get_model_parallel_world_size
# Those that hold slices of the same layers.
get_tensor_model_parallel_group, _tensor_rank, _tensor_size = _of_axis("tp")
# Those that share sequences.
_get_sequence_parallel_group, _get_sequence_parallel_rank, _get_sequence_parallel_world_size = _of_axis("sp")
# Those over which gradients are averaged.
_get_sequence_data_parallel_group, _get_sequence_data_parallel_rank, _get_sequence_data_parallel_world_size = _of_axis(
    *SAMPLE_AXES, needs_world=True
)


def get_tensor_model_parallel_rank() -> int:
    """This rank's tensor slice, or what `set_tensor_model_parallel_rank` said."""
    given = current_layout.tensor_rank
    return _tensor_rank() if given is None else given


def get_tensor_model_parallel_world_size() -> int:
    """The number of tensor slices, or what `set_tensor_model_parallel_world_size` said."""
    given = current_layout.tensor_size
    return _tensor_size() if given is None else given


def get_tensor_model_parallel_src_rank() -> int:
    """The global rank of the first rank of this tensor-parallel group."""
    return _axis("tp").ranks[0]


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    """Let `get_tensor_model_parallel_rank` answer this; None ends it."""
    current_layout.tensor_rank = rank


def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    """Let `get_tensor_model_parallel_world_size` answer this; None ends it."""
    current_layout.tensor_size = world_size


def _get_data_parallel_group_ranks() -> list[int]:
    return list(_axis("dp").ranks)


def _get_broadcast_src_rank() -> int:
    """The rank that the others of this rank's data × sequence group take their parameters from."""
    return _axis(*SAMPLE_AXES).ranks[0]


def _clone_world_group() -> ProcessGroup:
    """A group over all ranks with a communicator of its own, made once."""
    return current_layout.world_clone()


def _create_model_parallel(model_parallel_size_: int) -> tuple[ProcessGroup, ProcessGroup]:
    """(data-parallel, model-parallel) group for that many neighbouring model-parallel ranks."""
    layout = current_layout.keep(ParallelLayout.build(tp=model_parallel_size_))
    return layout.data.group, layout.tensor.group


# --- expert parallelism ----------------------------------------------------------------------------------------


def _get_expert_parallel_ranks(
    world_size: int,
    tensor_parallel_size_: int,
    expert_parallel_size_: int,
    pipeline_parallel_size_: int = 1,
    use_data_before_expert_parallel_: bool = False,
) -> tuple[list[list[int]], list[list[int]]]:
    """The rank lists (expert parallel, expert data parallel) with tensor-parallel experts; makes nothing."""
    return expert_parallel_ranks(
        world_size,
        tp=tensor_parallel_size_,
        ep=expert_parallel_size_,
        pp=pipeline_parallel_size_,
        data_first=use_data_before_expert_parallel_,
    )


def _create_expert_and_data_parallel(
    expert_parallel_size_: int, use_data_before_expert_parallel_: bool = False
) -> None:
    """Make the groups `ep_size_<n>` over all ranks of a pipeline stage; experts are not tensor-parallel."""
    experts = current_layout.get().experts(
        expert_parallel_size_, data_first=use_data_before_expert_parallel_, fold_tp=True
    )
    _register_experts(expert_parallel_size_, experts)


def _create_expert_data_and_model_parallel(
    expert_parallel_size_: int, mpu: Any, use_data_before_expert_parallel_: bool = False
) -> None:
    """Make the groups `ep_size_<n>` for experts that are tensor-parallel as the mpu says."""
    if mpu is None or mpu is current_layout.mpu:
        layout = current_layout.get()
    else:
        layout = current_layout.keep(layout_from_mpu(mpu))
    experts = layout.experts(expert_parallel_size_, data_first=use_data_before_expert_parallel_)
    _register_experts(expert_parallel_size_, experts)


_Of = TypeVar("_Of")


def _of_experts(name: str, ask: Callable[[AxisGroup], _Of]) -> Callable[[str], _Of]:
    """What `ask` finds in the axis `ep` or `edp` of the experts whose groups have a name."""

    def get(group_name: str) -> _Of:
        return ask(_experts(group_name)[name])

    return get


_get_expert_parallel_group = _of_experts("ep", lambda axis: axis.group)
_get_expert_parallel_group_ranks = _of_experts("ep", lambda axis: list(axis.ranks))
_get_expert_parallel_rank = _of_experts("ep", lambda axis: axis.rank)
_get_expert_parallel_world_size = _of_experts("ep", lambda axis: axis.size)
_get_expert_parallel_src_rank = _of_experts("ep", lambda axis: axis.ranks[0])
_get_expert_data_parallel_group = _of_experts("edp", lambda axis: axis.group)
_get_expert_data_parallel_group_ranks = _of_experts("edp", lambda axis: list(axis.ranks))
_get_expert_data_parallel_rank = _of_experts("edp", lambda axis: axis.rank)
_get_expert_data_parallel_world_size = _of_experts("edp", lambda axis: axis.size)
_get_expert_broadcast_src_rank = _of_experts("edp", lambda axis: axis.ranks[0])  # replicas take parameters from it


def _get_expert_parallel_group_dict() -> dict[str, ProcessGroup]:
    return {name: experts.ep.group for name, experts in current_layout.experts.items()}


def _get_expert_data_parallel_group_dict() -> dict[str, ProcessGroup]:
    return {name: experts.edp.group for name, experts in current_layout.experts.items()}


def _get_max_expert_size() -> int | None:
    """The largest expert-parallel size for which groups were made; None if there are none."""
    return max((experts.ep.size for experts in current_layout.experts.values()), default=None)


def _get_max_expert_size_name() -> str:
    return f"ep_size_{_get_max_expert_size()}"


def _register_experts(size: int, experts: ExpertGroups) -> None:
    name = f"ep_size_{size}"
    known = current_layout.experts.get(name)
    if known is not None and known.ep.axis != experts.ep.axis:
        raise LayoutError(
            f"the groups {name!r} exist with the ranks {list(known.ep.ranks)} and are now asked for with "
            f"{list(experts.ep.ranks)}. Use one rank order, and one choice of tensor-parallel experts, per size."
        )
    for axis in (experts.ep, experts.edp):
        if axis.size > 1:
            _ = axis.group
    current_layout.experts.setdefault(name, experts)


def _experts(group_name: str) -> ExpertGroups:
    known = current_layout.experts
    if group_name not in known:
        raise LayoutError(
            f"there are no expert groups {group_name!r}; there are {sorted(known) or 'none'}. "
            "They are made when an MoE layer of that ep_size gets its groups."
        )
    return known[group_name]


# --- ZeRO++: secondary shards and two-hop gradients --------------------------------------------------------------


def _create_zero_param_parallel_group(group_size: int) -> None:
    """Make the groups of secondary shards (hpZ): runs of min(group_size, data-parallel ranks) neighbours."""
    layout = current_layout.get()
    intra = layout.axis_group(hierarchy.hpz_split(layout[SAMPLE_AXES].axis, group_size).intra)
    if intra.size > 1:
        _ = intra.group
    current_layout.secondary = intra


def _zero_param_parallel_is_initialized() -> bool:
    return current_layout.secondary is not None


def _get_zero_param_intra_parallel_group() -> ProcessGroup:
    return _secondary().group


def _get_zero_param_intra_parallel_group_ranks() -> list[int]:
    return list(_secondary().ranks)


def _get_zero_param_intra_parallel_group_world_size() -> int:
    return _secondary().size


def _get_zero_param_intra_parallel_rank_in_mygroup() -> int:
    return _secondary().rank


def _secondary() -> AxisGroup:
    if current_layout.secondary is None:
        raise LayoutError(
            "there are no groups for secondary shards. Set zero_hpz_partition_size above 1 in the config."
        )
    return current_layout.secondary


def _get_local_all_to_all_group() -> dict[str, ProcessGroup]:
    """This rank's groups for a two-hop all-to-all: `local_<node>` and, with several nodes, `global_<place>`."""
    layout = current_layout.get()
    inter, intra = layout.world.split(intra_node=True)
    groups = {f"local_{inter.rank}": intra.group}
    if inter.size > 1:
        groups[f"global_{intra.rank}"] = inter.group
    return groups


# --- the slot ----------------------------------------------------------------------------------------------------


def _axis(*names: str) -> AxisGroup:
    return current_layout.get()[names]


def _slot(name: str) -> property:
    """An attribute of the current layout; deleting it, as mocks do, unsets it."""
    return property(
        lambda _: getattr(current_layout, name),
        lambda _, value: setattr(current_layout, name, value),
        lambda _: setattr(current_layout, name, None),
    )


class _Groups(ModuleType):
    """Makes `groups.mpu = …` and `groups.mesh_device = …` take effect."""

    mpu = _slot("mpu")
    mesh_device = _slot("mesh")


sys.modules[__name__].__class__ = _Groups
