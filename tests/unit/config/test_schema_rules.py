"""The rules between sections: each fires, each names its keys, all are told together."""

import pytest
from pydantic import ValidationError

from deepspeed.config.rules import advice, violations
from deepspeed.config.schema import Schema

ON = {"enabled": True}
DEEP = {"deepcompile": True}
ULYSSES = {"attention": "ulysses"}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def zero(stage, **values):
    return {"zero_optimization": {"stage": stage, **values}}


# a config that breaks it, how the text begins, a close config that keeps it
CASES = [
    (
        {"compile": {**DEEP, "offload_opt_states": True}, **zero(3, **OFFLOAD)},
        "compile.deepcompile: does not work with zero_optimization.offload_optimizer and compile.offload_opt_states",
        {"compile": {**DEEP, "offload_opt_states": True}, **zero(3)},
    ),
    (
        {"compile": {**DEEP, "offload_parameters": True}, **zero(2)},
        "compile.offload_parameters: only parameters that ranks share",
        {"compile": {**DEEP, "offload_parameters": True}, **zero(3, offload_param={"device": "cpu"})},
    ),
    (
        {"compile": {**DEEP, "offload_opt_states": True, "offload_activation": True}, **zero(3)},
        "compile.deepcompile: does not work with compile.offload_activation and compile.offload_opt_states; give one",
        {"compile": {**DEEP, "offload_activation": True}, **zero(3)},
    ),
    (
        {
            "compile": {**DEEP, "offload_opt_states": True, "offload_parameters": True},
            **zero(3, offload_param={"device": "cpu"}),
        },
        "compile.deepcompile: does not work with compile.offload_opt_states and compile.offload_parameters; give one",
        {"compile": {**DEEP, "offload_opt_states": True}, **zero(3, offload_param={"device": "cpu"})},
    ),
    (
        {"compile": {**DEEP, "passes": ["autotp"]}},
        "compile.passes: autotp compiles layers that ranks share",
        {"compile": {**DEEP, "passes": ["autotp"]}, "tensor_parallel": {"autotp_size": 2}},
    ),
    (
        {"compile": {**DEEP, "passes": ["autosp"]}},
        "compile.passes: autosp compiles sequences that ranks share",
        {"compile": {**DEEP, "passes": ["autosp"]}, "sequence_parallel_size": 2, "sequence_parallel": ULYSSES},
    ),
    (
        {"compile": DEEP, "sequence_parallel_size": 2, "sequence_parallel": {"attention": "ring"}},
        "compile.deepcompile: does not work with sequence_parallel_size unless sequence_parallel.attention",
        {"compile": DEEP, "sequence_parallel_size": 2, "sequence_parallel": ULYSSES},
    ),
    ({"fp16": ON, "bf16": ON}, "fp16.enabled, bf16.enabled: ", {"fp16": ON}),
    (
        {"optimizer_in_backward": ON, "gradient_clipping": 1.0},
        "optimizer_in_backward.enabled: does not work with gradient_clipping",
        {"optimizer_in_backward": {**ON, "clip_by_last_norm": True}, "gradient_clipping": 1.0},
    ),
    (
        {"optimizer_in_backward": ON, "gradient_clipping": 0, "fp16": ON},
        "optimizer_in_backward.enabled: does not work with fp16.enabled",
        {"optimizer_in_backward": ON, "gradient_clipping": 0, "bf16": ON},
    ),
    (
        {"memory": {"device": "1GB"}, **zero(3, offload_param={"device": "cpu"})},
        "memory.device: zero_optimization.offload_param says",
        {"memory": {"device": "1GB"}, **zero(3)},
    ),
    (
        {"fp16": {"fp16_master_weights_and_grads": True}},
        "fp16.fp16_master_weights_and_grads: ",
        {"fp16": {"fp16_master_weights_and_grads": True}, **zero(1)},
    ),
    (
        {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
        "bf16.bf16_master_weights_and_grads, bf16.bf16_optimizer_states: ",
        {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}, **zero(3)},
    ),
    (
        {"fp16": {**ON, "fp16_master_weights_and_grads": True}, **zero(2)},
        "fp16.fp16_master_weights_and_grads: fp16 masters, whose moments stay fp32, need "
        "zero_optimization.offload_optimizer",
        {"fp16": {**ON, "fp16_master_weights_and_grads": True}, **zero(2, **OFFLOAD)},
    ),
    (
        {"bf16": {**ON, "bf16_master_weights_and_grads": True}, **zero(3)},
        "bf16.bf16_master_weights_and_grads: bf16 masters",
        {"bf16": {**ON, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}, **zero(3)},
    ),
    (
        {"data_types": {"param_dtype": "bf16"}},
        "data_types.param_dtype: bf16 is expected",
        {"data_types": {"param_dtype": "bf16"}, "bf16": ON},
    ),
    (
        zero(2, compute_grad_norm=False),
        "zero_optimization.compute_grad_norm, gradient_clipping: clipping at 1.0",
        {"gradient_clipping": 0, **zero(2, compute_grad_norm=False)},
    ),
    (
        {"nonfinite_gradients": "ignore", "fp16": ON},
        "nonfinite_gradients: 'ignore' is not for fp16",
        {"nonfinite_gradients": "ignore", "bf16": ON},
    ),
    (
        {"nonfinite_gradients": "ignore", "torch_autocast": {**ON, "dtype": "fp16"}},
        "nonfinite_gradients: 'ignore' is not for fp16",
        {"nonfinite_gradients": "ignore", "torch_autocast": {**ON, "dtype": "bf16"}},
    ),
    (
        {"nonfinite_gradients": "ignore", "bf16": {**ON, "check_grad_overflow": True}},
        "nonfinite_gradients, bf16.check_grad_overflow: 'ignore' and true",
        {"nonfinite_gradients": "skip", "bf16": {**ON, "check_grad_overflow": True}},
    ),
    (
        {"nonfinite_gradients": "stop", "bf16": {**ON, "check_grad_overflow": False}},
        "nonfinite_gradients, bf16.check_grad_overflow: 'stop' needs the check",
        {"nonfinite_gradients": "ignore", "bf16": {**ON, "check_grad_overflow": False}},
    ),
    (
        {"gradient_allreduce_op": "sum", **zero(2, zenflow={}, **OFFLOAD)},
        'gradient_allreduce_op: "sum" does not work with zero_optimization.zenflow',
        zero(2, zenflow={}, **OFFLOAD),
    ),
    (
        {"prescale_gradients": True, "gradient_predivide_factor": 2.0, **zero(2)},
        "prescale_gradients, gradient_predivide_factor: ",
        {"prescale_gradients": True, **zero(2, reduce_scatter=False)},
    ),
    (
        {"gradient_predivide_factor": 2.0, **zero(3)},
        "gradient_predivide_factor: ",
        {"gradient_predivide_factor": 2.0, **zero(1)},
    ),
    (
        {"managed_gradient_accumulation": False, **zero(1, overlap_comm=True)},
        "managed_gradient_accumulation, zero_optimization.overlap_comm: ",
        {"managed_gradient_accumulation": False, **zero(3)},
    ),
    (
        {"optimizer": {"type": "Lamb"}, "fp16": {**ON, "loss_scale": 128}},
        "optimizer.type, fp16.loss_scale: Lamb in fp16",
        {"optimizer": {"type": "Lamb"}, "fp16": {"loss_scale": 128}},
    ),
    (
        {"expert_parallel": {**ON, "preset_model": "mixtral"}, "tensor_parallel": {"preset_model": "qwen2"}},
        "expert_parallel.preset_model, tensor_parallel.preset_model: ",
        {"expert_parallel": {**ON, "preset_model": "mixtral"}, "tensor_parallel": {"preset_model": "Mixtral"}},
    ),
    (
        {"expert_parallel": {**ON, "autoep_size": 2, "async_split_plan": True}, "tensor_parallel": {"autotp_size": 2}},
        "expert_parallel.enabled, tensor_parallel.autotp_size: together do not work with expert_parallel.async",
        {
            "expert_parallel": {**ON, "autoep_size": 2},
            "tensor_parallel": {"autotp_size": 2},
            **zero(2, offload_optimizer={"device": "none", "nvme_path": None}),
        },
    ),
    (
        {"elasticity": {**ON, "max_train_batch_size": 8, "micro_batch_sizes": [2]}, "train_batch_size": 8},
        "elasticity.enabled, train_batch_size: ",
        {
            "elasticity": {
                **ON,
                "max_train_batch_size": 8,
                "micro_batch_sizes": [2],
                "ignore_non_elastic_batch_info": True,
            },
            "train_batch_size": 8,
        },
    ),
]


@pytest.mark.parametrize(("broken", "begins", "kept"), CASES)
def test_a_rule_fires_and_names_its_keys(broken, begins, kept):
    with pytest.raises(ValidationError) as caught:
        Schema(**broken)
    (error,) = caught.value.errors()
    assert error["loc"] == ()
    lines = error["msg"].removeprefix("Value error, ").splitlines()
    assert any(line.startswith(begins) for line in lines), lines
    assert violations(Schema(**kept)) == []


def test_all_broken_rules_are_told_together():
    with pytest.raises(ValidationError) as caught:
        Schema(fp16={**ON, "loss_scale": 8}, bf16=ON, **zero(2, compute_grad_norm=False), optimizer={"type": "Lamb"})
    (error,) = caught.value.errors()
    lines = error["msg"].removeprefix("Value error, ").splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "fp16.enabled, bf16.enabled",
        "zero_optimization.compute_grad_norm, gradient_clipping",
        "optimizer.type, fp16.loss_scale",
    ]


def test_muon_at_stage_3_needs_no_special_setting():
    Schema(optimizer={"type": "Muon"}, **zero(3))


def test_a_variance_that_stays_during_the_warm_up_is_advised_against():
    def found(kind, key, steps):
        schema = Schema(
            optimizer={"type": kind, "params": {key: steps}},
            scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
        )
        return advice(schema)

    for kind, key in (("OneBitAdam", "freeze_step"), ("ZeroOneAdam", "var_freeze_step")):
        assert found(kind, key, 100) == []
        (text,) = found(kind, key, 99)
        assert f"optimizer.params.{key}" in text
        assert "99 steps" in text
        assert "100" in text
