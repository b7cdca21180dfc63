"""`zero.Init`: models are sharded while they are constructed, so that they may be larger than one rank's memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.codec import group_codec
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.features import require
from deepspeed.config.load import load
from deepspeed.config.schema import Schema
from deepspeed.errors import DeepSpeedConfigError, FeatureUnavailable, UsageError
from deepspeed.log import warn_once
from deepspeed.precision.policy import Precision
from deepspeed.transformers.construct import ParameterConstruction
from deepspeed.zero.birth.placement import ConstructionSite, DeepSpeedTensorOverride, construction_axis, rank_device
from deepspeed.zero.birth.touched import TouchedParameters
from deepspeed.zero.offload import gather_from, remote_of
from deepspeed.zero.parameters import gather as fetch
from deepspeed.zero.parameters.coded import CodedGather, travel_as_codes
from deepspeed.zero.parameters.parameter import shard_parameter
from deepspeed.zero.parameters.shard import Shard, rest_as

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["DeepSpeedTensorOverride", "Init", "MiCS_Init"]

_OVERRIDES = (DeepSpeedTensorOverride.dtype, DeepSpeedTensorOverride.device)


class Init(ContextDecorator):
    """A context, or a decorator of a function, in which the parameters of new modules become shards at once.

    Every rank constructs the same model; the values of rank 0 count. `module=` shards a model that exists. The dtype
    is that of the config's `bf16` or `fp16`, else `dtype`, else fp32; the ranks are those of
    `sequence_data_parallel_group`, `data_parallel_group` or `mpu`, else all. With `remote_device="cpu"` the model stays
    on the hosts until `deepspeed.initialize`, with "nvme" in files of the folder that `offload_param` names; what
    `offload_param` says counts where nothing is given.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: ProcessGroup | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: ProcessGroup | None = None,
        param_swapper: Any = None,
        tensor_overrides: Iterable[DeepSpeedTensorOverride] = _OVERRIDES,
    ) -> None:
        # `mem_efficient_linear`, like its key in the config, asks for linear layers whose graph does not keep the whole
        # weight alive until backward. By [Note: one storage] no layer does, so there is nothing to choose.
        self.enabled = enabled
        self._open: list[ExitStack] = []
        if not enabled:
            return
        _refuse(
            zero_param_parallel_group=zero_param_parallel_group is not None,
            param_swapper=param_swapper is not None,
        )
        schema = _schema(config_dict_or_path, config)
        zero = None if schema is None else schema.zero_optimization
        given = {
            "zero_quantized_weights": zero_quantized_weights,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
        }
        for name in (name for name, on in given.items() if on and not getattr(zero, name, False)):
            raise UsageError(
                f"zero.Init: {name} is given, but the engine holds and gathers weights as its config says. Set "
                f"zero_optimization.{name} in the config that Init gets, too, or leave this out."
            )
        where = _where(remote_device, schema)
        on_hosts = where == "cpu"
        comm.init_distributed()
        device = rank_device()[1]
        self._pin = pin_memory and on_hosts and device.type != "cpu"
        self._placement = _placement(schema, dtype, torch.device("cpu") if on_hosts else device, set(tensor_overrides))
        group = sequence_data_parallel_group if sequence_data_parallel_group is not None else data_parallel_group
        size = -1 if schema is None else schema.zero_optimization.mics_shard_size
        self._axis, self._replicas = construction_axis(group, mpu, on_hosts=on_hosts, shard_size=size)
        # The engine moves chunks to files of its own; until then these live as long as the chunks.
        self._files = remote_of(schema, ExitStack()) if schema is not None and where == "nvme" else None
        self._gather = None if self._files is None else gather_from(self._files, fetch.PLAIN)
        self._touch = TouchedParameters()
        self._gathers_in_apply = schema is None or schema.zero_optimization.override_module_apply
        groups = None if schema is None else schema.weight_quantization.at_birth
        self._codec = (
            None if groups is None else group_codec(groups.num_bits, groups.group_size, symmetric=groups.symmetric)
        )
        self._ways: dict[int, CodedGather] = {}
        self._strict = schema is not None and schema.zero_optimization.enable_sanity_checks
        if module is not None:
            self._shard(module)

    def __enter__(self) -> Init:
        if self.enabled:
            with ExitStack() as stack:
                stack.enter_context(self._placement.factories())
                stack.enter_context(self._touch)
                stack.enter_context(self._touch.in_parameters())
                if self._gathers_in_apply:
                    stack.enter_context(self._touch.in_apply())
                stack.enter_context(ParameterConstruction(self._construct).watch())
                self._open.append(stack.pop_all())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.enabled:
            self._open.pop().__exit__(kind, error, trace)

    @contextmanager
    def _construct(self, module: nn.Module) -> Iterator[None]:
        """Around the constructor of a module."""
        with self._touch.frame():
            yield
            self._shard(module)  # before what was touched is let go: new parameters may share its memory

    def _shard(self, module: nn.Module) -> None:
        """Shard every parameter below that is not sharded yet, with the values of the first rank."""
        coded = set() if self._codec is None else set(map(id, _weights(module)))
        for name, param in self._placement.put(module):
            shard = shard_parameter(param, self._axis, f"{type(module).__name__}.{name}", self._files)
            shard.strict, shard.gather, shard.replicas = self._strict, self._gather, self._replicas
            fetch.spread([shard])
            shard.edits = 0
            if shard.numel:
                shard.release()
            if id(param) in coded:
                self._rest(shard)
            if self._pin:
                shard.stored = get_accelerator().pin_memory(shard.stored)
                shard.refit(shard.dtype)

    def _rest(self, shard: Shard) -> None:
        """Freeze a weight, and let its chunk rest as codes."""
        codec = self._codec
        assert codec is not None, "asked before"
        if shard.shape[-1] % codec.block:
            raise DeepSpeedConfigError(
                f"weight_quantization.quantized_initialization.group_size: {codec.block} does not divide dim 1 of "
                f"{shard.name} {tuple(shard.shape)}; use one that divides {shard.shape[-1]}",
                path="weight_quantization.quantized_initialization.group_size",
            )
        shard.param.requires_grad_(False)
        rest_as(shard, codec)
        travel_as_codes(shard, self._ways)


def _weights(module: nn.Module) -> Iterator[torch.Tensor]:
    """What `quantized_initialization` is about."""
    return (each.weight for each in module.modules() if isinstance(each, (nn.Linear, nn.Embedding)))


class MiCS_Init(Init):
    """`Init` over the groups of `zero_optimization.mics_shard_size` ranks, which the config has to name."""

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: ProcessGroup | None = None,
        sequence_data_parallel_group: ProcessGroup | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
    ) -> None:
        schema = _schema(config_dict_or_path, config) if enabled else None
        if enabled and (schema is None or schema.zero_optimization.mics_shard_size < 1):
            raise UsageError(
                "zero.MiCS_Init: config_dict_or_path does not give zero_optimization.mics_shard_size, the number of "
                "ranks that share one set of shards; add the key, or use zero.Init"
            )
        super().__init__(
            module,
            data_parallel_group,
            mem_efficient_linear,
            remote_device,
            pin_memory,
            config_dict_or_path,
            config,
            enabled,
            dtype,
            mpu,
            sequence_data_parallel_group=sequence_data_parallel_group,
        )


def _schema(config_dict_or_path: Any, config: Any) -> Schema | None:
    """The config, which may be partial; features that are not part of this version are refused."""
    if config is not None:
        warn_once("zero.Init: the argument config is the old name of config_dict_or_path; please rename it")
        if config_dict_or_path is not None:
            raise UsageError("zero.Init: config and config_dict_or_path are both given; keep config_dict_or_path")
    source = config if config_dict_or_path is None else config_dict_or_path
    if source is None:
        return None
    schema = source.schema if isinstance(source, DeepSpeedConfig) else load(source, partial=True).schema
    require(schema)
    return schema


def _placement(
    schema: Schema | None, dtype: torch.dtype | None, device: torch.device, overrides: set[DeepSpeedTensorOverride]
) -> ConstructionSite:
    precision = Precision() if schema is None else Precision.from_config(schema)
    narrow = schema is not None and (schema.bf16.enabled or schema.fp16.enabled)
    wanted = precision.param if narrow or dtype is None else dtype
    return ConstructionSite(
        device=device if DeepSpeedTensorOverride.device in overrides else None,
        dtype=wanted if DeepSpeedTensorOverride.dtype in overrides else None,
        buffers=precision.buffers,
    )


def _refuse(**asked: bool) -> None:
    for name, wanted in asked.items():
        if wanted:
            raise FeatureUnavailable(f"zero.Init: {name} is not part of this version yet; leave it out", path=name)


def _where(remote_device: str | None, schema: Schema | None) -> str:
    """Where chunks live until the engine takes them: "cpu", "nvme", or "" for the device."""
    zero = None if schema is None else schema.zero_optimization
    if remote_device is None and schema is not None and schema.memory.device is not None:
        return "cpu" if schema.memory.path is None else "nvme"  # what fits comes to the device with the engine
    if remote_device is None and zero is not None and zero.offload_param is not None and zero.offloads_parameters:
        remote_device = zero.offload_param.device.value
    if remote_device in (None, "none", get_accelerator().device_name()) and remote_device != "cpu":
        return ""
    if remote_device == "cpu":
        return "cpu"
    if remote_device != "nvme":
        raise UsageError(f"zero.Init: remote_device is {remote_device!r}; expected None, 'cpu' or 'nvme'")
    if zero is None or zero.offload_param is None or zero.offload_param.nvme_path is None:
        raise UsageError(
            "zero.Init: remote_device is 'nvme', but no folder is named; give config_dict_or_path with "
            "zero_optimization.offload_param.device nvme and its nvme_path"
        )
    return "nvme"
