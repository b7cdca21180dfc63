"""The rules between sections of the config; a rule raises ValueError whose text begins with the keys concerned."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .schema import Schema


def _refuse(keys: str, why: str) -> None:
    raise ValueError(f"{keys}: {why}")


def _stage(config: Schema) -> int:
    return int(config.zero_optimization.stage)


def one_precision(config: Schema) -> None:
    if config.fp16.enabled and config.bf16.enabled:
        _refuse("fp16.enabled, bf16.enabled", "both are true; a model trains in one of them, set the other to false")


def one_answer_to_where_states_live(config: Schema) -> None:
    zero = config.zero_optimization
    others = {
        "zero_optimization.offload_optimizer": zero.offloads_optimizer,
        "zero_optimization.offload_param": zero.offloads_parameters,
    }
    found = [name for name, on in others.items() if on]
    if found and config.memory.device is not None:
        _refuse("memory.device", f"{' and '.join(found)} says where states live, too; give one of them")


def low_precision_masters_need_zero(config: Schema) -> None:
    keys = {
        "fp16.fp16_master_weights_and_grads": config.fp16.fp16_master_weights_and_grads,
        "bf16.bf16_master_weights_and_grads": config.bf16.bf16_master_weights_and_grads,
        "bf16.bf16_optimizer_states": config.bf16.bf16_optimizer_states,
    }
    given = [key for key, on in keys.items() if on]
    if given and _stage(config) == 0:
        _refuse(", ".join(given), "16-bit master state needs zero_optimization.stage 1, 2 or 3, found stage 0")


def wide_moments_of_low_precision_masters(config: Schema) -> None:
    fp16, bf16 = config.fp16, config.bf16
    if _stage(config) == 0 or config.zero_optimization.offloads_optimizer:
        return
    where = "whose moments stay fp32, need zero_optimization.offload_optimizer, which is off"
    if fp16.enabled and fp16.fp16_master_weights_and_grads:
        _refuse("fp16.fp16_master_weights_and_grads", f"fp16 masters, {where}; set the key to false")
    if bf16.enabled and bf16.bf16_master_weights_and_grads and not bf16.bf16_optimizer_states:
        _refuse(
            "bf16.bf16_master_weights_and_grads",
            f"bf16 masters, {where}; set bf16.bf16_optimizer_states to true, or this key to false",
        )


def parameters_have_the_expected_dtype(config: Schema) -> None:
    expected = config.data_types.param_dtype
    actual = "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else "fp32"
    if expected is not None and expected != actual:
        _refuse(
            "data_types.param_dtype",
            f"{expected} is expected, but the fp16 and bf16 sections make the parameters {actual}",
        )


def clipping_needs_the_norm(config: Schema) -> None:
    if not config.zero_optimization.compute_grad_norm and config.gradient_clipping > 0:
        _refuse(
            "zero_optimization.compute_grad_norm, gradient_clipping",
            f"clipping at {config.gradient_clipping} needs the norm; set gradient_clipping to 0 (its default is 1.0) "
            "or compute_grad_norm to true",
        )


def one_answer_to_nonfinite_gradients(config: Schema) -> None:
    answer, bf16, autocast = config.nonfinite_gradients, config.bf16, config.torch_autocast
    asked = "check_grad_overflow" in bf16.model_fields_set
    if answer == "ignore" and (config.fp16.enabled or (autocast.enabled and autocast.dtype == "fp16")):
        _refuse("nonfinite_gradients", "'ignore' is not for fp16, whose loss scale answers to them; remove it")
    if answer == "ignore" and bf16.enabled and asked and bf16.check_grad_overflow:
        _refuse("nonfinite_gradients, bf16.check_grad_overflow", "'ignore' and true exclude each other; keep one")
    if answer == "stop" and bf16.enabled and not bf16.check_grad_overflow:
        _refuse(
            "nonfinite_gradients, bf16.check_grad_overflow", "'stop' needs the check, which is false; set it to true"
        )


def sum_of_gradients(config: Schema) -> None:
    if config.gradient_allreduce_op != "sum":
        return
    others = {
        "zero_optimization.stage 3": _stage(config) == 3,
        "zero_optimization.zenflow": config.zero_optimization.zenflow is not None,
    }
    found = [name for name, on in others.items() if on]
    if found:
        _refuse("gradient_allreduce_op", f'"sum" does not work with {", ".join(found)}; use "mean"')


def scaling_before_reduction(config: Schema) -> None:
    stage, factor = _stage(config), config.gradient_predivide_factor
    divided = stage == 3 or (stage == 2 and config.gradient_allreduce_op == "mean")
    given = ["prescale_gradients"] * config.prescale_gradients + ["gradient_predivide_factor"] * (factor != 1.0)
    if given and divided and config.zero_optimization.reduce_scatter:
        _refuse(
            ", ".join(given),
            f"no effect is possible at ZeRO stage {stage} with zero_optimization.reduce_scatter; remove the key, or "
            "set reduce_scatter to false",
        )


def unmanaged_accumulation(config: Schema) -> None:
    if not config.managed_gradient_accumulation and config.zero_optimization.overlap_comm and _stage(config) < 2:
        _refuse(
            "managed_gradient_accumulation, zero_optimization.overlap_comm",
            f"false with overlap_comm needs ZeRO stage 2 or 3, found stage {_stage(config)}",
        )


def lamb_scales_dynamically(config: Schema) -> None:
    if config.optimizer.type == "Lamb" and config.fp16.enabled and not config.fp16.dynamic:
        _refuse(
            "optimizer.type, fp16.loss_scale",
            f"Lamb in fp16 needs a dynamic loss scale (0), found {config.fp16.loss_scale}",
        )


def one_optimizer_offload(config: Schema) -> None:
    if config.compile.offload_opt_states and config.zero_optimization.offloads_optimizer:
        _refuse(
            "compile.offload_opt_states, zero_optimization.offload_optimizer", "both move the optimizer state; keep one"
        )


def compiled_around_experts(config: Schema) -> None:
    if not config.compile.autoep_non_moe:
        return
    zero = config.zero_optimization
    others = {
        "expert_parallel.comm_backend deepep": config.expert_parallel.comm_backend == "deepep",
        "tensor_parallel.autotp_size": config.tensor_parallel.autotp_size > 1,
        "sequence_parallel_size": (config.sequence_parallel_size or 1) > 1,
        "zero_optimization.stage 3": _stage(config) == 3,
        "zero_optimization.offload_optimizer": zero.offloads_optimizer,
        "zero_optimization.offload_param": zero.offloads_parameters,
    }
    found = [name for name, on in others.items() if on]
    if found:
        _refuse("compile.autoep_non_moe", f"does not work with {', '.join(found)}")


def expert_and_tensor_presets_agree(config: Schema) -> None:
    expert, tensor = config.expert_parallel.preset_model, config.tensor_parallel.preset_model
    if config.expert_parallel.enabled and expert is not None and tensor is not None and expert != tensor:
        _refuse(
            "expert_parallel.preset_model, tensor_parallel.preset_model",
            f"they describe one model and must be equal, found {expert} and {tensor}",
        )


def experts_with_tensor_parallel(config: Schema) -> None:
    expert, zero = config.expert_parallel, config.zero_optimization
    if not expert.enabled or config.tensor_parallel.autotp_size < 2 or expert.expert_tensor_parallel_size > 1:
        return  # experts that ranks share lie as the rest of the model does
    others = {
        f"autoep_size {expert.autoep_size} (needs more than 1)": expert.autoep_size < 2,
        "zero_optimization.offload_optimizer": zero.offloads_optimizer,
        "zero_optimization.offload_param": zero.offloads_parameters,
        "use_data_before_expert_parallelism": config.use_data_before_expert_parallelism,
        "expert_parallel.async_split_plan": expert.async_split_plan,
        "expert_parallel.combine_impl fused_weighted_sum": expert.combine_impl == "fused_weighted_sum",
    }
    found = [name for name, on in others.items() if on]
    if found:
        _refuse("expert_parallel.enabled, tensor_parallel.autotp_size", f"together do not work with {', '.join(found)}")


def elastic_batch_sizes(config: Schema) -> None:
    elastic = config.elasticity
    if not elastic.enabled or elastic.ignore_non_elastic_batch_info:
        return
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = [key for key in keys if getattr(config, key) is not None]
    if given:
        _refuse(
            f"elasticity.enabled, {', '.join(given)}",
            "elasticity computes the batch sizes; remove these keys, or set "
            "elasticity.ignore_non_elastic_batch_info to true",
        )


def gradients_that_are_used_up(config: Schema) -> None:
    section, zero = config.optimizer_in_backward, config.zero_optimization
    if not section.enabled:
        return
    others = {
        "gradient_clipping (1.0 by default; set optimizer_in_backward.clip_by_last_norm, or the key to 0)": (
            config.gradient_clipping > 0 and not section.clip_by_last_norm
        ),
        "fp16.enabled, whose overflows are known after the update": config.fp16.enabled,
        "bf16.check_grad_overflow, for the same reason": (
            config.bf16.enabled
            and config.bf16.check_grad_overflow
            and "check_grad_overflow" in config.bf16.model_fields_set
        ),
        "nonfinite_gradients 'stop', for the same reason": config.nonfinite_gradients == "stop",
        "managed_gradient_accumulation false, where no backward is known to be the last": (
            not config.managed_gradient_accumulation
        ),
        "zero_optimization.offload_optimizer": zero.offloads_optimizer,
        "zero_optimization.offload_param": zero.offloads_parameters,
        "memory.device": config.memory.device is not None,
    }
    found = [name for name, on in others.items() if on]
    if found:
        _refuse("optimizer_in_backward.enabled", f"does not work with {', '.join(found)}")


RULES: tuple[Callable[[Schema], None], ...] = (
    one_precision,
    one_answer_to_where_states_live,
    low_precision_masters_need_zero,
    wide_moments_of_low_precision_masters,
    parameters_have_the_expected_dtype,
    clipping_needs_the_norm,
    one_answer_to_nonfinite_gradients,
    sum_of_gradients,
    scaling_before_reduction,
    unmanaged_accumulation,
    lamb_scales_dynamically,
    one_optimizer_offload,
    compiled_around_experts,
    expert_and_tensor_presets_agree,
    experts_with_tensor_parallel,
    elastic_batch_sizes,
    gradients_that_are_used_up,
)
"""Every rule between sections."""


def violations(config: Schema) -> list[str]:
    """The texts of all rules that `config` breaks."""
    found = []
    for rule in RULES:
        try:
            rule(config)
        except ValueError as error:
            found.append(str(error))
    return found
