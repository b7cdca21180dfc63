"""The `autotuning` section: what `deepspeed --autotuning` searches, and what an engine measures in one of its runs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Gt
from pydantic import AfterValidator, BeforeValidator, model_validator

from .model import Lower, NoEffect, Number, PositiveCount, Section, key

__all__ = ["AutotuningModelInfo", "DeepSpeedAutotuningConfig"]

_NUMBER_OF_PARAMETERS = NoEffect("memory of a model's states follows from model_info.num_params alone")


def _named(folder: str) -> str:
    if not folder.strip():
        raise ValueError("expected the name of a folder, found none")
    return folder


def _metric(value: Any) -> Any:
    """Also by the name that it has in the file of a run."""
    return "flops" if isinstance(value, str) and value.lower() == "flops_per_gpu" else value


class AutotuningModelInfo(Section):
    """What is known of the model before the search."""

    profile: bool = key(False, "Whether this run writes what the model needs into model_info_path, and ends.")
    num_params: PositiveCount | None = key(None, "Parameters of the model; given, no run is spent to count them.")
    hidden_size: PositiveCount | None = key(None, "Width of the model.", _NUMBER_OF_PARAMETERS)
    num_layers: PositiveCount | None = key(None, "Layers of the model.", _NUMBER_OF_PARAMETERS)


class DeepSpeedAutotuningConfig(Section):
    """The search for the fastest config, and the window that its runs measure."""

    renamed_under = "autotuning"

    enabled: bool = key(False, "Whether an engine measures the steps of the window, writes metric_path and ends.")
    fast: bool = key(True, "Whether only stage and micro batch are searched; false adds buckets and overlap_comm.")
    results_dir: Annotated[str, AfterValidator(_named)] = key("autotuning_results", "Folder of the results.")
    exps_dir: Annotated[str, AfterValidator(_named)] = key("autotuning_exps", "Folder of the experiments' settings.")
    overwrite: bool = key(False, "Whether results of an earlier search are deleted; else they are used again.")
    start_profile_step: PositiveCount = key(3, "First optimizer step that is measured, counted from 0.")
    end_profile_step: PositiveCount = key(5, "Last optimizer step that is measured.")
    metric: Annotated[Literal["throughput", "latency", "flops"], Lower, BeforeValidator(_metric)] = key(
        "throughput", "What is best: most samples per second, the shortest step, or most operations per device."
    )
    metric_path: str = key("autotuning_metric.json", "File into which an engine writes what it measured.")
    model_info: AutotuningModelInfo = key(AutotuningModelInfo, "What is known of the model before the search.")
    model_info_path: str = key("autotuning_model_info.json", "File of model_info.profile.")
    tuner_type: Annotated[Literal["model_based", "gridsearch", "random"], Lower] = key(
        "model_based", "Order of the experiments: best forecast first, as listed, or at random."
    )
    tuner_early_stopping: PositiveCount = key(5, "Experiments without improvement after which the search ends.")
    tuner_num_trials: PositiveCount = key(50, "Most experiments of one stage.")
    arg_mappings: dict[str, str] | None = key(
        None, "Key of the config (dotted) -> option of the script that has the same value."
    )
    max_train_batch_size: PositiveCount | None = key(None, "Most samples of an optimizer step; null is no limit.")
    min_train_batch_size: PositiveCount = key(1, "Fewest samples of an optimizer step.")
    max_train_micro_batch_size_per_gpu: PositiveCount = key(1024, "Largest micro batch that is tried.")
    min_train_micro_batch_size_per_gpu: PositiveCount = key(1, "Smallest micro batch that is tried.")
    num_tuning_micro_batch_sizes: PositiveCount = key(3, "Micro batch sizes that are measured at a stage.")
    mp_size: PositiveCount = key(1, "Ranks that share one model in the script's own way (an mpu).")
    patience: Annotated[Number, Gt(0)] = key(
        600.0, "Seconds without an optimizer step after which a run is taken to hang and is ended."
    )

    @model_validator(mode="after")
    def _ranges(self) -> DeepSpeedAutotuningConfig:
        for low, high in (
            ("start_profile_step", "end_profile_step"),
            ("min_train_batch_size", "max_train_batch_size"),
            ("min_train_micro_batch_size_per_gpu", "max_train_micro_batch_size_per_gpu"),
        ):
            first, last = getattr(self, low), getattr(self, high)
            if last is not None and first > last:
                raise ValueError(f"{low} is {first} and {high} is {last}; expected {low} to be at most {high}")
        return self
