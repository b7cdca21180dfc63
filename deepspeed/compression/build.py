"""What an engine compresses: the layers that its config names, joined to a schedule."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from deepspeed.compression.basic_layer import compression_of
from deepspeed.compression.compress import compress
from deepspeed.compression.eigenvalue import BlockCurvature, Eigenvalue
from deepspeed.compression.plan import techniques_of
from deepspeed.compression.scheduler import compression_scheduler
from deepspeed.config.compression import (
    CompressionConfig,
    MixedQuantizeConfig,
    WeightQuantizationGroup,
    WeightQuantizationParams,
    WeightQuantizationShared,
    WeightQuantizationTechnique,
)
from deepspeed.config.schema import Schema
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.parallel import ParallelLayout
from deepspeed.transformers.replacement import whole_shape

__all__ = ["compression_of_engine", "require_trained", "watch_curvature"]


def compression_of_engine(
    schema: Schema, module: nn.Module, mpu: object, *, whole: bool
) -> compression_scheduler | None:
    """The schedule of a model's compression; None where nothing is compressed.

    What `init_compression` has not done is done now. In a model that is not `whole`, patterns may find nothing.
    """
    _require_masks(module)
    section = _section(schema)
    on = techniques_of(section)
    if not on:
        return None
    states = [state for state in map(compression_of, module.modules()) if state is not None]
    if not states and section.layer_reduction.enabled:
        raise DeepSpeedConfigError(
            "compression_training.layer_reduction.enabled is true, and the model was not compressed before; call "
            "deepspeed.compression.compress.init_compression(model, config, teacher_model) first",
            path="compression_training.layer_reduction.enabled",
        )
    done = {name for state in states for name in state.techniques}
    left = {name: type(each)() for name, each in on.items() if name in done}
    compress(module, section.model_copy(update=left), mpu, partly=not whole)
    return compression_scheduler(module, section)


def _require_masks(module: nn.Module) -> None:
    """Refuse what torch.nn.utils.prune made of a parameter that was in shards: a mask without elements."""
    for path, layer in module.named_modules():
        for name, mask in layer.named_buffers(recurse=False):
            pruned = layer._parameters.get(f"{name.removesuffix('_mask')}_orig")
            if pruned is not None and not mask.numel() and 0 not in whole_shape(pruned):
                raise UsageError(
                    f"{path}.{name} has no elements, but its parameter has the shape {whole_shape(pruned)}: "
                    "torch.nn.utils.prune was called while the parameter was sharded. Prune inside of "
                    "deepspeed.zero.GatheredParameters([parameter])"
                )


def watch_curvature(
    schedule: compression_scheduler, schema: Schema, module: nn.Module, layout: ParallelLayout, *, alike: bool
) -> None:
    """Let eigenvalues decide how long bits last, as `eigenvalue` asks; `alike`: ranks have copies of one model."""
    section = schema.eigenvalue
    if not (section.enabled and schema.quantize_training.enabled):
        return
    if not alike or layout.data.size != layout.world.size:
        raise DeepSpeedConfigError(
            "eigenvalue.enabled is true, and ranks share the model or its sequences by stages, tensors, sequences or "
            "experts; the Hessian is computed where all ranks are data-parallel. Remove the section, or these axes",
            path="eigenvalue.enabled",
        )
    eigenvalue = Eigenvalue(
        section.verbose,
        section.max_iter,
        section.tol,
        section.stability,
        section.gas_boundary_resolution,
        section.layer_name,
        section.layer_num,
    )
    schedule.curvature = BlockCurvature(eigenvalue, module, layout.data)


def _section(schema: Schema) -> CompressionConfig:
    """What is compressed; MoQ is the quantisation of all weights."""
    section, every = schema.compression_training, schema.quantize_training
    if not every.enabled:
        return section
    mixed = every.fp16_mixed_quantize
    shared = WeightQuantizationShared(
        enabled=True,
        schedule_offset=every.quantize_schedule.schedule_offset,
        quantize_groups=every.quantize_groups,
        quantize_verbose=every.quantize_verbose,
        quantization_type=every.quantize_algo.q_type,
        rounding=every.quantize_algo.rounding,
        fp16_mixed_quantize=MixedQuantizeConfig(
            enabled=mixed.enabled, quantize_change_ratio=mixed.quantize_change_ratio
        ),
    )
    params = WeightQuantizationParams(
        start_bits=every.quantize_bits.start_bits,
        target_bits=every.quantize_bits.target_bits,
        quantization_period=every.quantize_schedule.quantize_period,
    )
    groups = {"quantize_training": WeightQuantizationGroup(params=params)}
    weights = WeightQuantizationTechnique(shared_parameters=shared, different_groups=groups)
    return section.model_copy(update={"weight_quantization": weights})


def require_trained(module: nn.Module, optimizer: Optimizer | None) -> None:
    """Refuse scores that no optimizer trains."""
    trained = {
        id(param) for group in ([] if optimizer is None else optimizer.param_groups) for param in group["params"]
    }
    for path, layer in module.named_modules():
        state = compression_of(layer)
        for name, pruning in () if state is None else state.prunings.items():
            if (
                pruning.method == "topk"
                and optimizer is not None
                and any(
                    id(param) not in trained
                    for key, param in layer.named_parameters(recurse=False)
                    if key.endswith("scores")
                )
            ):
                raise UsageError(
                    f"compression_training.{name}: method is topk, and the optimizer does not train the scores of "
                    f"{path}; call init_compression before the optimizer is made, or let the config make it"
                )
