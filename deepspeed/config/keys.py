"""The top level of the JSON config: one field per key, in the order in which a reader would want them."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from annotated_types import Gt
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema

from deepspeed.log import get_log_level_from_string, log_levels

from .activation import ActivationCheckpointingConfig
from .aio import AioConfig
from .autotuning import AutotuningConfig
from .checkpoint import CheckpointConfig
from .comm import CommsLoggerConfig
from .compile import CompileConfig
from .compression import CompressionConfig, EigenvalueConfig, QuantizeTrainingConfig
from .data import DataEfficiencyConfig, LegacyCurriculumConfig, ProgressiveLayerDropConfig
from .elasticity import ElasticityConfig
from .expert import ExpertParallelConfig
from .fp8 import Fp8Config
from .fusion import FusedKernelsConfig
from .hangs import HangsConfig
from .in_backward import OptimizerInBackwardConfig
from .inference import HybridEngineConfig, WeightQuantConfig
from .memory import MemoryConfig
from .model import DeepSpeedConfigModel, Elements, Foreign, ForeignOptions, PositiveCount
from .monitor import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from .optimizer import OptimizerConfig, SchedulerConfig
from .parallel import PipelineConfig, TPTrainingConfig
from .precision import (
    DataTypesConfig,
    DeepSpeedBF16Config,
    DeepSpeedFP16Config,
    TorchAutocastConfig,
)
from .profiling import FlopsProfilerConfig, MemoryProfilerConfig, TimersConfig
from .sequence import SequenceParallelConfig
from .values import DtypeName, Lower, Number, Whole, not_boolean
from .zero import DeepSpeedZeroConfig

__all__ = ["Keys"]


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


class Keys(DeepSpeedConfigModel):
    """Every key of the config, with its default; `Schema` adds the rules between them."""

    # Only Schema is ever instantiated, so only its validator is built.
    model_config = ConfigDict(defer_build=True)

    strict: bool = Field(
        False, description="Whether unknown keys, keys without effect and numbers as text are errors, not warnings."
    )

    # Batch
    train_batch_size: Whole | None = Field(
        None, description="Samples per optimizer step over all data-parallel ranks; derived if left out."
    )
    train_micro_batch_size_per_gpu: Whole | None = Field(
        None, description="Samples per rank in one forward and backward pass; derived if left out."
    )
    gradient_accumulation_steps: Whole | None = Field(
        None, description="Forward and backward passes per optimizer step; derived, or 1, if left out."
    )
    managed_gradient_accumulation: bool = Field(
        True, description="Whether the engine counts passes and steps at the last; false steps at every step()."
    )

    # Optimizer and gradients
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="Optimizer to build.")
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig, description="Learning-rate schedule to build.")
    gradient_clipping: Annotated[float, BeforeValidator(not_boolean), AfterValidator(_largest_norm)] = Field(
        1.0, description="Largest global L2 norm of the gradients; larger ones are scaled down, 0 is off."
    )
    nonfinite_gradients: Annotated[Literal["skip", "stop", "ignore"], Lower] = Field(
        "skip",
        description="Whether a step with inf or NaN gradients is skipped and told ('skip'), stops all ranks with an "
        "error ('stop'), or is taken as any other, so that no update waits for a check ('ignore'); what a dynamic loss "
        "scale answers to is always skipped.",
    )
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], Lower] = Field(
        "mean", description="Whether gradients are averaged or summed over the data-parallel ranks."
    )
    prescale_gradients: bool = Field(
        False, description="Whether gradients are divided by the number of ranks before reduction, not after."
    )
    gradient_predivide_factor: Annotated[Number, Gt(0)] = Field(
        1.0, description="Gradients are divided by this before reduction and by the rest of the mean after it."
    )
    communication_data_type: DtypeName | None = Field(
        None, description="Dtype in which gradients are reduced; null means the training dtype."
    )
    seq_parallel_communication_data_type: DtypeName | None = Field(
        "fp32", description="Dtype in which gradients are reduced when sequences are split over ranks."
    )
    sparse_gradients: bool = Field(False, description="Whether gradients of embeddings are reduced in sparse form.")
    zero_allow_untested_optimizer: bool = Field(
        False, description="Whether ZeRO accepts an optimizer class outside the tested list."
    )
    zero_force_ds_cpu_optimizer: bool = Field(
        True, description="Whether offload refuses optimizers handed in that are slow on the CPU."
    )

    # Precision
    fp16: DeepSpeedFP16Config = Field(default_factory=DeepSpeedFP16Config, description="Training in fp16.")
    bf16: DeepSpeedBF16Config = Field(default_factory=DeepSpeedBF16Config, description="Training in bf16.")
    torch_autocast: TorchAutocastConfig = Field(
        default_factory=TorchAutocastConfig, description="torch.autocast around forward."
    )
    data_types: DataTypesConfig = Field(
        default_factory=DataTypesConfig, description="Dtypes by role, where they differ from the training dtype."
    )
    amp: Foreign = Field(default_factory=Foreign, description="Apex mixed precision.")

    # Memory
    zero_optimization: DeepSpeedZeroConfig = Field(
        default_factory=DeepSpeedZeroConfig, description="Sharding over the data-parallel ranks, and offload."
    )
    memory: MemoryConfig = Field(
        default_factory=MemoryConfig, description="How much of each tier of memory model states may take."
    )
    aio: AioConfig = Field(default_factory=AioConfig, description="File access for state on NVMe.")
    activation_checkpointing: ActivationCheckpointingConfig = Field(
        default_factory=ActivationCheckpointingConfig, description="How saved activations are kept until backward."
    )
    allgather_size: Elements = Field(
        500_000_000, description="Elements per gather where zero_optimization is the old true; no effect otherwise."
    )
    disable_allgather: bool = Field(
        False, description="No effect: how parameters are gathered follows from ZeRO; accepted for old configs."
    )

    # Parallelism
    tensor_parallel: TPTrainingConfig = Field(
        default_factory=TPTrainingConfig, description="Layers split over ranks (AutoTP)."
    )
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig, description="Layers spread over ranks.")
    expert_parallel: ExpertParallelConfig = Field(
        default_factory=ExpertParallelConfig, description="Experts spread over ranks (AutoEP)."
    )
    sequence_parallel_size: PositiveCount | None = Field(
        None, description="Number of ranks that share each sequence; null is 1."
    )
    sequence_parallel: SequenceParallelConfig = Field(
        default_factory=SequenceParallelConfig, description="Attention over sequences that ranks share; tiles."
    )
    data_parallel_size: PositiveCount | None = Field(
        None, description="Number of data-parallel ranks; a check only, the number of processes decides."
    )
    use_data_before_expert_parallelism: bool = Field(
        False, description="Whether neighbouring ranks hold the same experts, rather than different ones."
    )

    # Compilation
    fused_kernels: FusedKernelsConfig = Field(
        default_factory=FusedKernelsConfig, description="Modules of the model that run on fused kernels."
    )
    fp8: Fp8Config = Field(default_factory=Fp8Config, description="Linear layers whose products are of 8-bit numbers.")
    optimizer_in_backward: OptimizerInBackwardConfig = Field(
        default_factory=OptimizerInBackwardConfig, description="Updates while backward brings gradients."
    )
    compile: CompileConfig = Field(default_factory=CompileConfig, description="What engine.compile() does.")
    graph_harvesting: bool = Field(False, description="Whether parts of the bf16 optimizer run as CUDA graphs.")

    # Checkpoints
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="Saving and loading of checkpoints."
    )
    datastates_ckpt: ForeignOptions = Field(
        None, description="Options of the external DataStates checkpoint engine; false and null are off."
    )
    nebula: Foreign = Field(default_factory=Foreign, description="Checkpoints through Azure's Nebula.")

    # Data
    dataloader_drop_last: bool = Field(
        False, description="Whether the engine's data loader drops the last batch if it is incomplete."
    )
    data_efficiency: DataEfficiencyConfig = Field(
        default_factory=DataEfficiencyConfig, description="Fewer or better chosen samples and tokens."
    )
    curriculum_learning: LegacyCurriculumConfig = Field(
        default_factory=LegacyCurriculumConfig, description="The older curriculum, by sequence length."
    )
    progressive_layer_drop: ProgressiveLayerDropConfig = Field(
        default_factory=ProgressiveLayerDropConfig, description="Layers skipped at random."
    )

    # Compression, inference, model
    compression_training: CompressionConfig = Field(
        default_factory=CompressionConfig, description="Quantisation and pruning while training."
    )
    quantize_training: QuantizeTrainingConfig = Field(
        default_factory=QuantizeTrainingConfig, description="The first form of quantised training."
    )
    eigenvalue: EigenvalueConfig = Field(
        default_factory=EigenvalueConfig, description="Curvature per layer, for the pace of quantisation."
    )
    weight_quantization: WeightQuantConfig = Field(
        default_factory=WeightQuantConfig, description="Quantised weights for inference with ZeRO."
    )
    hybrid_engine: HybridEngineConfig = Field(
        default_factory=HybridEngineConfig, description="Training and generation with one set of weights."
    )
    sparse_attention: ForeignOptions = Field(
        None, description="Layout of block-sparse attention; false and null are off."
    )
    vocabulary_size: PositiveCount | None = Field(
        None, description="Size of the vocabulary, in tokens; a warning follows if it is no multiple of 8."
    )

    # Logging and measurement
    steps_per_print: Annotated[int | float | None, BeforeValidator(_print_period)] = Field(
        None, description="Number of optimizer steps between two progress lines; null and infinity mean never."
    )
    log_level: Annotated[str, AfterValidator(_level), WithJsonSchema({"enum": list(log_levels)})] | None = Field(
        None, description="Level of the library's logger (any case); null leaves it alone."
    )
    wall_clock_breakdown: bool = Field(
        False, description="Whether the time of forward, backward and step is measured and logged."
    )
    memory_breakdown: bool = Field(False, description="Whether memory use is logged around forward, backward and step.")
    dump_state: bool = Field(False, description="Whether rank 0 logs the state of the engine once it is built.")
    disable_python_gc: bool = Field(
        False, description="Whether Python's cyclic garbage collector is off while an engine lives."
    )
    tensorboard: TensorBoardConfig = Field(
        default_factory=TensorBoardConfig, description="Event files for TensorBoard."
    )
    wandb: WandbConfig = Field(default_factory=WandbConfig, description="Metrics sent to Weights & Biases.")
    comet: CometConfig = Field(default_factory=CometConfig, description="Metrics sent to Comet.")
    csv_monitor: CSVConfig = Field(default_factory=CSVConfig, description="One CSV file per metric.")
    hangs: HangsConfig = Field(
        default_factory=HangsConfig, description="What is told when a collective does not complete, and when."
    )
    comms_logger: CommsLoggerConfig = Field(
        default_factory=CommsLoggerConfig, description="Sizes, counts, latency and bandwidth of collectives."
    )
    flops_profiler: FlopsProfilerConfig = Field(
        default_factory=FlopsProfilerConfig, description="Floating-point operations per module."
    )
    memory_profiler: MemoryProfilerConfig = Field(
        default_factory=MemoryProfilerConfig, description="Memory by kind at the peak of a step, and its module."
    )
    timers: TimersConfig = Field(default_factory=TimersConfig, description="Timers that run during training.")

    # Programs around training
    autotuning: AutotuningConfig = Field(default_factory=AutotuningConfig, description="Search for the fastest config.")
    elasticity: ElasticityConfig = Field(
        default_factory=ElasticityConfig, description="One batch size for many numbers of GPUs."
    )
