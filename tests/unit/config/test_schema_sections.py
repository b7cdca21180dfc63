"""The small sections: aio, activations, checkpoint, monitors, profiling, compile, elasticity."""

import pytest
from pydantic import ValidationError

from deepspeed.config.checkpoint import CheckpointConfig, CheckpointWriterConfig
from deepspeed.config.elasticity import ElasticityConfig
from deepspeed.config.memory import ActivationCheckpointingConfig, AioConfig
from deepspeed.config.monitor import (
    CometConfig,
    CommsConfig,
    CommsLoggerConfig,
    DeepSpeedMonitorConfig,
    FlopsProfilerConfig,
    TensorBoardConfig,
    TimersConfig,
)


def refused(model, **values):
    with pytest.raises(ValidationError) as caught:
        model(**values)
    return str(caught.value)


def test_aio_as_lightning_writes_it():
    block = {"block_size": 1048576, "queue_depth": 8, "single_submit": False, "overlap_events": True}
    aio = AioConfig(**block)
    assert (aio.intra_op_parallelism, aio.use_gds) == (1, False)
    assert "queue_depth" in refused(AioConfig, queue_depth=0)


def test_activation_checkpointing_is_judged_when_it_is_configured():
    block = ActivationCheckpointingConfig(contiguous_memory_optimization=True)
    assert block.number_checkpoints is None
    assert "number_checkpoints" in refused(ActivationCheckpointingConfig, number_checkpoints=0)


def test_checkpoint():
    checkpoint = CheckpointConfig()
    assert (checkpoint.tag_validation, checkpoint.checkpoint_serialization, checkpoint.writer) == ("WARN", True, None)
    assert CheckpointConfig(tag_validation="Fail").tag_validation == "FAIL"
    assert "'IGNORE', 'WARN' or 'FAIL'" in refused(CheckpointConfig, tag_validation="shout")
    assert CheckpointConfig(writer={}).writer == CheckpointWriterConfig()


def test_checkpoint_writer():
    writer = CheckpointWriterConfig(type="python", data_parallel="Replica")
    assert (writer.type, writer.data_parallel, writer.io_buffer_size) == ("PYTHON", "replica", 64 * 2**20)
    assert "'FAST', 'PYTHON' or 'MOCK'" in refused(CheckpointWriterConfig, type="slow")
    assert "'replica', 'socket' or 'machine'" in refused(CheckpointWriterConfig, data_parallel="rack")


def test_the_comms_logger_is_off_until_enabled():
    assert not CommsConfig().comms_logger_enabled
    assert not CommsLoggerConfig(verbose=True).enabled
    assert CommsConfig(comms_logger={"enabled": True}).comms_logger_enabled
    assert 'write ["all_reduce"]' in refused(CommsLoggerConfig, prof_ops="all_reduce")


@pytest.mark.parametrize("name", ["tensorboard", "comet", "wandb", "csv_monitor"])
def test_one_monitor_is_enough(name):
    assert not DeepSpeedMonitorConfig().enabled
    assert DeepSpeedMonitorConfig(**{name: {"enabled": True}}).enabled


def test_monitors():
    assert TensorBoardConfig(output_path=None).output_path == ""
    assert TensorBoardConfig().job_name == "DeepSpeedJobName"
    assert CometConfig().samples_log_interval == 100
    assert "'get', 'create' or 'get_or_create'" in refused(CometConfig, mode="put")


def test_profiling():
    assert FlopsProfilerConfig().detailed is True
    assert "module_depth" in refused(FlopsProfilerConfig, module_depth=-2)
    assert TimersConfig().throughput.synchronized is True


ELASTIC = {"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [2, 4]}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_train_batch_size": 3}, "micro_batch_sizes [4] exceed max_train_batch_size (3)"),
        ({"min_gpus": 4, "max_gpus": 2}, "min_gpus (4) exceeds max_gpus (2)"),
        ({"version": 0.3}, "version 0.1 or 0.2, found 0.3"),
        ({"version": 10**400}, "version 0.1 or 0.2"),
        ({"version": "new"}, "version 0.1 or 0.2, found 'new'"),
        ({"version": 0.1, "model_parallel_size": 2}, "needs version 0.2, found 0.1"),
        ({"num_gpus_per_node": 3, "model_parallel_size": 2}, "(3) must be a multiple of model_parallel_size (2)"),
        ({"micro_batch_sizes": []}, "micro_batch_sizes"),
        ({"micro_batch_sizes": [0]}, "micro_batch_sizes"),
        ({"min_time": -1}, "min_time"),
    ],
)
def test_elasticity_rules(values, said):
    ElasticityConfig(**ELASTIC)
    assert said in refused(ElasticityConfig, **{**ELASTIC, **values})


def test_elasticity_needs_its_keys_only_when_enabled():
    text = refused(ElasticityConfig, enabled=True)
    assert "max_train_batch_size must be given" in text
    assert "micro_batch_sizes must be given" in text
    ElasticityConfig(enabled=False, min_gpus=4, max_gpus=2)
    assert ElasticityConfig().version == 0.2
