"""A user's model becomes one for inference: split, loaded, cast, placed, quantised and fused as the config says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.pretrained import Empty, fill, take_place, values_from
from deepspeed.comm.discover import local_ranks
from deepspeed.config.inference import DeepSpeedInferenceConfig, QuantTypeEnum
from deepspeed.config.memory import MemoryConfig
from deepspeed.config.parallel import TPTrainingConfig
from deepspeed.config.schema import Schema
from deepspeed.config.zero import OffloadDeviceEnum
from deepspeed.errors import DeepSpeedConfigError, FeatureUnavailable, UsageError
from deepspeed.fragments import DimSplit
from deepspeed.fusion.build import lines
from deepspeed.fusion.packed_linear import WeightPacking, rounding
from deepspeed.generate.weights import ModelPacking, packing_of
from deepspeed.inference.checkpoint import SlicedFiles, fill_slices, find_files, save_slices, splits_for
from deepspeed.inference.modules import put_kernels
from deepspeed.log import print_dist
from deepspeed.memory.streaming import StreamSettings, StreamUnit, WeightStream, stream_weights
from deepspeed.moe.auto_ep import spread_blocks
from deepspeed.moe.placement import cuts_of_experts, spread_experts
from deepspeed.parallel import ParallelLayout
from deepspeed.parallel.regions import GroupMembers, RankGroup
from deepspeed.parallel.rng import sync_generators
from deepspeed.precision.cast import cast_module
from deepspeed.tensor_parallel import cuts_of, split, splits_of
from deepspeed.zero.birth.placement import rank_device

_QKV = r"(.*\.)?(q_proj|k_proj|v_proj|qkv|qkv_proj|query|key|value|query_key_value|c_attn|Wqkv|q|k|v)$"
_NO_LIMIT = 2**62


@dataclass
class Prepared:
    """What the engine must know of its model."""

    device: torch.device
    dtype: torch.dtype
    """Of the computation."""
    axis: RankGroup | None = None
    """The ranks that share layers."""
    packed: list[str] = field(default_factory=list)
    """The names of quantised layers."""
    stream: WeightStream | None = None
    """What brings weights that are not on the device; None where all are."""


def prepare(model: nn.Module, config: DeepSpeedInferenceConfig, stack: ExitStack) -> Prepared:
    """Change the model in place; `stack` takes back what can be."""
    device = rank_device()[1]
    made = Prepared(device, compute_dtype(model, config))
    settings = stream_settings(config, made.dtype)
    layout, made.axis = _ranks(config, stack)
    files = find_files(config)
    _make_empty(model, config, files)
    cast_module(model, made.dtype)
    section = tp_section(model, config, 1 if made.axis is None else made.axis.size)
    written: dict[str, DimSplit] = {}
    if isinstance(files, SlicedFiles) and files.slices and not files.splits:
        saved = max(len(files.slices), config.training_mp_size)
        written = splits_for(model, section.model_copy(update={"autotp_size": saved}), saved)
    empty: Empty = {}
    if files is not None:
        values_from(model, files if isinstance(files, Path) else files.whole)
        empty = take_place(model)
    _split(model, config, section, made, layout)
    packed = ModelPacking(model, *packings(config))
    for part in config.quant.weight.post_init_quant:
        if not any(part in name for name, _ in model.named_modules()):
            path = f"quant.weight.post_init_quant.{part}"
            raise DeepSpeedConfigError(f"{path}: no module of the model has this in its name", path=path)

    def ready(unit: StreamUnit) -> None:
        own = {each: empty.pop(each) for each in unit.tensors() if isinstance(each, nn.Parameter) and each in empty}
        _fill(model, own, files, written, made.axis)
        packed.add(unit.modules)

    if settings is None:
        _fill(model, empty, files, written, made.axis)
    if folder := config.save_mp_checkpoint_path or config.checkpoint_config.save_mp_checkpoint_path:
        _save(model, folder, made.axis)
    if layout is not None:
        spread_experts(model, layout, stack, data_first=False)
    if settings is None:
        packed.add([""])
        model.to(device)
    else:
        made.stream = stream_weights(model, settings, device, ready, stack)
    packed.told(required=False)
    made.packed = packed.done
    if config.replace_with_kernel_inject or config.use_triton:
        inject(model, stack)
    model.eval()
    return made


def stream_settings(config: DeepSpeedInferenceConfig, dtype: torch.dtype) -> StreamSettings | None:
    """Where weights may live; None: on the device."""
    memory = config.ragged.memory if config.ragged is not None else MemoryConfig()
    offload = config.zero.offload_param if config.zero.offloads_parameters else None
    given = {
        "keep_module_on_host": config.keep_module_on_host,
        "zero.offload_param": offload is not None,
        "ragged.memory.device": memory.device is not None,
    }
    asked = [name for name, on in given.items() if on]
    if not asked:
        return None
    if given["ragged.memory.device"] and len(asked) > 1:
        raise DeepSpeedConfigError(f"{' and '.join(asked)} both say where weights live; keep one", path=asked[0])
    others = {
        "moe.ep_size": config.moe.enabled and config.moe.ep_size > 1,
        "save_mp_checkpoint_path": config.save_mp_checkpoint_path or config.checkpoint_config.save_mp_checkpoint_path,
    }
    for name, on in others.items():
        if on:
            raise DeepSpeedConfigError(f"{name} is not possible with {asked[0]}; leave one of them out", path=name)
    if memory.device is not None:
        return StreamSettings(memory)
    limits: dict[str, Any] = {"device": 0}
    if offload is not None and offload.device is OffloadDeviceEnum.nvme:
        in_memory = int(offload.max_in_cpu) * dtype.itemsize * local_ranks()
        limits |= {"host": in_memory, "disk": _NO_LIMIT, "path": offload.nvme_path}
    return StreamSettings(MemoryConfig.model_validate(limits), offload is None or offload.pin_memory)


def compute_dtype(model: nn.Module, config: DeepSpeedInferenceConfig) -> torch.dtype:
    """The dtype of everything but quantised weights: of int8 the model's own, if it is one of 16 bits."""
    wanted: torch.dtype = config.dtype
    if wanted is torch.int8:
        own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float16)
        wanted = own if own in (torch.float16, torch.bfloat16) else torch.float16
        if wanted not in get_accelerator().supported_dtypes():
            wanted = torch.float32
    if wanted not in get_accelerator().supported_dtypes():
        able = ", ".join(str(each).removeprefix("torch.") for each in get_accelerator().supported_dtypes())
        raise DeepSpeedConfigError(
            f"dtype: the {get_accelerator().device_name()} device does not compute in {wanted}; it has {able}",
            path="dtype",
        )
    return wanted


def _ranks(config: DeepSpeedInferenceConfig, stack: ExitStack) -> tuple[ParallelLayout | None, RankGroup | None]:
    """The layout and the ranks that share layers, as far as there are any."""
    section = config.tensor_parallel
    experts = config.moe.ep_size if config.moe.enabled else 1
    group = section.tp_group if section.enabled else None
    if section.mpu is not None:
        group = section.mpu.get_model_parallel_group()
    if config.ranks < 2 and experts < 2 and group is None:
        return None, None
    comm.init_distributed()
    if group is not None:
        members = GroupMembers(group)
        if section.mpu is None and "tp_size" in section.model_fields_set and members.size != config.ranks:
            raise UsageError(
                f"tensor_parallel.tp_size is {config.ranks}, but tp_group has {members.size} ranks; let them agree"
            )
        if experts > 1:
            raise UsageError(
                "moe.ep_size with a process group of tensor-parallel ranks: give tensor_parallel.tp_size instead of "
                "the group, so that the groups of experts are made with it"
            )
        return None, members if members.size > 1 else None
    layout = ParallelLayout.build(tp=config.ranks)
    stack.callback(layout.close)
    layout.create_groups()
    return layout, layout.tensor if config.ranks > 1 else None


def _make_empty(model: nn.Module, config: DeepSpeedInferenceConfig, files: object) -> None:
    waiting = [name for name, param in model.named_parameters() if param.is_meta]
    if files is None and (waiting or config.set_empty_params):
        found = f"{len(waiting)} parameters on the meta device, such as {waiting[0]}" if waiting else "set_empty_params"
        raise UsageError(f"the model has {found}, and no checkpoint gives them values; set the key checkpoint")
    if config.set_empty_params:
        for module in model.modules():
            for param in module.parameters(recurse=False):
                if not param.is_meta:
                    torch.utils.swap_tensors(param, nn.Parameter(param.detach().to("meta"), param.requires_grad))


def tp_section(model: nn.Module, config: DeepSpeedInferenceConfig, ranks: int) -> TPTrainingConfig:
    """The rules by which layers are split: those of `injection_policy`, else what AutoTP finds."""
    if config.injection_policy is None:
        return TPTrainingConfig(autotp_size=ranks)
    specs = []
    for kind, given in config.injection_policy.items():
        listed = getattr(given, "rows", given)
        rows = [listed] if isinstance(listed, str) else [str(name) for name in listed]
        blocks = [(path, module) for path, module in model.named_modules() if isinstance(module, kind)]
        if not blocks:
            raise UsageError(f"injection_policy: the model has no module of the class {kind.__name__}")
        for path, block in blocks:
            names = {name for name, module in block.named_modules() if hasattr(module, "weight")}
            summed = {name for name in names if any(name == row or name.endswith(f".{row}") for row in rows)}
            missing = [row for row in rows if not any(name == row or name.endswith(f".{row}") for name in names)]
            if missing:
                raise UsageError(
                    f"injection_policy: {kind.__name__} has no layer {', '.join(missing)}; its layers are "
                    f"{', '.join(sorted(names))}"
                )
            others = {name for name, module in block.named_modules() if _is_linear(module)} - summed
            for chosen, how in ((others, "column"), (summed, "row")):
                patterns = [re.escape(f"{path}.{name}".strip(".")) + r"\.weight$" for name in sorted(chosen)]
                if patterns:
                    specs.append({"patterns": patterns, "partition_type": how})
    policy = {"layer_specs": specs, "use_default_specs": False}
    return TPTrainingConfig.model_validate({"autotp_size": ranks, "partition_config": policy})


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _split(
    model: nn.Module,
    config: DeepSpeedInferenceConfig,
    section: TPTrainingConfig,
    made: Prepared,
    layout: ParallelLayout | None,
) -> None:
    if layout is not None and config.moe.enabled and config.moe.ep_size > 1:
        schema = Schema.model_validate(
            {
                "expert_parallel": {"enabled": True, "autoep_size": config.moe.ep_size},
                "tensor_parallel": {"autotp_size": config.ranks},
            }
        )
        try:
            spread_blocks(schema, model, layout, lambda *_: nullcontext())
        except DeepSpeedConfigError as error:  # which names the keys of a training
            raise DeepSpeedConfigError(f"moe.ep_size is {config.moe.ep_size}: {error}", path="moe.ep_size") from error
    if made.axis is None:
        return
    plan = split(model, made.axis, section, required=False, element_size=made.dtype.itemsize)
    if not plan.divides:
        raise UsageError(
            f"tensor_parallel.tp_size is {made.axis.size}, but no layer of {type(model).__name__} can be split by its "
            "own plan or by the names of its layers. Name the layers whose outputs are summed in injection_policy, or "
            "leave tp_size out"
        )
    sync_generators(made.axis)


def _fill(
    model: nn.Module,
    empty: Empty,
    files: Path | SlicedFiles | None,
    written: Mapping[str, DimSplit],
    axis: RankGroup | None,
) -> None:
    cuts = (cuts_of_experts(model), cuts_of(model, 0 if axis is None else axis.rank))
    if isinstance(files, SlicedFiles) and files.slices:
        fill_slices(empty, files, written, *cuts)
    else:
        fill(model, empty, *cuts)


def _save(model: nn.Module, folder: str, axis: RankGroup | None) -> None:
    if cuts_of_experts(model):
        raise FeatureUnavailable(
            "save_mp_checkpoint_path: experts that are dealt to ranks (moe.ep_size) are not written yet; save with an "
            "ep_size of 1",
            path="save_mp_checkpoint_path",
        )
    save_slices(model.state_dict(), Path(folder), axis, splits_of(model))


def packings(config: DeepSpeedInferenceConfig) -> tuple[WeightPacking | None, dict[str, WeightPacking]]:
    """How weights are rounded, None for not at all; and parts of names → another way."""
    quant, ragged = config.quant, config.ragged.quantization if config.ragged is not None else None
    given = quant.enabled and "weight" in quant.model_fields_set and quant.weight.enabled
    inputs = quant.enabled and "activation" in quant.model_fields_set and quant.activation.enabled
    exclude: tuple[str, ...] = ("lm_head", ".*embed")
    rounded = None
    if inputs:
        how = quant.activation
        rounded = rounding(how.num_bits, how.q_type is QuantTypeEnum.sym, how.q_groups)
    if "qkv" in quant.model_fields_set and not quant.qkv.enabled:
        exclude = (*exclude, _QKV)
    packing = packing_of(ragged, rounded) if ragged is not None else None
    if packing is None:
        if config.dtype is not torch.int8 and not given and not inputs:
            return None, {}
        mode, size = ("w8a16", 0) if quant.weight.num_bits == 8 else ("w4a16", 128)
        symmetric = quant.weight.q_type is QuantTypeEnum.sym
        packing = WeightPacking(mode, size, symmetric, exclude, rounded, quant.weight.q_groups)
    own = {
        part: WeightPacking(
            "w4a16" if how.num_bits == 4 else "w8a16", how.group_size, how.symmetric, rounded_input=rounded
        )
        for part, how in quant.weight.post_init_quant.items()
    }
    return packing, own


def inject(model: nn.Module, stack: ExitStack) -> None:
    """Put fused kernels in place of what they compute, and log the table."""
    found = put_kernels(model, None, stack)
    told = lines(found) if found else ["nothing was found that fused kernels compute"]
    print_dist("\n".join(["Fused kernels", *told]))
