"""The loader: strict about what looks like ours, patient with what clients do, everything wrong told at once."""

from __future__ import annotations

import copy
import math

import pytest

from deepspeed import log as ds_logging
from deepspeed.config.deepspeed_config import DeepSpeedConfig
from deepspeed.config.explain import rows, without_secrets
from deepspeed.config.features import keys_without_effect
from deepspeed.config.load import load
from deepspeed.config.schema import Schema
from deepspeed.errors import BatchSizeError, DeepSpeedConfigError, FeatureUnavailable

BASE = {"train_batch_size": 8}


@pytest.fixture
def warnings(monkeypatch):
    told: list[str] = []
    ds_logging.warn_once.cache_clear()
    monkeypatch.setattr(ds_logging.logger, "warning", lambda text, *args: told.append(text % args if args else text))
    return told


def failure(config, **options) -> DeepSpeedConfigError:
    with pytest.raises(DeepSpeedConfigError) as caught:
        load(config, **options)
    return caught.value


@pytest.mark.parametrize(
    ("config", "path", "said"),
    [
        ({"zero_optimizaton": {"stage": 3}}, "zero_optimizaton", "did you mean 'zero_optimization'?"),
        ({"gradient_clipp1ng": 1.0}, "gradient_clipp1ng", "did you mean 'gradient_clipping'?"),
        (
            {"zero_optimization": {"offload_optimzer": {}}},
            "zero_optimization.offload_optimzer",
            "did you mean 'offload_optimizer'?",
        ),
        (
            {"zero_optimization": {"offload_param": {"devise": "cpu"}}},
            "zero_optimization.offload_param.devise",
            "did you mean 'device'?",
        ),
        (
            {"activation_checkpointing": {"partition_activation": True}},
            "activation_checkpointing.partition_activation",
            "did you mean 'partition_activations'?",
        ),
        ({"optimizer": {"type": "AdmaW"}}, "optimizer.type", "did you mean 'AdamW'?"),
        ({"optimizer": {"type": "AdamW", "params": {"lrr": 1}}}, "optimizer.params.lrr", "did you mean 'lr'?"),
        ({"optimizer": {"type": "SGD", "params": {"momentun": 1}}}, "optimizer.params.momentun", "mean 'momentum'?"),
        ({"optimizer": {"type": "sgd"}}, "optimizer.type", "did you mean 'SGD'?"),
        ({"optimizer": {"params": {"lr": 1}}}, "optimizer.type", "missing"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}},
            "scheduler.params.warmup_steps",
            "did you mean 'warmup_num_steps'?",
        ),
        ({"scheduler": {"type": "WarmpLR"}}, "scheduler.type", "did you mean 'WarmupLR'?"),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 1}}},
            "scheduler.params.total_num_steps",
            "WarmupDecayLR needs it",
        ),
        ({"scheduler": {"type": "StepLR", "params": {}}}, "scheduler.params.step_size", "StepLR needs it"),
        (
            {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}},
            "optimizer.params.max_grad_norm",
            "gradient_clipping",
        ),
        ({"offload_optimizer": {"device": "cpu"}}, "offload_optimizer", "belongs under 'zero_optimization'"),
        ({"zero_optimization": {"gradient_clipping": 1}}, "zero_optimization.gradient_clipping", "the top level"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "4"),
        ({"zero_optimization": 7}, "zero_optimization", "7"),
        ({"fp16": {"enabled": "perhaps"}}, "fp16.enabled", "found 'perhaps'"),
        ({"zero": {"stage": 1}}, "zero", "zero_optimization"),
        ({"compile": {"enabled": True}}, "compile.enabled", "engine.compile()"),
    ],
)
def test_what_looks_like_ours_is_an_error_that_names_the_key(config, path, said):
    error = failure({**BASE, **config})
    assert error.path == path
    assert str(error).startswith(path)
    assert said in str(error)


def test_everything_wrong_is_told_at_once():
    error = failure({"train_batch_size": "many", "zero_optimizaton": {}, "fp16": {"enabledd": 1, "loss_scale": -1}})
    text = str(error)
    assert text.startswith("4 problems in the config (the given dict):")
    for path in ("train_batch_size", "zero_optimizaton", "fp16.enabledd", "fp16.loss_scale"):
        assert f"  {path}: " in text
    assert isinstance(error, BatchSizeError)


def test_alien_keys_warn_once_and_load(warnings):
    for _ in range(2):
        loaded = load({**BASE, "my_company": {"a": 1}, "bf16": {"enabled": True, "colour": "red"}, "msamp": {}})
    assert loaded.schema.bf16.enabled
    assert len(warnings) == 3
    assert "'my_company' is not known and is ignored" in warnings[0]
    assert any("'bf16.colour'" in text for text in warnings)


def test_strict_makes_aliens_errors():
    error = failure({**BASE, "strict": True, "my_company": 1})
    assert error.path == "my_company"


def test_numbers_as_text_are_told(warnings):
    zero = {"stage": "3", "sub_group_size": "100", "overlap_comm": "yes", "reduce_scatter": True}
    config = {
        **BASE,
        "zero_optimization": zero,
        "elasticity": {"micro_batch_sizes": ["2", 4]},
        "memory": {"host": "1GB"},
    }
    loaded = load({**config, "gradient_clipping": "auto", "log_level": "info"}, partial=True)
    assert (loaded.schema.zero_optimization.stage, loaded.schema.zero_optimization.overlap_comm) == (3, True)
    assert warnings == [
        "config: zero_optimization.stage: the text '3' was read as 3; write 3 without quotes",
        "config: zero_optimization.overlap_comm: the text 'yes' was read as true; write true without quotes",
        "config: zero_optimization.sub_group_size: the text '100' was read as 100; write 100 without quotes",
        "config: elasticity.micro_batch_sizes: the text '2' was read as 2; write 2 without quotes",
    ]
    assert "3 without quotes (an error because of" in str(failure({**config, "strict": True}))


@pytest.mark.parametrize("name", ["RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "LOCAL_RANK"])
def test_only_the_first_rank_logs(name, warnings, monkeypatch):
    config = {**BASE, "zero_optimization": {"stage": "3", "cpu_offload": True}, "my_company": 1}
    for other in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "LOCAL_RANK"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "1")
    load(config)
    assert warnings == []
    monkeypatch.setenv(name, "0")
    load(config)
    assert len(warnings) == 3
    if name == "LOCAL_RANK":  # of another machine: what knows the rank among all decides
        monkeypatch.setenv("RANK", "8")
        load({**BASE, "another_company": 1})
        assert len(warnings) == 3


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"nebula": {"tier": {"enabled": [1]}, "enabled": {}}}, "nebula"),
        ({"compile": {"symmetric_memory": True, "passes": "z2", "region": 7}}, "compile.symmetric_memory"),
    ],
)
def test_a_missing_feature_is_told_before_values_of_its_section(config, path):
    for beside in ({}, {"fp16": {"enabled": "perhaps"}}):
        error = failure({**BASE, **config, **beside}) if beside or "compile" in config else None
        if error is None:
            with pytest.raises(FeatureUnavailable) as caught:
                DeepSpeedConfig({**BASE, **config})
            error = caught.value
        assert error.path == path


BELOW = {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (BELOW, "zero_optimization.offload_param.device: no effect: zero_optimization.stage is below 3"),
        ({"fp16": {"loss_scale": 8}}, "fp16.loss_scale: no effect: fp16.enabled is not given, and false by default"),
    ],
)
def test_keys_without_effect_are_told_or_refused_if_strict(config, said):
    assert said in str(DeepSpeedConfig({**BASE, **config}).notes)
    with pytest.raises(DeepSpeedConfigError, match="because of") as caught:
        DeepSpeedConfig({**BASE, **config, "strict": True})
    assert said in str(caught.value)
    DeepSpeedConfig({**BASE, **config, "strict": True}, partial=True)  # a client may still fill what gives it effect


def test_a_section_that_is_switched_off_is_off_on_purpose():
    sections = {"fp16": {"enabled": False, "loss_scale": 8}, "tensorboard": {"enabled": False, "job_name": "x"}}
    assert DeepSpeedConfig({**BASE, **sections, "strict": True}).notes == []


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"amp": {"enabled": True, "opt_level": "O1"}, "fp16": {"enabled": True}}, "amp"),
        ({"nebula": {"enabled": "true", "fast": False}}, "nebula"),
    ],
)
def test_a_missing_feature_is_told_before_everything_else(config, path):
    with pytest.raises(FeatureUnavailable, match="which this library does not call") as caught:
        DeepSpeedConfig({**BASE, **config})
    assert caught.value.path == path
    if config.get("nebula") is None:  # of what is not valid, switches are seen
        beside = failure({**BASE, **config, "gradient_cliping": 1})
        assert not isinstance(beside, FeatureUnavailable)
        assert beside.path == path
        assert "did you mean 'gradient_clipping'" in str(beside)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"hybrid_engine": {"max_out_tokens": 9}},
            ["hybrid_engine.max_out_tokens: no effect: hybrid_engine.enabled is not"],
        ),
        ({"hybrid_engine": {"max_out_tokens": 9, "enabled": False}}, []),
        (
            {"compression_training": {"row_pruning": {"shared_parameters": {"schedule_offset": 3}}}},
            ["compression_training.row_pruning.shared_parameters.schedule_offset: no effect: compression_training.row"],
        ),
        ({"compression_training": {"row_pruning": {"shared_parameters": {"enabled": False}}}}, []),
        ({"data_efficiency": {"data_sampling": {"enabled": False}}}, []),
        ({"data_efficiency": {"enabled": True}}, ["data_efficiency.enabled: no effect: none of its techniques"]),
        ({"weight_quantization": {"num_bits": 4}}, ["weight_quantization.num_bits: no effect: quantized_initializa"]),
        (
            {"weight_quantization": {"enabled": False, "post_init_quant": {"fc": {"num_bits": 4}}}},
            ["weight_quantization.post_init_quant.fc.num_bits: no effect: weight_quantization.enabled is false"],
        ),
        ({"nebula": {"_why": "later"}}, []),
    ],
)
def test_keys_of_a_missing_feature_that_is_not_asked_for_are_told(config, said):
    notes = DeepSpeedConfig({**BASE, **config}).notes
    assert len(notes) == len(said)
    assert all(note.startswith(begin) for note, begin in zip(notes, said, strict=True))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}, "did you mean 'lr'?"),
        ({"optimizer": {"type": "SGD", "params": {"learning_rate": 1}}}, "did you mean 'lr'?"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}}, "did you mean 'warmup_num_steps'?"),
    ],
)
def test_names_of_client_libraries_are_understood(section, said):
    assert said in str(failure({**BASE, **section}))


def test_comments_are_silent(warnings):
    load({**BASE, "_comment": "x", "//": "y", "$schema": "./ds.schema.json", "fp16": {"_why": "z"}})
    assert warnings == []


def test_the_callers_dict_is_never_changed():
    config = {
        **BASE,
        "bfloat16": {"enabled": True},
        "zero_optimization": {"cpu_offload": False, "stage": 2},
        "zero_optimization.reduce_bucket_size": 10,
        "data_efficiency": {"enabled": False},
    }
    before = copy.deepcopy(config)
    load(config)
    assert config == before


@pytest.mark.parametrize(
    "section",
    """fp16 bf16 zero_optimization optimizer scheduler compile hybrid_engine tensor_parallel comms_logger flops_profiler
    data_efficiency timers torch_autocast weight_quantization pipeline checkpoint data_types activation_checkpointing
    autotuning tensorboard wandb comet csv_monitor aio expert_parallel datastates_ckpt elasticity compression_training
    amp eigenvalue sparse_attention progressive_layer_drop curriculum_learning nebula quantize_training""".split(),
)
def test_a_null_section_is_an_absent_one(section):
    assert load({**BASE, section: None}).schema == load(BASE).schema


def test_what_accelerate_writes():
    loaded = load(
        {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "steps_per_print": math.inf,
            "zero_allow_untested_optimizer": True,
            "fp16": {"enabled": False, "auto_cast": True},
            "bf16": {"enabled": True},
            "communication_data_type": "fp32",
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "none", "nvme_path": None},
                "offload_param": {"device": "none", "nvme_path": None},
                "stage3_gather_16bit_weights_on_model_save": False,
                "reduce_bucket_size": 0.9 * 33 * 33,
                "stage3_prefetch_bucket_size": 0.9 * 33 * 33,
                "stage3_param_persistence_threshold": 10 * 33,
                "sub_group_size": 1e9,
            },
        }
    )
    assert loaded.schema.steps_per_print == math.inf
    assert loaded.schema.zero_optimization.reduce_bucket_size == 980
    assert loaded.schema.zero_optimization.sub_group_size == 10**9
    assert loaded.schema.zero_optimization.prefetch_bucket_size == 980


def test_what_lightning_writes(warnings):
    loaded = load(
        {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 2, "sub_group_size": 10**12, "allgather_partitions": True},
            "activation_checkpointing": {
                "partition_activations": False,
                "cpu_checkpointing": False,
                "contiguous_memory_optimization": False,
                "synchronize_checkpoint_boundary": False,
            },
            "aio": {
                "block_size": 1048576,
                "queue_depth": 8,
                "single_submit": False,
                "overlap_events": True,
                "thread_count": 2,
            },
        }
    )
    assert loaded.schema.aio.intra_op_parallelism == 2
    assert warnings == []


def test_literal_dotted_keys_set_the_nested_key_unless_that_is_given(warnings):
    dotted = {"zero_optimization.reduce_bucket_size": 81.0, "zero_optimization.stage3_prefetch_bucket_size": 0}
    zero = load({**BASE, **dotted}).schema.zero_optimization
    assert (zero.reduce_bucket_size, zero.prefetch_bucket_size) == (81, 0)
    zero = load({**BASE, **dotted, "zero_optimization": {"reduce_bucket_size": 7}}).schema.zero_optimization
    assert zero.reduce_bucket_size == 7
    left = {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage": 3}
    zero = load({**BASE, **dotted, "zero_optimization": left}).schema.zero_optimization
    assert (zero.reduce_bucket_size, zero.prefetch_bucket_size) == (81, 0)
    assert warnings == []


def test_old_names_are_moved_and_told(warnings):
    loaded = load({**BASE, "bfloat16": {"enabled": True}, "zero_optimization": {"cpu_offload": True, "stage": 1}})
    assert loaded.schema.bf16.enabled
    assert loaded.schema.zero_optimization.offload_optimizer.device.value == "cpu"
    assert loaded.renamed == {
        "bf16": "bfloat16",
        "zero_optimization.offload_optimizer": "zero_optimization.cpu_offload",
    }
    assert len(warnings) == 2


def test_an_old_and_a_new_name_together_are_an_error():
    error = failure({**BASE, "zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}})
    assert "it is the old name of 'zero_optimization.offload_optimizer', which is given too" in str(error)
    error = failure(
        {**BASE, "zero_optimization": {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 1}},
    )
    assert "they are one key" in str(error)


def test_bf16_wins_over_its_alias():
    assert not load({**BASE, "bfloat16": {"enabled": True}, "bf16": {"enabled": False}}).schema.bf16.enabled
    assert load({**BASE, "bfloat16": {"enabled": True}, "bf16": None}).schema.bf16.enabled


@pytest.mark.parametrize(("value", "stage"), [(True, 1), (False, 0)])
def test_boolean_zero(value, stage):
    zero = load({**BASE, "zero_optimization": value, "allgather_size": 128}).schema.zero_optimization
    assert zero.stage == stage
    assert zero.allgather_bucket_size == (128 if value else 5 * 10**8)


AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-8}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
}


def test_auto_is_accepted_in_a_partial_config():
    loaded = load(AUTO, partial=True)
    assert loaded.schema.optimizer.params == {"eps": 1e-8}
    assert not loaded.schema.fp16.enabled
    assert loaded.schema.zero_optimization.reduce_bucket_size == 5 * 10**8
    assert "optimizer.params.lr" in loaded.autos
    assert "zero_optimization.stage3_prefetch_bucket_size" in loaded.autos


def test_auto_left_over_names_the_key_and_who_should_have_filled_it():
    text = str(failure(AUTO))
    for path in (
        "train_batch_size",
        "optimizer.params.lr",
        "scheduler.params.total_num_steps",
        "fp16.enabled",
    ):
        assert f'  {path}: it is still "auto"' in text
    assert "Transformers' Trainer fills it from learning_rate" in text
    nobody = failure({**BASE, "wall_clock_breakdown": "auto"})
    assert "no client fills this key" in str(nobody)


def test_auto_on_a_stage_3_key_is_inert_under_another_stage():
    config = {**BASE, "zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": "auto"}}
    assert load(config).schema.zero_optimization.prefetch_bucket_size == 5 * 10**7
    zero = {"stage": 0, "reduce_bucket_size": "auto", "stage3_gather_16bit_weights_on_model_save": "auto"}
    assert load({**BASE, "zero_optimization": zero}).schema.zero_optimization.reduce_bucket_size == 5 * 10**8


@pytest.mark.parametrize("stage", [2, 3])
def test_auto_is_the_default_of_sizes_that_change_speed_and_memory_only(stage):
    sizes = dict.fromkeys(
        ["sub_group_size", "reduce_bucket_size", "stage3_max_live_parameters", "stage3_prefetch_bucket_size"], "auto"
    )
    found = load({**BASE, "zero_optimization": {"stage": stage, **sizes}}).schema.zero_optimization
    assert found == load({**BASE, "zero_optimization": {"stage": stage}}).schema.zero_optimization
    left = failure({**BASE, "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "auto"}, **sizes}})
    assert "offload_optimizer.device: it is still" in str(left)
    assert "sub_group_size" not in str(left)


def test_some_keys_own_the_word_auto():
    assert load({**BASE, "pipeline": {"stages": "auto"}}).schema.pipeline.stages == "auto"


def test_the_disabled_comms_logger_stays_off():
    assert not load({**BASE, "comms_logger": {"enabled": False}}).schema.comms_logger.enabled
    assert not load({**BASE, "comms_logger": {}}).schema.comms_logger.enabled


def test_secrets_are_never_shown():
    config = DeepSpeedConfig({**BASE, "comet": {"enabled": False, "api_key": "very-secret"}})
    shown = [config.schema, config.schema.comet, without_secrets(config.loaded.raw), *rows(config.loaded)]
    assert "api_key" in str(shown)
    assert "very-secret" not in str(shown)
    assert config.schema.comet.api_key == "very-secret"


def test_keys_of_sections_that_are_switched_off_are_told():
    given = {"fused_kernels": {"loss": False}, "fp8": {"scaling": "row"}, "memory_profiler": {"top_modules": 3}}
    given["flops_profiler"] = {"profile_step": 5}
    paths = ["fused_kernels.loss", "fp8.scaling", "flops_profiler.profile_step", "memory_profiler.top_modules"]
    assert sorted(problem.path for problem in keys_without_effect(Schema(**given), paths)) == sorted(paths)
    on = {name: {**section, "enabled": True} for name, section in given.items()}
    assert keys_without_effect(Schema(**on), [*paths, *(f"{name}.enabled" for name in given)]) == []
    off = {name: {"enabled": False} for name in given}
    assert keys_without_effect(Schema(**off), [f"{name}.enabled" for name in given]) == []
