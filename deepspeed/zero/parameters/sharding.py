"""Turn a model's parameters into shards, take over those that are, and decide which stay whole all the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from deepspeed.config.zero import DeepSpeedZeroConfig
from deepspeed.errors import UsageError
from deepspeed.parallel import AxisGroup
from deepspeed.zero.parameters import gather as fetch
from deepspeed.zero.parameters.offloaded import ChunkTier, ChunkTiers
from deepspeed.zero.parameters.parameter import reopened, shard_parameter, spread_class
from deepspeed.zero.parameters.shard import Shard, shard_of, shards_of
from deepspeed.zero.placement import ShardAxes


def shard_module(module: nn.Module, axes: ShardAxes, remotes: ChunkTiers | None = None) -> list[Shard]:
    """Cut every parameter that is not cut yet; returns all shards in the order of the model.

    Those that are cut already, by `zero.Init` for instance, are used over their axis from now on. With `remotes` chunks
    live where these say, and the first rank's values count: one parameter at a time is whole on the device.
    """
    shards = []
    for name, param in module.named_parameters():
        axis, replicas = axes(param), axes.replicas(param)
        remote = None if remotes is None else remotes.choose(-(-numel_of(param) // axis.size))
        shard = shard_of(param)
        if shard is None:
            if remotes is not None:
                param.data = param.data.to(remotes.remote.device)
            shard = shard_parameter(param, axis, name, remote)
            shard.replicas = replicas
            if remotes is not None:
                fetch.spread([shard])
                shard.edits = 0
            if shard.numel and not shard.alone:
                shard.release()
        elif shard.axis is not axis:
            _use_axis(name, shard, axis)
            shard.replicas = replicas
        if shard.remote is not remote or (remotes is not None and shard.stored.device != shard.device):
            _move(shard, remote)
        shard.name = name
        shards.append(shard)
    return shards


def _move(shard: Shard, remote: ChunkTier | None) -> None:
    """Let a chunk live elsewhere, or on the device."""
    if shard.whole and shard.numel:
        shard.release()
    if remote is None:
        shard.return_to_device()
    else:
        shard.leave(remote)
        spread_class(shard.param)


def put_away(module: nn.Module) -> None:
    """Let go of whole parameters that an earlier engine kept, so that their shards can be converted."""
    for shard in shards_of(module.parameters()):
        if shard.holds:
            raise UsageError(
                f"{shard.name} is whole at the moment, inside deepspeed.zero.GatheredParameters; leave that before "
                "deepspeed.initialize"
            )
        if shard.whole and shard.numel:
            if shard.edited:
                shard.store()
            shard.release()
        shard.persistent = False


def convert_shards(module: nn.Module, zero: DeepSpeedZeroConfig, *, stay: bool = False) -> None:
    """Let shards follow the dtype and, unless they `stay`, the device that the module's empty parameters were given."""
    shards = shards_of(module.parameters())
    if shards and not zero.shards_parameters:
        raise UsageError(
            f"{len(shards)} parameters were constructed in shards, by deepspeed.zero.Init, but zero_optimization.stage "
            f"is {int(zero.stage)}. Set it to 3, or construct the model with zero.Init(enabled=False)."
        )
    for shard in shards:
        if not shard.whole:
            shard.convert(shard.param.dtype, shard.stored.device if stay else shard.param.device)


def keep_whole(module: nn.Module, axis: AxisGroup) -> None:
    """On an axis of one rank: parameters know about shards and are whole for good, without a copy."""
    shards = shard_module(module, ShardAxes(lambda _: axis))
    fetch.gather([shard for shard in shards if not shard.whole])
    for shard in shards:
        shard.persistent = True
        shard.mark()


def persist(shards: Iterable[Shard], threshold: int, total: int) -> list[Shard]:
    """Keep parameters of at most `threshold` elements whole, together at most `total`; returns those that are not."""
    missing, kept = [], 0
    for shard in shards:
        if shard.numel <= threshold and kept + shard.numel <= total:
            kept += shard.numel
            shard.persistent = True
            if not shard.whole:
                missing.append(shard)
    return missing


def numel_of(param: nn.Parameter) -> int:
    """The elements of the whole parameter."""
    shard = shard_of(param)
    return param.numel() if shard is None else shard.numel


def _use_axis(name: str, shard: Shard, axis: AxisGroup) -> None:
    if shard.axis.ranks != axis.ranks:
        raise UsageError(
            f"{name} was constructed in shards over the ranks {list(shard.axis.ranks)}, but the engine spreads it over "
            f"{list(axis.ranks)}. Give deepspeed.zero.Init and deepspeed.initialize the same mpu and the same "
            "zero_optimization.mics_shard_size, or Init the data_parallel_group of the engine."
        )
    shard.axis = axis


class Reshard:
    """Opens parameters that `zero.Init` sharded; what they have become is sharded over the ranks of an engine."""

    def __init__(self, axis: AxisGroup) -> None:
        self._axis = axis
        self._done: set[int] = set()

    @contextmanager
    def __call__(self, params: Iterable[nn.Parameter], axis: AxisGroup | None = None) -> Iterator[None]:
        """Inside, these parameters are whole and ordinary; all ranks come here together. Once for each of them.

        They are sharded over `axis` afterwards, if it is given: experts lie on other ranks than the rest.
        """
        shards = [shard for shard in shards_of(params) if id(shard.param) not in self._done]
        self._done.update(id(shard.param) for shard in shards)
        with reopened(shards, axis or self._axis):
            yield
