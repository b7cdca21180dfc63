"""`Precision`: which dtype holds what, decided once from the config and handed to everybody who needs it."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.log import log_dist_once, warn_once
from deepspeed.precision.cast import DTYPES, BufferRule, cast_inputs, cast_module, explain_dtypes, short
from deepspeed.precision.scale import DynamicScale, LossScale, NoScale, StaticScale

if TYPE_CHECKING:
    from deepspeed.config.precision import TorchAutocastConfig
    from deepspeed.config.schema import Schema


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes by role, and what follows from them; all of it is a value, nothing here changes while training."""

    param: torch.dtype = torch.float32
    """Parameters, and the computation where autocast does not choose."""
    master: torch.dtype = torch.float32
    """The parameters that the optimizer updates; equal to `param` where there is no second copy."""
    accumulate: torch.dtype = torch.float32
    """Gradients while they are summed over micro steps."""
    reduce: torch.dtype = torch.float32
    """Gradients on their way between ranks; `reduce_dtypes` has the exceptions."""
    state: torch.dtype = torch.float32
    """The optimizer's moments."""
    autocast: AutocastPolicy | None = None
    """torch.autocast in forward; None is off."""
    check_overflow: bool = False
    """A step whose gradients hold inf or NaN is skipped."""
    inputs: torch.dtype | None = None
    """Floating inputs of forward are cast to this; None leaves them alone."""
    reduce_given: bool = False
    """`reduce` was asked for by name, so that it holds for every parameter."""
    buffers: BufferRule = field(default_factory=BufferRule)

    @classmethod
    def from_config(
        cls, schema: Schema, *, sequence_size: int | None = None, device_type: str | None = None
    ) -> Precision:
        """The policy of a config.

        `sequence_size` is the number of ranks that share a sequence, where it is known better than by the config;
        `device_type` is that of the accelerator unless given.
        """
        fp16, bf16, types = schema.fp16, schema.bf16, schema.data_types
        param = torch.float16 if fp16.enabled else torch.bfloat16 if bf16.enabled else torch.float32
        narrow_master = (fp16.enabled and fp16.fp16_master_weights_and_grads) or (
            bf16.enabled and bf16.bf16_master_weights_and_grads
        )
        accumulate = param if types.grad_accum_dtype is None else DTYPES[types.grad_accum_dtype]
        _check_accumulation(accumulate, param)
        autocast = AutocastPolicy.from_config(schema.torch_autocast, device_type)
        sequence_size = sequence_size or schema.sequence_parallel_size or 1
        keep = types.keep_in_fp32_modules
        return cls(
            param=param,
            master=param if narrow_master else torch.float32,
            accumulate=accumulate,
            reduce=_reduce_dtype(schema, param, sequence_size),
            state=torch.bfloat16 if bf16.enabled and bf16.bf16_optimizer_states else torch.float32,
            autocast=autocast,
            check_overflow=_computes_in_fp16(param, autocast) or _checks(schema),
            inputs=torch.float16 if fp16.enabled and fp16.auto_cast else None,
            reduce_given=schema.communication_data_type is not None,
            buffers=BufferRule(
                dtype=None if types.buffer_dtype is None else DTYPES[types.buffer_dtype],
                keep=None if keep == "auto" else tuple(keep),
            ),
        )

    @property
    def has_master(self) -> bool:
        """The optimizer updates a copy of the parameters in another dtype."""
        return self.master != self.param

    def require_device(self, accelerator: DeepSpeedAccelerator | None = None) -> None:
        """Refuse a dtype that the device cannot compute with."""
        device = accelerator or get_accelerator()
        supported = {torch.float16: device.is_fp16_supported, torch.bfloat16: device.is_bf16_supported}
        wanted = {f"{short(self.param)}.enabled": self.param}
        if self.autocast is not None:
            wanted["torch_autocast.dtype"] = self.autocast.dtype
        for key, dtype in wanted.items():
            if dtype in supported and not supported[dtype]():
                able = ", ".join(short(each) for each in device.supported_dtypes())
                raise DeepSpeedConfigError(
                    f"{key}: the {device.device_name()} device does not compute in {short(dtype)}; it has {able}",
                    path=key,
                )
            if dtype in supported and device.device_name() == "cpu" and not _has_fast_products(dtype):
                log_dist_once(
                    f"{key}: torch has no fast {short(dtype)} products for this CPU and computes them by general code; "
                    "steps take much longer than in fp32",
                    level=logging.WARNING,
                )

    def cast_module(self, module: nn.Module) -> None:
        """Give the module its training dtype, in place."""
        cast_module(module, self.param, self.buffers)

    def cast_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """What forward is called with: the arguments themselves unless `inputs` says otherwise."""
        return (args, kwargs) if self.inputs is None else cast_inputs(args, kwargs, self.inputs)

    def explain(self, error: RuntimeError, inputs: Any) -> None:
        """Add to torch's error in a forward what inputs of another dtype have to do with it."""
        if self.autocast is None:
            explain_dtypes(error, inputs, self.param)

    def forward_context(self) -> AbstractContextManager[Any]:
        """A context for one forward: autocast as configured, whatever is open outside."""
        return forward_context(self.autocast)

    def reduce_dtypes(self, module: nn.Module) -> dict[nn.Parameter, torch.dtype]:
        """The parameters whose gradients travel in another dtype than `reduce`; empty unless autocast is on."""
        if self.autocast is None or self.reduce_given:
            return {}
        return self.autocast.communication_dtypes(module)

    def describe(self) -> str:
        """One line for the log."""
        parts = [f"{short(self.param)} parameters"]
        parts.append(f"{short(self.master)} master weights" if self.has_master else "no separate master weights")
        parts.append(f"gradients accumulated in {short(self.accumulate)} and reduced in {short(self.reduce)}")
        parts.append(f"{short(self.state)} optimizer state")
        if self.autocast is not None:
            parts.append(self.autocast.describe())
        if self.inputs is not None:
            parts.append(f"inputs cast to {short(self.inputs)}")
        parts.append("steps with inf or NaN gradients skipped" if self.check_overflow else "no overflow check")
        return ", ".join(parts)


def make_scale(schema: Schema, precision: Precision | None = None) -> LossScale:
    """A new loss scale for a config: fp16 scales, by the keys of its section; fp16 autocast by GradScaler's values."""
    fp16 = schema.fp16
    if fp16.enabled and not fp16.dynamic:
        return StaticScale(fp16.loss_scale)
    if fp16.enabled:
        _check_start(fp16.initial_scale_power, fp16.min_loss_scale)
        return DynamicScale(
            init=2.0**fp16.initial_scale_power,
            window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            consecutive_hysteresis=fp16.consecutive_hysteresis,
            minimum=fp16.min_loss_scale,
        )
    policy = precision or Precision.from_config(schema)
    if _computes_in_fp16(policy.param, policy.autocast):
        # GradScaler itself knows no minimum. At the least normal number of fp32 a run has overflowed 142 times in a
        # row, and its gradients could not be unscaled any more.
        return DynamicScale(init=2.0**16, window=2000, hysteresis=1, minimum=torch.finfo(torch.float32).tiny)
    return NoScale()


def _has_fast_products(dtype: torch.dtype) -> bool:
    """Whether torch finds a kernel for products on the CPU; otherwise it warns, with its stack, of the first it tries.

    torch then goes without that library for the rest of the process, so that the warning does not come again.
    """
    matrix = torch.ones(32, 32, dtype=dtype)  # smaller ones go to the general code at once
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.mm(matrix, matrix)
        torch.bmm(matrix[None], matrix[None])
    return not any("mkldnn" in str(each.message) for each in told)


def _computes_in_fp16(param: torch.dtype, autocast: AutocastPolicy | None) -> bool:
    return param == torch.float16 or (autocast is not None and autocast.dtype == torch.float16)


def _checks(schema: Schema) -> bool:
    """Whether gradients are looked at where nothing is scaled."""
    return schema.nonfinite_gradients != "ignore" and (not schema.bf16.enabled or schema.bf16.check_grad_overflow)


def _reduce_dtype(schema: Schema, param: torch.dtype, sequence_size: int) -> torch.dtype:
    """What the user asked for; else what split sequences need, if they are; else the training dtype."""
    name = schema.communication_data_type
    if name is None and sequence_size > 1:
        name = schema.seq_parallel_communication_data_type
    return param if name is None else DTYPES[name]


def _check_accumulation(accumulate: torch.dtype, param: torch.dtype) -> None:
    if accumulate not in (param, torch.float32):
        allowed = " or ".join(dict.fromkeys((short(param), "fp32")))
        raise DeepSpeedConfigError(
            f"data_types.grad_accum_dtype: {short(accumulate)} would lose what the {short(param)} gradients hold; use "
            f"{allowed}, or leave the key out",
            path="data_types.grad_accum_dtype",
        )


def _check_start(power: int, minimum: int) -> None:
    if 2**power < minimum:
        raise DeepSpeedConfigError(
            f"fp16.initial_scale_power, fp16.min_loss_scale: the loss scale would begin at 2^{power} = {2**power}, "
            f"below its minimum of {minimum}; raise the power, or lower the minimum",
            path="fp16.min_loss_scale",
        )


SAFE_MODULES: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Modules that autocast computes in the lower precision anyway: their gradients lose nothing by travelling in it."""

_NOTHING = nullcontext()  # may be entered again and again
_MODULES_KEY = "torch_autocast.lower_precision_safe_modules"


@dataclass(frozen=True, slots=True)
class AutocastPolicy:
    """Forward runs under torch.autocast with this dtype, whatever autocast was open outside."""

    dtype: torch.dtype
    modules: tuple[type[nn.Module], ...] = SAFE_MODULES
    device_type: str = "cpu"

    @classmethod
    def from_config(cls, section: TorchAutocastConfig, device_type: str | None = None) -> AutocastPolicy | None:
        """The policy of the `torch_autocast` section, None where it is off; the device is the accelerator's."""
        if not section.enabled:
            return None
        device_type = device_type or get_accelerator().device_name()
        dtype = DTYPES[section.dtype] if section.dtype is not None else torch.get_autocast_dtype(device_type)
        if dtype == torch.float32:
            raise DeepSpeedConfigError(
                "torch_autocast.dtype: fp32 is no lower precision, torch.autocast computes in fp16 or bf16; use one "
                "of them, or set torch_autocast.enabled to false",
                path="torch_autocast.dtype",
            )
        names = section.lower_precision_safe_modules
        return cls(dtype, SAFE_MODULES if names is None else resolve_modules(names), device_type)

    def communication_dtypes(self, module: nn.Module) -> dict[nn.Parameter, torch.dtype]:
        """Parameters owned by one of the classes themselves → the dtype that their gradients travel in.

        Subclasses do not count, nor do parameters of children. A parameter that is shared with a module of another
        class is among them.
        """
        return {
            parameter: self.dtype
            for each in module.modules()
            if type(each) in self.modules
            for parameter in each.parameters(recurse=False)
        }

    def describe(self) -> str:
        """A few words for a log line."""
        return f"autocast to {short(self.dtype)} on {self.device_type}"


def forward_context(policy: AutocastPolicy | None, device_type: str | None = None) -> AbstractContextManager[Any]:
    """A context for one forward: the policy's autocast, or none at all, also where one is open outside."""
    if policy is None and not torch._C._is_any_autocast_enabled():
        return _NOTHING
    device_type = policy.device_type if policy is not None else device_type or get_accelerator().device_name()
    outside = torch.is_autocast_enabled(device_type)
    if policy is not None:
        if outside and torch.get_autocast_dtype(device_type) != policy.dtype:
            warn_once(
                f"torch.autocast is open around the engine with {short(torch.get_autocast_dtype(device_type))}; inside "
                f"the engine torch_autocast.dtype, {short(policy.dtype)}, counts"
            )
        return torch.autocast(device_type, dtype=policy.dtype)
    if not outside:
        return _NOTHING
    warn_once(
        "torch.autocast is open around the engine but torch_autocast.enabled is false, so that it is off inside the "
        "engine; set torch_autocast.enabled to use it"
    )
    return torch.autocast(device_type, enabled=False)


def resolve_modules(names: Sequence[str]) -> tuple[type[nn.Module], ...]:
    """The module classes that fully qualified names stand for."""
    return tuple(_resolve(name, f"{_MODULES_KEY}[{index}]") for index, name in enumerate(names))


def _resolve(name: str, path: str) -> type[nn.Module]:
    home, _, attribute = name.rpartition(".")
    if not home or not all(part.isidentifier() for part in name.split(".")):
        raise DeepSpeedConfigError(
            f"{path}: {name!r} is not a fully qualified class name; write it as torch.nn.Linear is written", path=path
        )
    try:
        found = getattr(_import(home), attribute)
    except (ImportError, AttributeError) as error:
        raise DeepSpeedConfigError(
            f"{path}: {name!r} cannot be imported ({error}); give the module that defines the class, and its name",
            path=path,
        ) from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise DeepSpeedConfigError(f"{path}: {name!r} is no subclass of torch.nn.Module but {found!r}", path=path)
    return found


def _import(name: str) -> Any:
    """A module, or a class in one: classes may be nested."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        home, _, attribute = name.rpartition(".")
        if not home or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
        return getattr(_import(home), attribute)
