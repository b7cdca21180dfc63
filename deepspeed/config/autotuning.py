"""The `autotuning` section: what `deepspeed --autotuning` tries, and where it keeps its results."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from annotated_types import MinLen
from pydantic import Field, model_validator

from .model import Count, PositiveCount, Section
from .values import raise_together

__all__ = ["AutotuningConfig", "ModelInfoConfig"]


class ModelInfoConfig(Section):
    """Facts about the model that otherwise a profiling run finds out."""

    profile: bool = Field(False, description="Whether the model is profiled in a run of its own.")
    num_params: PositiveCount | None = Field(None, description="Number of parameter elements.")
    hidden_size: PositiveCount | None = Field(None, description="Width of the model, in elements.")
    num_layers: PositiveCount | None = Field(None, description="Number of layers.")


class AutotuningConfig(Section):
    """Search for the ZeRO stage, batch size and bucket sizes that train fastest."""

    renamed_under: ClassVar[str | None] = "autotuning"

    enabled: bool = Field(False, description="Whether this run is an experiment: measure, write the result, exit.")
    fast: bool = Field(True, description="Whether only the micro-batch size is tuned.")
    metric: str = Field(
        "throughput", description="What is optimised: throughput, latency, FLOPS_per_gpu or the name of a timer."
    )
    tuner_type: Literal["gridsearch", "random", "model_based"] = Field(
        "gridsearch", description="Order in which the candidates are tried."
    )
    tuner_num_trials: PositiveCount = Field(50, description="Number of experiments per tuning space, at most.")
    tuner_early_stopping: Count = Field(
        5, description="Number of experiments without improvement after which a tuning space is left."
    )
    start_profile_step: Count = Field(3, description="Optimizer step at which measuring begins.")
    end_profile_step: Count = Field(5, description="Optimizer step at which measuring ends; the run then exits.")
    max_train_batch_size: PositiveCount | None = Field(
        None, description="Largest train_batch_size to try, in samples; null sets no limit."
    )
    min_train_batch_size: PositiveCount = Field(
        1, description="No effect: the search starts from the smallest micro-batch; accepted for old configs."
    )
    max_train_micro_batch_size_per_gpu: PositiveCount = Field(
        1024, description="Largest micro-batch to try, in samples per GPU."
    )
    min_train_micro_batch_size_per_gpu: PositiveCount = Field(
        1, description="Smallest micro-batch to try, in samples per GPU."
    )
    num_tuning_micro_batch_sizes: PositiveCount = Field(3, description="Number of micro-batch sizes to try.")
    mp_size: PositiveCount = Field(1, description="Number of ranks that hold one copy of the model.")
    arg_mappings: dict[str, Any] | None = Field(
        None, description="Config key -> command-line flag of the training script that sets the same value."
    )
    model_info: ModelInfoConfig | None = Field(
        None, description="Facts about the model; giving them saves the profiling run."
    )
    model_info_path: str = Field(
        "autotuning_model_info.json", description="File for the model facts, relative to the working directory."
    )
    metric_path: str = Field(
        "autotuning_metric.json", description="File for the measured metrics, relative to the working directory."
    )
    results_dir: Annotated[str, MinLen(1)] = Field(
        "autotuning_results", description="Folder for the results of the experiments."
    )
    exps_dir: Annotated[str, MinLen(1)] = Field(
        "autotuning_exps", description="Folder for the descriptions of the experiments."
    )
    overwrite: bool = Field(True, description="Whether both folders are emptied at the start.")

    @model_validator(mode="after")
    def _rules(self) -> AutotuningConfig:
        problems = []
        if self.end_profile_step < self.start_profile_step:
            problems.append(
                f"end_profile_step ({self.end_profile_step}) lies before start_profile_step ({self.start_profile_step})"
            )
        low, high = self.min_train_micro_batch_size_per_gpu, self.max_train_micro_batch_size_per_gpu
        if low > high:
            problems.append(
                f"min_train_micro_batch_size_per_gpu ({low}) exceeds max_train_micro_batch_size_per_gpu ({high})"
            )
        raise_together(problems)
        return self
