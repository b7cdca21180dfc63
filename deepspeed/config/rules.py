"""The rules between sections of the config; each broken one is a line of text that begins with the keys concerned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from .optimizer import ONE_BIT_OPTIMIZERS

if TYPE_CHECKING:
    from .schema import Schema


def _names(choices: Mapping[str, bool]) -> str:
    return ", ".join(name for name, on in choices.items() if on)


def _precision(config: Schema) -> Iterator[str]:
    fp16, bf16, zero = config.fp16, config.bf16, config.zero_optimization
    if fp16.enabled and bf16.enabled:
        yield "fp16.enabled, bf16.enabled: both are true; a model trains in one of them, set the other to false"
    masters = _names(
        {
            "fp16.fp16_master_weights_and_grads": fp16.fp16_master_weights_and_grads,
            "bf16.bf16_master_weights_and_grads": bf16.bf16_master_weights_and_grads,
            "bf16.bf16_optimizer_states": bf16.bf16_optimizer_states,
        }
    )
    if masters and zero.stage == 0:
        yield f"{masters}: 16-bit master state needs zero_optimization.stage 1, 2 or 3, found stage 0"
    if zero.stage > 0 and not zero.offloads_optimizer:
        where = "whose moments stay fp32, need zero_optimization.offload_optimizer, which is off"
        if fp16.enabled and fp16.fp16_master_weights_and_grads:
            yield f"fp16.fp16_master_weights_and_grads: fp16 masters, {where}; set the key to false"
        if bf16.enabled and bf16.bf16_master_weights_and_grads and not bf16.bf16_optimizer_states:
            yield (
                f"bf16.bf16_master_weights_and_grads: bf16 masters, {where}; set bf16.bf16_optimizer_states to true, "
                "or this key to false"
            )
    expected, actual = config.data_types.param_dtype, "fp16" if fp16.enabled else "bf16" if bf16.enabled else "fp32"
    if expected not in (None, actual):
        yield (
            f"data_types.param_dtype: {expected} is expected, but the fp16 and bf16 sections make the parameters "
            f"{actual}"
        )


def _gradients(config: Schema) -> Iterator[str]:
    zero, stage = config.zero_optimization, int(config.zero_optimization.stage)
    if not zero.compute_grad_norm and config.gradient_clipping > 0:
        yield (
            f"zero_optimization.compute_grad_norm, gradient_clipping: clipping at {config.gradient_clipping} needs "
            "the norm; set gradient_clipping to 0 (its default is 1.0) or compute_grad_norm to true"
        )
    if config.gradient_allreduce_op == "sum" and (
        others := _names(
            {"zero_optimization.stage 3": stage == 3, "zero_optimization.zenflow": zero.zenflow is not None}
        )
    ):
        yield f'gradient_allreduce_op: "sum" does not work with {others}; use "mean"'
    scaling = _names(
        {
            "prescale_gradients": config.prescale_gradients,
            "gradient_predivide_factor": config.gradient_predivide_factor != 1.0,
        }
    )
    divided = stage == 3 or (stage == 2 and config.gradient_allreduce_op == "mean")
    if scaling and divided and zero.reduce_scatter:
        yield (
            f"{scaling}: no effect is possible at ZeRO stage {stage} with zero_optimization.reduce_scatter; remove "
            "the key, or set reduce_scatter to false"
        )
    if not config.managed_gradient_accumulation and zero.overlap_comm and stage < 2:
        yield (
            "managed_gradient_accumulation, zero_optimization.overlap_comm: false with overlap_comm needs ZeRO stage "
            f"2 or 3, found stage {stage}"
        )
    if config.optimizer.type == "Lamb" and config.fp16.enabled and not config.fp16.dynamic:
        yield (
            "optimizer.type, fp16.loss_scale: Lamb in fp16 needs a dynamic loss scale (0), found "
            f"{config.fp16.loss_scale}"
        )


def _nonfinite_gradients(config: Schema) -> Iterator[str]:
    answer, bf16, autocast = config.nonfinite_gradients, config.bf16, config.torch_autocast
    if answer == "ignore" and (config.fp16.enabled or (autocast.enabled and autocast.dtype == "fp16")):
        yield "nonfinite_gradients: 'ignore' is not for fp16, whose loss scale answers to them; remove it"
    keys = "nonfinite_gradients, bf16.check_grad_overflow"
    if answer == "ignore" and _checks_overflow(config):
        yield f"{keys}: 'ignore' and true exclude each other; keep one"
    if answer == "stop" and bf16.enabled and not bf16.check_grad_overflow:
        yield f"{keys}: 'stop' needs the check, which is false; set it to true"


def _checks_overflow(config: Schema) -> bool:
    """Whether the check is asked for: it is true by default."""
    bf16 = config.bf16
    return bf16.enabled and bf16.check_grad_overflow and "check_grad_overflow" in bf16.model_fields_set


def _updates_in_backward(config: Schema) -> Iterator[str]:
    section = config.optimizer_in_backward
    if not section.enabled:
        return
    others = {
        "gradient_clipping (1.0 by default; set optimizer_in_backward.clip_by_last_norm, or the key to 0)": (
            config.gradient_clipping > 0 and not section.clip_by_last_norm
        ),
        "fp16.enabled, whose overflows are known after the update": config.fp16.enabled,
        "bf16.check_grad_overflow, for the same reason": _checks_overflow(config),
        "nonfinite_gradients 'stop', for the same reason": config.nonfinite_gradients == "stop",
        "managed_gradient_accumulation false, where no backward is known to be the last": (
            not config.managed_gradient_accumulation
        ),
        **_offloads(config),
        "memory.device": config.memory.device is not None,
    }
    if found := _names(others):
        yield f"optimizer_in_backward.enabled: does not work with {found}"


def _offloads(config: Schema) -> dict[str, bool]:
    return {
        "zero_optimization.offload_optimizer": config.zero_optimization.offloads_optimizer,
        "zero_optimization.offload_param": config.zero_optimization.offloads_parameters,
    }


def _places(config: Schema) -> Iterator[str]:
    found = " and ".join(name for name, on in _offloads(config).items() if on)
    if found and config.memory.device is not None:
        yield f"memory.device: {found} says where states live, too; give one of them"


def _mics(config: Schema) -> Iterator[str]:
    zero = config.zero_optimization
    if zero.mics_shard_size < 1:
        return
    others = {
        "zero_optimization.zero_quantized_gradients": zero.zero_quantized_gradients,
        "expert_parallel.enabled": config.expert_parallel.enabled,
    }
    if found := _names(others):
        yield f"zero_optimization.mics_shard_size: does not work with {found}; give one of them"


def one_bit_conflicts(config: Schema) -> str:
    """What of a config does not work with an optimizer that exchanges signs; empty if nothing."""
    zero = config.zero_optimization
    return _names(
        {
            "zero_optimization.mics_shard_size": zero.shards_states and zero.mics_shard_size > 0,
            "zero_optimization.zero_quantized_gradients": zero.zero_quantized_gradients,
            'gradient_allreduce_op "sum"': config.gradient_allreduce_op == "sum",
            "sparse_gradients": config.sparse_gradients,
            "expert_parallel.enabled": config.expert_parallel.enabled,
            "optimizer_in_backward.enabled": config.optimizer_in_backward.enabled,
            **_offloads(config),
            "memory.device": config.memory.device is not None,
            'nonfinite_gradients "ignore"': config.nonfinite_gradients == "ignore",
        }
    )


def local_steps_conflict(config: Schema) -> str:
    """Why ranks cannot take steps alone, which need all states of all parameters on each of them; or empty."""
    stage = int(config.zero_optimization.stage)
    return f"zero_optimization.stage {stage}, which gives ranks parts of the states" if stage else ""


def _sparse(config: Schema) -> Iterator[str]:
    if config.sparse_gradients and config.zero_optimization.zero_quantized_gradients:
        yield (
            "sparse_gradients: touched rows are not encoded, so it does not work with "
            "zero_optimization.zero_quantized_gradients; give one of them"
        )


def _one_bit(config: Schema) -> Iterator[str]:
    kind = config.optimizer.type
    if kind in ONE_BIT_OPTIMIZERS and (found := one_bit_conflicts(config)):
        yield f"optimizer.type: {kind}, whose ranks exchange signs of momenta, does not work with {found}"
    steps_alone = kind == "ZeroOneAdam" and config.optimizer.params.get("local_step_clipper") != 1
    if steps_alone and (found := local_steps_conflict(config)):
        yield (
            f"optimizer.type: ZeroOneAdam, whose ranks take steps alone, does not work with {found}; use stage 0, or "
            "optimizer.params.local_step_clipper 1, so that each step ends with an exchange"
        )
    if kind == "OneBitLamb" and config.fp16.enabled and not config.fp16.dynamic:
        yield (
            "optimizer.type, fp16.loss_scale: OneBitLamb in fp16 needs a dynamic loss scale (0), found "
            f"{config.fp16.loss_scale}"
        )


def _experts(config: Schema) -> Iterator[str]:
    expert, tensor = config.expert_parallel, config.tensor_parallel
    if not expert.enabled:
        return
    presets = {expert.preset_model, tensor.preset_model}
    if len(presets) == 2 and None not in presets:
        yield (
            "expert_parallel.preset_model, tensor_parallel.preset_model: they describe one model and must be equal, "
            f"found {expert.preset_model} and {tensor.preset_model}"
        )
    if tensor.autotp_size < 2 or expert.expert_tensor_parallel_size > 1:
        return  # experts that ranks share lie as the rest of the model does
    others = {
        f"autoep_size {expert.autoep_size} (needs more than 1)": expert.autoep_size < 2,
        **_offloads(config),
        "use_data_before_expert_parallelism": config.use_data_before_expert_parallelism,
        "expert_parallel.async_split_plan": expert.async_split_plan,
        "expert_parallel.combine_impl fused_weighted_sum": expert.combine_impl == "fused_weighted_sum",
    }
    if found := _names(others):
        yield f"expert_parallel.enabled, tensor_parallel.autotp_size: together do not work with {found}"


def _elastic_batch_sizes(config: Schema) -> Iterator[str]:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = _names({key: getattr(config, key) is not None for key in keys})
    if given and config.elasticity.enabled and not config.elasticity.ignore_non_elastic_batch_info:
        yield (
            f"elasticity.enabled, {given}: elasticity computes the batch sizes; remove these keys, or set "
            "elasticity.ignore_non_elastic_batch_info to true"
        )


def _codecs(config: Schema) -> Iterator[str]:
    zero, stage = config.zero_optimization, int(config.zero_optimization.stage)
    coded = {
        "zero_optimization.zero_quantized_weights": zero.zero_quantized_weights,
        "zero_optimization.zero_quantized_gradients": zero.zero_quantized_gradients,
    }
    if stage == 0 and (found := _names(coded)):
        yield f"{found}: nothing is sharded at zero_optimization.stage 0; use stage 1, 2 or 3, or remove the key"
    if zero.zero_hpz_partition_size > 1 and stage < 3:
        yield (
            f"zero_optimization.zero_hpz_partition_size: {zero.zero_hpz_partition_size} ranks are to share copies of "
            f"sharded parameters, which zero_optimization.stage 3 alone has, found stage {stage}; remove the key"
        )
    at_birth = config.weight_quantization.at_birth
    if at_birth is not None and stage < 3:
        yield (
            "weight_quantization.quantized_initialization: zero.Init makes shards, which zero_optimization.stage 3 "
            f"alone has, found stage {stage}; use stage 3, or post_init_quant"
        )
    if at_birth is not None and at_birth.group_dim != 1:
        yield (
            "weight_quantization.quantized_initialization.group_dim: shards are cut along rows, found 0; use 1, or "
            "post_init_quant"
        )
    if zero.zero_quantized_nontrainable_weights and stage < 3:
        yield (
            "zero_optimization.zero_quantized_nontrainable_weights: frozen weights can rest as codes where they are "
            f"sharded, at zero_optimization.stage 3, found stage {stage}; remove the key"
        )
    if zero.zero_hpz_partition_size > 1 and zero.mics_shard_size > 0:
        yield (
            "zero_optimization.zero_hpz_partition_size, zero_optimization.mics_shard_size: both keep parameters among "
            f"neighbours, found {zero.zero_hpz_partition_size} and {zero.mics_shard_size} ranks; keep one of them"
        )
    if zero.zero_quantized_weights and zero.use_all_reduce_for_fetch_params:
        yield (
            "zero_optimization.zero_quantized_weights, zero_optimization.use_all_reduce_for_fetch_params: codes cannot "
            "be added up; set one of them to false"
        )
    if zero.zero_quantized_gradients:
        others = {
            "zero_optimization.reduce_scatter false": not zero.reduce_scatter,
            "optimizer.type Muon": config.optimizer.type == "Muon",
        }
        if found := _names(others):
            yield f"zero_optimization.zero_quantized_gradients: does not work with {found}; remove one of them"
    if zero.zeropp_loco_param is not None and not zero.zero_quantized_gradients:
        yield (
            "zero_optimization.zeropp_loco_param, zero_optimization.zero_quantized_gradients: error feedback needs "
            "quantised gradients, which are off; set zero_quantized_gradients to true or remove zeropp_loco_param"
        )


def _compression(config: Schema) -> Iterator[str]:
    weights = config.compression_training.weight_quantization.shared_parameters
    if config.quantize_training.enabled and weights.enabled:
        yield (
            "quantize_training.enabled, compression_training.weight_quantization.shared_parameters.enabled: both are "
            "true, and both say how weights are rounded; keep one"
        )


def _verify(config: Schema) -> Iterator[str]:
    verify = config.verify
    if verify.action == "save" and verify.replay is None:
        yield "verify.action: 'save' records the step, but verify.replay names no folder; give one, or use 'stop'"


def _deep_compile(config: Schema) -> Iterator[str]:
    if not config.compile.deepcompile:
        return
    zero, sequence_size = config.zero_optimization, config.sequence_parallel_size or 1
    moved = ("offload_activation", "offload_opt_states", "offload_parameters")
    away = [f"compile.{name}" for name in moved if getattr(config.compile, name)]
    others = {
        " and ".join(away): len(away) > 1,
        "managed_gradient_accumulation false": not config.managed_gradient_accumulation,
        'gradient_allreduce_op "sum"': config.gradient_allreduce_op == "sum",
        'compile.region "blocks"': config.compile.region == "blocks",
        "optimizer_in_backward.enabled": config.optimizer_in_backward.enabled,
        "expert_parallel.enabled": config.expert_parallel.enabled,
        "hybrid_engine.enabled": config.hybrid_engine.enabled,
        'sequence_parallel_size unless sequence_parallel.attention is "ulysses"': (
            sequence_size > 1 and config.sequence_parallel.attention != "ulysses"
        ),
        "sparse_gradients": config.sparse_gradients,
        "zero_optimization.zenflow": zero.zenflow is not None,
        "zero_optimization.zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
        "zero_optimization.zero_quantized_nontrainable_weights": zero.zero_quantized_nontrainable_weights,
        "memory.device": config.memory.device is not None,
        "zero_optimization.offload_optimizer and compile.offload_opt_states": (
            config.compile.offload_opt_states and zero.offloads_optimizer
        ),
        "tensor_parallel.tp_overlap_comm": config.tensor_parallel.tp_overlap_comm,
        "tensor_parallel.sequence_parallel": config.tensor_parallel.sequence_parallel,
        "verify, which looks at gradients by hooks": config.verify.every is not None,
    }
    if found := _names(others):
        yield f"compile.deepcompile: does not work with {found}; give one of them"
    for name, what, key, size in (
        ("autosp", "sequences", "sequence_parallel_size", sequence_size),
        ("autotp", "layers", "tensor_parallel.autotp_size", config.tensor_parallel.autotp_size),
    ):
        if name in (config.compile.passes or ()) and size < 2:
            yield (
                f"compile.passes: {name} compiles {what} that ranks share, but {key} is {size}; set it to 2 or more, "
                f"or leave {name} out"
            )
    if config.compile.offload_parameters and not zero.offloads_parameters:
        yield (
            "compile.offload_parameters: only parameters that ranks share can wait in host memory; set "
            "zero_optimization.stage to 3 and leave offload_param.device at cpu, or turn it off"
        )


_RULES = (
    _deep_compile,
    _compression,
    _codecs,
    _precision,
    _gradients,
    _nonfinite_gradients,
    _updates_in_backward,
    _places,
    _mics,
    _sparse,
    _one_bit,
    _experts,
    _elastic_batch_sizes,
    _verify,
)


def violations(config: Schema) -> list[str]:
    """The texts of all rules that `config` breaks."""
    return [text for rule in _RULES for text in rule(config)]


def advice(config: Schema) -> list[str]:
    """What to log of a config that breaks no rule."""
    warm_up = config.scheduler.params.get("warmup_num_steps")
    name = {"OneBitAdam": "freeze_step", "OneBitLamb": "freeze_step", "ZeroOneAdam": "var_freeze_step"}
    key = name.get(config.optimizer.type or "")
    stays = config.optimizer.params.get(key) if key is not None else None
    if not isinstance(stays, int) or not isinstance(warm_up, int) or stays >= warm_up:
        return []
    return [
        f"optimizer.params.{key}: the variance stays as it is after {stays} steps, but the learning rate warms up for "
        f"{warm_up} (scheduler.params.warmup_num_steps); gradients still change much, and training may diverge. Use at "
        f"least {warm_up}"
    ]
