"""From a config to where states and parameters live, and what brings those of the disk."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed.comm import Pending
from deepspeed.comm.discover import local_ranks
from deepspeed.comm.pending import AllOf
from deepspeed.config.schema import Schema
from deepspeed.config.zero import DeepSpeedZeroOffloadParamConfig
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.memory.budget import DEVICE, MOMENTS, PARAMETERS, Spread, TierPlan, Widths, plan_states, show
from deepspeed.memory.host import host_empty
from deepspeed.memory.tier import (
    ON_DEVICE,
    DeviceStore,
    ElementsPerTier,
    ShareInTier,
    StateStore,
    StateTiers,
    SwapFile,
    Tier,
    file_engine,
)
from deepspeed.ops.aio import FileEngine
from deepspeed.ops.moments import MomentKeeper
from deepspeed.parallel import AxisGroup
from deepspeed.precision.policy import Precision
from deepspeed.zero.agreement import RankAgreement
from deepspeed.zero.birth.placement import rank_device
from deepspeed.zero.parameters.gather import Gather
from deepspeed.zero.parameters.offloaded import (
    ChunkLimits,
    ChunkTier,
    ChunkTiers,
    FileChunks,
    FileGather,
    HostChunks,
    HostGather,
)
from deepspeed.zero.parameters.shard import Shard
from deepspeed.zero.parameters.sharding import numel_of
from deepspeed.zero.placement import LiesOn
from deepspeed.zero.states.tiles import MASTER, OffloadedTile, Tile, state_of, tiles_well, twin


class DiskStore:
    """`deepspeed.memory.tier.StateStore` for arenas with a swap file; whatever lives elsewhere stays where it is."""

    def __init__(self, optimizer: Optimizer, engine: FileEngine, buffers: int) -> None:
        """At most `buffers` of host memory are kept from one tile to the next, or as many as one tile needs."""
        self._optimizer = optimizer
        self._engine = engine
        self._most = buffers
        self._buffers: list[Tensor] = []
        """Free ones; as many tiles as are on their way at a time have some."""
        self._held: dict[OffloadedTile, dict[str, Tensor]] = {}

    def fetch(self, tile: Tile) -> Pending[None]:
        arena = tile.arena
        if arena is None or arena.swap is None:
            return Pending(None)
        swap, held = arena.swap, {kind: self._buffer(room) for kind, room in arena.rooms.items()}
        reads = [self._engine.read(swap.path, held[kind], swap.offset_of(room)) for kind, room in arena.rooms.items()]

        def enter(_: None) -> None:
            self._held[arena] = held
            for kind, buffer in held.items():
                arena.show(self._optimizer, kind, buffer)

        return Pending(None, AllOf(reads), enter)

    @torch.no_grad()
    def keep(self, tile: Tile) -> Pending[None]:
        """See `StateStore`; kinds of state that the step made get their place on the disk."""
        arena = tile.arena
        if arena is None or arena.swap is None:
            return Pending(None)
        held, writes = self._held.pop(arena), []
        for kind, sizes, dtype in kinds_of(self._optimizer, arena):
            resting = arena.room(kind, dtype, sum(sizes))
            buffer = held.get(kind)
            if buffer is None or (buffer.numel(), buffer.dtype) != (resting.numel(), dtype):
                buffer = held[kind] = self._buffer(resting)
            for piece, part in zip(arena.pieces, buffer.split(sizes), strict=True):
                value = state_of(self._optimizer, piece, kind)
                if value is not None and value.data_ptr() != part.data_ptr():  # made, or replaced, by the step
                    part.copy_(value.detach().reshape(-1))
            writes.append(self._engine.write(arena.swap.path, buffer, arena.swap.offset_of(resting)))
            arena.show(self._optimizer, kind, resting)

        def free(_: None) -> None:
            room = max(self._most, len(held)) - len(self._buffers)
            self._buffers += [buffer.view(torch.uint8) for buffer in held.values()][: max(room, 0)]

        return Pending(None, AllOf(writes), free)

    def close(self) -> None:
        """Finish what is on its way."""
        self._engine.close()
        self._buffers.clear()

    def _buffer(self, like: Tensor) -> Tensor:
        """Host memory for as many elements; pages of it, so that the disk writes into it without a copy."""
        for place, free in enumerate(self._buffers):
            if free.numel() >= like.nbytes:
                return self._buffers.pop(place)[: like.nbytes].view(like.dtype)
        return host_empty(like.numel(), like.dtype, pinned=False)


def kinds_of(optimizer: Optimizer, arena: OffloadedTile) -> Iterator[tuple[str, list[int], torch.dtype]]:
    """(kind, elements of each piece, dtype) of everything that an arena has on the disk: masters and states."""
    first: dict[str, Tensor] = {}
    for piece in arena.pieces:
        for kind, value in optimizer.state.get(piece.master, {}).items():
            if isinstance(value, Tensor) and value.dim() > 0:
                first.setdefault(kind, value)
    yield MASTER, arena.sizes, arena.pieces[0].master.dtype
    for kind, example in first.items():
        values = [state_of(optimizer, piece, kind) for piece in arena.pieces]
        yield kind, [0 if value is None else value.numel() for value in values], example.dtype


_BUFFERS = 4  # as many as the states of AdamW and one more
_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}


def tiers_of(schema: Schema, budgeted: Budgeted | None, stack: ExitStack) -> StateTiers:
    """Where the states of an engine live: as `offload_optimizer` or `memory` says; files are closed with `stack`."""
    zero, offload = schema.zero_optimization, schema.zero_optimization.offload_optimizer
    once = (schema.gradient_accumulation_steps or 1) == 1
    if budgeted is not None:
        swap = _swap(schema.memory.path, "memory.path", stack) if budgeted.states.get(Tier.DISK) else None
        return StateTiers(ElementsPerTier(budgeted.states), away=True, tile=tile_of(schema), once=once, swap=swap)
    if offload is None or not zero.offloads_optimizer:
        return ON_DEVICE
    tier, swap = _TIERS[offload.device.value], None
    if tier is Tier.DISK:
        swap = _swap(offload.nvme_path, "zero_optimization.offload_optimizer.nvme_path", stack)
    return StateTiers(
        ShareInTier(tier, float(offload.ratio)),
        away=offload.ratio > 0,
        pinned=offload.pin_memory,
        tile=tile_of(schema),
        once=once,
        swap=swap,
    )


def _swap(folder: Path | None, key: str, stack: ExitStack) -> SwapFile:
    assert folder is not None, "the config requires it"
    swap = SwapFile(folder, key)
    stack.callback(swap.close)
    return swap


def store_of(schema: Schema, tiers: StateTiers, optimizer: Optimizer, stack: ExitStack) -> StateStore[Tile]:
    """What brings states to memory and back: nothing has to, unless they rest on the disk."""
    if tiers.swap is None:
        return DeviceStore()
    if not tiles_well(optimizer):
        key = "memory.disk" if schema.memory.disk else "zero_optimization.offload_optimizer.device"
        raise DeepSpeedConfigError(
            f"{key}: states are to live on the disk, but a step of {type(optimizer).__name__} needs those of all "
            "parameters at once, or is not known to do without. Use AdamW or another optimizer of torch or of this "
            "library (except LBFGS), or host memory.",
            path=key,
        )
    offload = schema.zero_optimization.offload_optimizer
    # of each of the tiles that are read, updated and written at a time
    buffers = 3 * (int(offload.buffer_count) if offload is not None else _BUFFERS)
    store = DiskStore(optimizer, file_engine(schema.aio), buffers)
    stack.callback(store.close)
    return store


_WIDEST = 4  # bytes of an element of a parameter, at most
_ANY = 1 << 62


def remotes_of(schema: Schema, budgeted: Budgeted | None, stack: ExitStack) -> ChunkTiers | None:
    """As `offload_param` or `memory` says; None: all chunks are on the device. Files are closed with `stack`."""
    if budgeted is None:
        remote = remote_of(schema, stack)
        return None if remote is None else ChunkTiers(remote)
    room = budgeted.parameters
    if not room.get(Tier.HOST) and not room.get(Tier.DISK):
        return None
    folder = schema.memory.path if room.get(Tier.DISK) else None
    return ChunkTiers(_remote(schema, folder, _within(room.get(Tier.HOST, 0)), stack), ElementsPerTier(room))


def remote_of(schema: Schema, stack: ExitStack) -> ChunkTier | None:
    """Where chunks live as `offload_param` says, or before a plan is made of `memory`; None: on the device."""
    offload, memory = schema.zero_optimization.offload_param, schema.memory
    if memory.device is not None:
        in_memory = _ANY if memory.host is None else memory.host // local_ranks() // _WIDEST
        return _remote(schema, memory.path, _within(in_memory), stack)
    if offload is None or not schema.zero_optimization.offloads_parameters:
        return None
    limits = ChunkLimits(
        int(offload.max_in_cpu), int(offload.buffer_count), int(offload.buffer_size), offload.pin_memory
    )
    return _remote(schema, offload.nvme_path if offload.device.value == "nvme" else None, limits, stack)


def uses_disk(schema: Schema) -> bool:
    """True if states or parameters may lie in files."""
    return bool(schema.memory.disk or schema.zero_optimization.swap_folders)


def reserve(remotes: ChunkTiers, module: nn.Module, axes: LiesOn) -> None:
    """Make sure of space for all chunks of a model that will lie in files."""
    remote, foreseen = remotes.remote, copy.deepcopy(remotes.rooms)
    if isinstance(remote, FileChunks):
        chunks = [(-(-numel_of(param) // axes(param).size), param.dtype) for param in module.parameters()]
        remote.reserve(each for each in chunks if foreseen.place([each[0]]) != [Tier.DEVICE])


def _within(in_memory: int) -> ChunkLimits:
    """So many elements in host memory, and buffers as they are without a word of the config."""
    default = DeepSpeedZeroOffloadParamConfig()
    return ChunkLimits(in_memory, int(default.buffer_count), int(default.buffer_size), default.pin_memory)


def _remote(schema: Schema, folder: Path | None, limits: ChunkLimits, stack: ExitStack) -> ChunkTier:
    """Files in a folder, or host memory without one."""
    device = rank_device()[1]
    if folder is None:
        return HostChunks(device, pinned=limits.pinned)
    key = "zero_optimization.offload_param.nvme_path" if schema.memory.path is None else "memory.path"
    swap = _swap(folder, key, stack)
    engine = file_engine(schema.aio)
    stack.callback(engine.close)
    return FileChunks(device, swap, engine, limits)


def gather_from(remote: ChunkTier, among: Gather[Shard]) -> Gather[Shard]:
    """How chunks become whole on the device."""
    return FileGather(remote, among) if isinstance(remote, FileChunks) else HostGather(remote.device, among)


_SAMPLE = (64, 64)  # of a parameter, to see what an optimizer keeps of one
_UNKNOWN = 8.0  # bytes per element of an optimizer that can only be asked by a step


@dataclass(frozen=True)
class Budgeted:
    """Where states live because not all of them may stay on the device."""

    own: TierPlan
    """Of this rank."""
    first: TierPlan
    """Of the first rank, which holds the most: all ranks place parameters, which they exchange, as it does."""

    @property
    def states(self) -> dict[Tier, int]:
        """Elements of masters, moments and gradients in each tier."""
        return _by_tier(self.own.elements(MOMENTS))

    @property
    def parameters(self) -> dict[Tier, int]:
        """Elements of chunks of stage 3 in each tier."""
        return _by_tier(self.first.elements(PARAMETERS))


def tile_of(schema: Schema) -> int:
    """Elements that are updated at a time away from the device."""
    zero = schema.zero_optimization
    return max(int(zero.sub_group_size), 1) if "sub_group_size" in zero.model_fields_set else ON_DEVICE.tile


def parameters_leave(schema: Schema, module: nn.Module, precision: Precision, axis: AxisGroup) -> bool:
    """True if the chunks of stage 3 do not fit into what states may take of the device."""
    limit, zero = schema.memory.device, schema.zero_optimization
    if limit is None or not zero.shards_parameters:
        return False
    numels = [numel_of(param) for param in module.parameters()]
    chunks = [-(-numel // axis.size) for numel in numels]
    lasting = [-(-numel // axis.size) * axis.size for numel in numels if numel <= _persistent(schema)]
    return (sum(chunks) + sum(lasting)) * precision.param.itemsize > limit


def budget(
    schema: Schema,
    module: nn.Module,
    precision: Precision,
    optimizer: Optimizer | None,
    axis: AxisGroup,
    agreement: RankAgreement,
) -> Budgeted | None:
    """The plan of the `memory` section, which rank 0 prints; None: everything stays on the device."""
    if schema.memory.device is None:
        return None
    ranks = int(agreement.exchange([local_ranks(axis.size)], "ranks of a machine").max())
    names = {id(param): name for name, param in module.named_parameters()}
    groups = [] if optimizer is None else [_trained(options, names) for options in optimizer.param_groups]
    trained = {name for group in groups for name, _ in group}
    frozen = [(name, numel_of(param)) for name, param in module.named_parameters() if name not in trained]
    widths = Widths(
        precision.param.itemsize,
        precision.accumulate.itemsize,
        0 if precision.master == precision.param else precision.master.itemsize,
        0 if optimizer is None else state_width(optimizer),
    )

    def plan(rank: int) -> TierPlan:
        spread = Spread(
            int(schema.zero_optimization.stage),
            axis.size,
            rank,
            gap=max(16 // precision.param.itemsize, 1) if schema.zero_optimization.parameter_alignment else 1,
            persistent=_persistent(schema),
        )
        section, tile = schema.memory, tile_of(schema)
        return plan_states(groups, spread, section, ranks=ranks, widths=widths, frozen=frozen, tile=tile)

    first = plan(0)
    if torch.distributed.get_rank() == 0:
        show(first)
    at_home = len(first.units) == 1 and first.tiers == (DEVICE,)
    return None if at_home else Budgeted(first if axis.rank == 0 else plan(axis.rank), first)


def state_width(optimizer: Optimizer) -> float:
    """Bytes per element of all that an optimizer keeps of a parameter."""
    if isinstance(optimizer, MomentKeeper):
        sample = torch.empty(_SAMPLE)
        return sum(dtype.itemsize * numel for _, dtype, numel in optimizer.state_layout(sample)) / sample.numel()
    if not tiles_well(optimizer):
        return _UNKNOWN
    return max((_tried(optimizer, place) for place in range(len(optimizer.param_groups))), default=0.0)


def _tried(optimizer: Optimizer, group: int) -> float:
    """What a step of a copy of the optimizer keeps of a sample in the place of a group's parameters."""
    sample = nn.Parameter(torch.zeros(_SAMPLE))
    sample.grad = torch.zeros(_SAMPLE)
    other = twin(optimizer)
    other.state = defaultdict(dict)
    for place, options in enumerate(other.param_groups):
        options["params"] = [sample] if place == group else []
    other.step()
    kept = [value for value in other.state[sample].values() if isinstance(value, torch.Tensor)]
    return sum(value.nbytes for value in kept if value.dim()) / sample.numel()


def _trained(options: dict[str, Any], names: dict[int, str]) -> list[tuple[str, int]]:
    trained = [param for param in options["params"] if param.requires_grad]
    return [(names.get(id(param), "a parameter outside the module"), numel_of(param)) for param in trained]


def _persistent(schema: Schema) -> int:
    """Elements of parameters that stay whole at stage 3."""
    return int(schema.zero_optimization.param_persistence_threshold)


def _by_tier(elements: dict[str, int]) -> dict[Tier, int]:
    return {Tier(tier): count for tier, count in elements.items()}
