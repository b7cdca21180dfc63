"""`Schema`: the top level of the config, one field per key in the order of interest; rules.py has what binds them."""

from __future__ import annotations

import math
import os
from typing import Annotated, Any, Literal

from annotated_types import Gt
from pydantic import AfterValidator, BeforeValidator, WithJsonSchema, model_validator

from deepspeed.log import get_log_level_from_string, log_levels

from .attention import SparseAttentionConfig
from .autotuning import DeepSpeedAutotuningConfig
from .checkpoint import CheckpointConfig
from .compile import CompileConfig, Fp8Config, FusedKernelsConfig, HybridEngineConfig
from .compression import CompressionConfig, EigenvalueConfig, QuantizeTrainingConfig, WeightQuantizationConfig
from .data import DataEfficiencyConfig, LegacyCurriculumConfig, ProgressiveLayerDropConfig
from .elasticity import ElasticityConfig
from .memory import ActivationCheckpointingConfig, AioConfig, MemoryConfig
from .model import (
    ConfigModel,
    DtypeName,
    Elements,
    ForeignOptions,
    Lower,
    NoEffect,
    NotBuilt,
    Number,
    PositiveCount,
    Unbuilt,
    Whole,
    key,
    no_effect,
    not_boolean,
    off_is_none,
    raise_together,
)
from .monitor import (
    CometConfig,
    CommsConfig,
    CommsLoggerConfig,
    CSVConfig,
    DeepSpeedMonitorConfig,
    EventsConfig,
    FlopsProfilerConfig,
    HangsConfig,
    MemoryProfilerConfig,
    TensorBoardConfig,
    TimersConfig,
    TraceConfig,
    VerifyConfig,
    WandbConfig,
)
from .optimizer import OptimizerConfig, OptimizerInBackwardConfig, SchedulerConfig
from .parallel import ExpertParallelConfig, PipelineConfig, SequenceParallelConfig, TPTrainingConfig
from .precision import (
    DataTypesConfig,
    DeepSpeedBF16Config,
    DeepSpeedFP16Config,
    TorchAutocastConfig,
)
from .rules import violations
from .zero import DeepSpeedZeroConfig

CHECKPOINT_ENGINES = "deepspeed.checkpoint_engines"
"""The group of entry points of classes that write checkpoints, each by the name of the config key that asks for it."""
_IN_BACKGROUND = (
    "checkpoint.writer.decoupled saves in the background, and engine.checkpoint_engine takes an engine of your own"
)


def _print_period(value: Any) -> Any:
    """A positive whole number, or infinity, which Accelerate writes for "never"."""
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if number == math.inf:
        return number
    if not math.isfinite(number) or number != math.floor(number) or number < 1:
        raise ValueError(f"expected a whole number of steps above zero, or null for never, found {value!r}")
    return int(value) if isinstance(value, int) else int(number)


def _level(name: str) -> str:
    """Checked in any case, kept as it was written: `engine.log_level()` returns the text of the config."""
    get_log_level_from_string(name)
    return name


def _largest_norm(value: float) -> float:
    if not value >= 0:
        raise ValueError(f"expected a number above zero, or 0 for no clipping, found {value}")
    return value


def _no_technique(schema: Any) -> bool:
    """Whether switches of `data_efficiency` are on around techniques that are all off."""
    data = schema.data_efficiency
    return not data.techniques and True in (data.enabled, data.data_sampling.enabled, data.data_routing.enabled)


class Schema(ConfigModel):
    """Every key of the config, with its default: each valid by itself and together with the others."""

    strict: bool = key(False, "Whether unknown keys, keys without effect and numbers as text are errors, not warnings.")

    # Batch
    train_batch_size: Whole | None = key(
        None, "Samples per optimizer step over all data-parallel ranks; derived if left out."
    )
    train_micro_batch_size_per_gpu: Whole | None = key(
        None, "Samples per rank in one forward and backward pass; derived if left out."
    )
    gradient_accumulation_steps: Whole | None = key(
        None, "Forward and backward passes per optimizer step; derived, or 1, if left out."
    )
    managed_gradient_accumulation: bool = key(
        True, "Whether the engine counts passes and steps at the last; false steps at every step()."
    )

    # Optimizer and gradients
    optimizer: OptimizerConfig = key(OptimizerConfig, "Optimizer to build.")
    scheduler: SchedulerConfig = key(SchedulerConfig, "Learning-rate schedule to build.")
    gradient_clipping: Annotated[float, BeforeValidator(not_boolean), AfterValidator(_largest_norm)] = key(
        1.0, "Largest global L2 norm of the gradients; larger ones are scaled down, 0 is off."
    )
    nonfinite_gradients: Annotated[Literal["skip", "stop", "ignore"], Lower] = key(
        "skip",
        "Whether a step with inf or NaN gradients is skipped with a warning ('skip'), stops all ranks with an error "
        "('stop'), or is taken as any other, so that no update waits for a check ('ignore'); what a dynamic loss "
        "scale answers to is always skipped.",
    )
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], Lower] = key(
        "mean", "Whether gradients are averaged or summed over the data-parallel ranks."
    )
    prescale_gradients: bool = key(
        False, "Whether gradients are divided by the number of ranks before reduction, not after."
    )
    gradient_predivide_factor: Annotated[Number, Gt(0)] = key(
        1.0, "Gradients are divided by this before reduction and by the rest of the mean after it."
    )
    communication_data_type: DtypeName | None = key(
        None, "Dtype in which gradients are reduced; null means the training dtype."
    )
    seq_parallel_communication_data_type: DtypeName | None = key(
        "fp32", "Dtype in which gradients are reduced when sequences are split over ranks."
    )
    sparse_gradients: bool = key(False, "Whether only the touched rows of gradients of embeddings travel.")
    zero_allow_untested_optimizer: bool = key(False, "Whether ZeRO accepts an optimizer class outside the tested list.")
    zero_force_ds_cpu_optimizer: bool = key(
        True,
        "Whether offload refuses optimizers handed in that are slow on the CPU.",
        NoEffect(
            "zero_optimization.offload_optimizer is off, so no optimizer runs on the CPU for a GPU",
            lambda c: not c.zero_optimization.offloads_optimizer,
        ),
    )

    # Precision
    fp16: DeepSpeedFP16Config = key(DeepSpeedFP16Config, "Training in fp16.")
    bf16: DeepSpeedBF16Config = key(DeepSpeedBF16Config, "Training in bf16.")
    torch_autocast: TorchAutocastConfig = key(TorchAutocastConfig, "torch.autocast around forward.")
    data_types: DataTypesConfig = key(DataTypesConfig, "Dtypes by role, where they differ from the training dtype.")
    amp: Unbuilt = key(
        Unbuilt,
        "Apex mixed precision.",
        NotBuilt("Apex AMP", instead="turn on bf16, fp16 or torch_autocast, which do the same", package="apex"),
    )

    # Memory
    zero_optimization: DeepSpeedZeroConfig = key(
        DeepSpeedZeroConfig, "Sharding over the data-parallel ranks, and offload."
    )
    memory: MemoryConfig = key(MemoryConfig, "How much of each tier of memory model states may take.")
    aio: AioConfig = key(
        AioConfig,
        "File access for state on NVMe.",
        NoEffect(
            "neither offload_optimizer nor offload_param of zero_optimization has the device nvme, and memory.disk is "
            "not given; the checkpoint writer has its own keys, checkpoint.writer",
            lambda c: not (c.memory.disk or c.zero_optimization.swap_folders),
        ),
    )
    activation_checkpointing: ActivationCheckpointingConfig = key(
        ActivationCheckpointingConfig, "How saved activations are kept until backward."
    )
    allgather_size: Elements = key(
        500_000_000,
        "Elements per gather where zero_optimization is the old true; no effect otherwise.",
        NoEffect("write zero_optimization.allgather_bucket_size"),
    )
    disable_allgather: bool = no_effect(False, "how parameters are gathered follows from the ZeRO stage")

    # Parallelism
    tensor_parallel: TPTrainingConfig = key(
        TPTrainingConfig,
        "Layers split over ranks (AutoTP).",
        NoEffect(
            "tensor_parallel.autotp_size is below 2, so that layers are not split",
            lambda c: c.tensor_parallel.autotp_size < 2,
            switch="tensor_parallel.autotp_size",
        ),
    )
    pipeline: PipelineConfig = key(PipelineConfig, "Layers spread over ranks.")
    expert_parallel: ExpertParallelConfig = key(ExpertParallelConfig, "Experts spread over ranks (AutoEP).")
    sequence_parallel_size: PositiveCount | None = key(None, "Number of ranks that share each sequence; null is 1.")
    sequence_parallel: SequenceParallelConfig = key(
        SequenceParallelConfig, "Attention over sequences that ranks share; tiles."
    )
    data_parallel_size: PositiveCount | None = key(
        None, "Number of data-parallel ranks; a check only, the number of processes decides."
    )
    use_data_before_expert_parallelism: bool = key(
        False, "Whether neighbouring ranks hold the same experts, rather than different ones."
    )

    # Compilation
    fused_kernels: FusedKernelsConfig = key(FusedKernelsConfig, "Modules of the model that run on fused kernels.")
    fp8: Fp8Config = key(Fp8Config, "Linear layers whose products are of 8-bit numbers.")
    optimizer_in_backward: OptimizerInBackwardConfig = key(
        OptimizerInBackwardConfig, "Updates while backward brings gradients."
    )
    compile: CompileConfig = key(
        CompileConfig,
        "What engine.compile() does.",
        NoEffect(
            "it belongs to compile.deepcompile, which is off",
            lambda c: not c.compile.deepcompile,
            switch="compile.region",
        ),
    )
    graph_harvesting: bool = key(
        False,
        "Whether parts of the bf16 optimizer run as CUDA graphs.",
        NotBuilt(
            "graph harvesting",
            instead="engine.compile(compile_kwargs={'mode': 'reduce-overhead'}) runs the model as CUDA graphs",
        ),
    )

    # Checkpoints
    checkpoint: CheckpointConfig = key(CheckpointConfig, "Saving and loading of checkpoints.")
    datastates_ckpt: ForeignOptions = key(
        None,
        "Options of the external DataStates checkpoint engine; false and null are off.",
        NotBuilt("DataStates checkpoints", None, _IN_BACKGROUND, "datastates", CHECKPOINT_ENGINES),
    )
    nebula: Unbuilt = key(
        Unbuilt,
        "Checkpoints through Azure's Nebula.",
        NotBuilt("Nebula checkpoints", None, _IN_BACKGROUND, "torch_nebula", CHECKPOINT_ENGINES),
    )

    # Data
    dataloader_drop_last: bool = key(
        False, "Whether the engine's data loader drops the last batch if it is incomplete."
    )
    data_efficiency: DataEfficiencyConfig = key(
        DataEfficiencyConfig,
        "Fewer or better chosen samples and tokens.",
        NoEffect("none of its techniques has its own switch on", _no_technique),
    )
    curriculum_learning: LegacyCurriculumConfig = key(
        LegacyCurriculumConfig, "The older curriculum, by sequence length."
    )
    progressive_layer_drop: ProgressiveLayerDropConfig = key(ProgressiveLayerDropConfig, "Layers skipped at random.")

    # Compression, inference, model
    compression_training: CompressionConfig = key(CompressionConfig, "Quantisation and pruning while training.")
    quantize_training: QuantizeTrainingConfig = key(
        QuantizeTrainingConfig, "MoQ: every weight loses bits as training goes on."
    )
    eigenvalue: EigenvalueConfig = key(
        EigenvalueConfig,
        "MoQ: blocks along which the loss bends more keep their bits longer.",
        NoEffect("quantize_training.enabled is false", lambda c: not c.quantize_training.enabled),
    )
    weight_quantization: WeightQuantizationConfig = key(
        WeightQuantizationConfig, "Frozen weights that rest in 4 or 8 bits."
    )
    hybrid_engine: HybridEngineConfig = key(HybridEngineConfig, "Training and generation with one set of weights.")
    sparse_attention: Annotated[SparseAttentionConfig | None, BeforeValidator(off_is_none)] = key(
        None, "The pattern of SparseSelfAttention modules that have none of their own; false and null are off."
    )
    vocabulary_size: PositiveCount | None = key(
        None, "Size of the vocabulary, in tokens; a warning follows if it is no multiple of 8."
    )

    # Logging and measurement
    steps_per_print: Annotated[int | float | None, BeforeValidator(_print_period)] = key(
        None, "Number of optimizer steps between two progress lines; null and infinity mean never."
    )
    log_level: Annotated[str, AfterValidator(_level), WithJsonSchema({"enum": list(log_levels)})] | None = key(
        None, "Level of the library's logger (any case); null leaves it alone."
    )
    wall_clock_breakdown: bool = key(False, "Whether the time of forward, backward and step is measured and logged.")
    memory_breakdown: bool = key(False, "Whether memory use is logged around forward, backward and step.")
    dump_state: bool = key(False, "Whether rank 0 logs the state of the engine once it is built.")
    disable_python_gc: bool = key(False, "Whether Python's cyclic garbage collector is off while an engine lives.")
    tensorboard: TensorBoardConfig = key(TensorBoardConfig, "Event files for TensorBoard.")
    wandb: WandbConfig = key(WandbConfig, "Metrics sent to Weights & Biases.")
    comet: CometConfig = key(CometConfig, "Metrics sent to Comet.")
    csv_monitor: CSVConfig = key(CSVConfig, "One CSV file per metric.")
    hangs: HangsConfig = key(HangsConfig, "How a collective that does not complete is reported, and when.")
    comms_logger: CommsLoggerConfig = key(CommsLoggerConfig, "Sizes, counts, latency and bandwidth of collectives.")
    flops_profiler: FlopsProfilerConfig = key(FlopsProfilerConfig, "Floating-point operations per module.")
    memory_profiler: MemoryProfilerConfig = key(
        MemoryProfilerConfig, "Memory by kind at the peak of a step, and its module."
    )
    events: EventsConfig = key(
        EventsConfig,
        "What happens in training, as lines of JSON in a file per rank.",
        NoEffect(
            "neither events.file nor the variable DS_EVENTS is given",
            lambda c: c.events.file is None and not os.environ.get("DS_EVENTS"),
            switch="events.file",
        ),
    )
    trace: TraceConfig = key(
        TraceConfig,
        "Traces of torch's profiler over a few steps.",
        NoEffect("trace.steps is empty", lambda c: not c.trace.steps, switch="trace.steps"),
    )
    timers: TimersConfig = key(TimersConfig, "Timers that run during training.")
    verify: VerifyConfig = key(
        VerifyConfig,
        "Checks of running training for corrupted values.",
        NoEffect("verify.every is not given", lambda c: c.verify.every is None, switch="verify.every"),
    )

    # Programs around training
    autotuning: DeepSpeedAutotuningConfig = key(DeepSpeedAutotuningConfig, "Search for the fastest config.")
    elasticity: ElasticityConfig = key(ElasticityConfig, "One batch size for many numbers of GPUs.")

    @property
    def monitor_config(self) -> DeepSpeedMonitorConfig:
        """The four monitors together."""
        return DeepSpeedMonitorConfig(
            tensorboard=self.tensorboard, comet=self.comet, wandb=self.wandb, csv_monitor=self.csv_monitor
        )

    @property
    def comms_config(self) -> CommsConfig:
        """What concerns the recording of communication."""
        return CommsConfig(comms_logger=self.comms_logger)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Ranks along the axes of the layout that the config names."""
        return {"sp": self.sequence_parallel_size or 1, "tp": max(1, self.tensor_parallel.autotp_size)}

    @model_validator(mode="after")
    def _rules_between_sections(self) -> Schema:
        raise_together(violations(self))
        return self
