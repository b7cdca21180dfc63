"""`zero.Init`: models are sharded while they are constructed, so that they may be larger than one rank's memory.

[Note: touch] Whoever made a module goes on to initialise its weights and to read their shapes. So while a constructor
runs, a function of torch that is given a sharded parameter finds it whole. One that writes into it leaves it sharded
again; after any other it stays whole until the constructor, or the visit of `Module.apply`, ends: there may be views.
Constructors run alike on all ranks, which gathering needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ContextDecorator, ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

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
from deepspeed.transformers.source import ParameterConstruction
from deepspeed.zero.birth.placement import ConstructionSite, DeepSpeedTensorOverride, construction_axis, rank_device
from deepspeed.zero.offload import gather_from, remote_of
from deepspeed.zero.parameters import gather as fetch
from deepspeed.zero.parameters.coded import CodedGather, travel_as_codes
from deepspeed.zero.parameters.parameter import ZeroParameter, shard_parameter
from deepspeed.zero.parameters.shard import Shard, rest_as, shards_of

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


_READS_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Attributes of a tensor that give access to its values; all others only describe it."""

_DESCRIBES = frozenset(
    {"__hash__", "__repr__", "__format__", "is_floating_point", "is_complex", "register_hook", "requires_grad_"}
    | {"register_post_accumulate_grad_hook", "retain_grad", "is_shared", "data_ptr", "has_names"}
)

_SHAPE: dict[str, Callable[..., Any]] = {
    "shape": lambda shard: shard.shape,
    "ndim": lambda shard: len(shard.shape),
    "dim": lambda shard: len(shard.shape),
    "ndimension": lambda shard: len(shard.shape),
    "numel": lambda shard: shard.numel,
    "nelement": lambda shard: shard.numel,
    "__len__": lambda shard: shard.shape[0],
    "size": lambda shard, dim=None: shard.shape if dim is None else shard.shape[dim],
}


class TouchedParameters(TorchFunctionMode):
    """See [Note: touch]."""

    def __init__(self) -> None:
        super().__init__()
        self._frames: list[list[Shard]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, with what it needs whole."""
        kwargs = kwargs or {}
        shards = _sharded_in(args, kwargs)
        if not shards:
            return func(*args, **kwargs)
        name, attribute = func.__name__, getattr(getattr(func, "__self__", None), "__name__", "")
        if name == "__get__":
            describes = attribute not in _READS_VALUES
        elif name in ("__set__", "__delete__"):
            describes = attribute != "data" or _is_own(shards[0], args[-1])
        else:
            describes = name in _DESCRIBES
        known = _SHAPE.get(attribute if name == "__get__" else name)
        if self._frames and known is not None:
            rest = () if name == "__get__" else args[1:]
            return known(shards[0], *rest, **{key: value for key, value in kwargs.items() if key == "dim"})
        if describes or known is not None:
            return func(*args, **kwargs)
        if name.endswith("_") and not name.endswith("__"):
            with self.frame(shards):
                return func(*args, **kwargs)
        if self._frames:
            self._hold(shards)
        return func(*args, **kwargs)

    @contextmanager
    def frame(self, shards: Iterable[Shard] = ()) -> Iterator[None]:
        """Until it ends, what is touched stays whole, as do `shards`; then rank 0's values are kept."""
        held: list[Shard] = []
        self._frames.append(held)
        try:
            self._hold([shard for shard in shards if not shard.whole and shard.numel])
            yield
        except BaseException:
            self._end(held)
            raise
        else:
            fetch.spread(held)
            self._end(held)

    def _hold(self, shards: Sequence[Shard]) -> None:
        fetch.gather(shards)
        for shard in shards:
            shard.holds += 1
        self._frames[-1].extend(shards)

    def _end(self, held: list[Shard]) -> None:
        self._frames.pop()  # frames end in the reverse order of their begin
        for shard in held:
            shard.holds -= 1
        fetch.release(held)

    @contextmanager
    def in_parameters(self) -> Iterator[None]:
        """Let `nn.Parameter` take a sharded parameter, as it takes any other one."""
        before = nn.Parameter.__new__

        def __new__(kind: type[nn.Parameter], data: Any = None, requires_grad: bool = True) -> Any:
            return before(kind, data.data if isinstance(data, ZeroParameter) else data, requires_grad)

        with ExitStack() as undo:
            undo.callback(setattr, nn.Parameter, "__new__", staticmethod(before))
            nn.Parameter.__new__ = staticmethod(__new__)  # type: ignore[assignment]
            yield

    @contextmanager
    def in_apply(self) -> Iterator[None]:
        """Let `Module.apply` gather the parameters of the module that it visits."""
        before = nn.Module.apply

        @functools.wraps(before)
        def apply(module: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
            for child in module.children():
                child.apply(fn)
            with self.frame(shards_of(module.parameters(recurse=False))):
                fn(module)
            return module

        with ExitStack() as undo:
            undo.callback(setattr, nn.Module, "apply", before)
            nn.Module.apply = apply  # type: ignore[method-assign,assignment]
            yield


def _sharded_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Shard]:
    """The shards that are not whole, of the parameters in the arguments."""
    tensors = (each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
    return [shard for shard in shards_of(tensors) if not shard.whole and shard.numel]


def _is_own(shard: Shard, value: Any) -> bool:
    """True if a parameter's data is set by gathering or letting go."""
    return value is shard.full or (isinstance(value, torch.Tensor) and value.numel() == 0)
