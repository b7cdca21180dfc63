"""Fewer samples, tokens or layers per step: `data_efficiency`, `curriculum_learning`, `progressive_layer_drop`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge
from pydantic import Field, model_validator

from .model import Count, PositiveCount, Section, Share
from .values import Number, absent, raise_together

__all__ = ["DataEfficiencyConfig", "LegacyCurriculumConfig", "ProgressiveLayerDropConfig"]

_NEEDED = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


class CurriculumScheduleConfig(Section):
    """How fast difficulty grows; which keys are needed depends on the schedule_type."""

    total_curriculum_step: PositiveCount | None = Field(
        None, description="Number of steps until the highest difficulty (fixed_linear, fixed_root)."
    )
    difficulty_step: PositiveCount | None = Field(
        None, description="Difficulty is rounded down to a multiple of this (fixed_linear, fixed_root)."
    )
    root_degree: PositiveCount | None = Field(
        None, description="Degree of the root that difficulty follows; 1 is a straight line (fixed_root)."
    )
    difficulty: list[Count] | None = Field(
        None, description="Difficulties, one after another (fixed_discrete); one more than max_step has."
    )
    max_step: list[Count] | None = Field(
        None, description="Last step of each difficulty but the last one (fixed_discrete)."
    )


class _Paced(Section):
    """A range of difficulty and the way through it."""

    min_difficulty: Count | None = Field(None, description="Difficulty at the first step.")
    max_difficulty: Count | None = Field(None, description="Difficulty at the end of the schedule.")
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] | None = Field(
        None, description="Shape of the schedule; custom is set by a call on the engine."
    )
    schedule_config: CurriculumScheduleConfig = Field(
        default_factory=CurriculumScheduleConfig, description="Numbers that the schedule needs."
    )

    def pacing_problems(self, prefix: str = "") -> list[str]:
        """What an enabled curriculum lacks, with `prefix` before each key."""
        missing = absent(self, ("min_difficulty", "max_difficulty", "schedule_type"))
        problems = [f"{prefix}{key} must be given" for key in missing]
        if self.schedule_type is None:
            return problems
        config = self.schedule_config
        missing = absent(config, _NEEDED[self.schedule_type])
        problems += [
            f'{prefix}schedule_config.{key} must be given with schedule_type "{self.schedule_type}"' for key in missing
        ]
        if self.schedule_type == "fixed_discrete" and not missing:
            levels, ends = config.difficulty or [], config.max_step or []
            if not ends or len(levels) != len(ends) + 1:
                problems.append(
                    f"{prefix}schedule_config.difficulty must have one entry more than max_step, and that at least "
                    f"one; found {len(levels)} and {len(ends)}"
                )
        return problems


class CurriculumMetricConfig(_Paced):
    """The curriculum of one metric of the samples."""

    difficulty_type: Literal["value", "percentile"] | None = Field(
        None, description="Whether difficulty is a value of the metric or a percentile of the samples."
    )
    clustering_type: str | None = Field(
        None, description="single_cluster takes all samples; any other name selects samples by their metric."
    )
    index_to_sample_path: str | None = Field(
        None, description="File of the data analysis that maps metric values to samples."
    )
    index_to_metric_path: str | None = Field(
        None, description="File of the data analysis with the metric values (difficulty_type value)."
    )

    def problems(self, prefix: str) -> list[str]:
        """What an enabled curriculum lacks, with `prefix` before each key."""
        missing = absent(self, ("difficulty_type", "clustering_type"))
        if self.clustering_type not in (None, "single_cluster"):
            missing += absent(self, ("index_to_sample_path",))
            if self.difficulty_type == "value":
                missing += absent(self, ("index_to_metric_path",))
        return [*(f"{prefix}{key} must be given" for key in missing), *self.pacing_problems(prefix)]


class CurriculumLearningConfig(Section):
    """Samples chosen by one or several metrics; needs the training data at `initialize`."""

    enabled: bool = Field(False, description="Whether samples are drawn from easy to hard.")
    data_cluster_path: str | None = Field(None, description="Folder for the index files of the sample clusters.")
    curriculum_metrics: dict[str, CurriculumMetricConfig] = Field(
        {}, description="Name of a metric -> its range and schedule."
    )

    @model_validator(mode="after")
    def _rules(self) -> CurriculumLearningConfig:
        if self.enabled:
            problems = [f"{key} must be given" for key in absent(self, ("data_cluster_path",))]
            if not self.curriculum_metrics:
                problems.append("curriculum_metrics must name at least one metric")
            for name, metric in self.curriculum_metrics.items():
                problems += metric.problems(f"curriculum_metrics.{name}.")
            raise_together(problems)
        return self


class _Switch(Section):
    """What stands before the range and the schedule in the older section."""

    enabled: bool = Field(False, description="Whether forward receives curriculum_seqlen, growing with the steps.")
    curriculum_type: str = Field("seqlen", description="What grows; seqlen is the length of sequences in tokens.")


class LegacyCurriculumConfig(_Paced, _Switch):
    """The older curriculum, which hands a sequence length to the model's forward."""

    @model_validator(mode="after")
    def _rules(self) -> LegacyCurriculumConfig:
        if self.enabled:
            raise_together(self.pacing_problems())
        return self


class DynamicBatchingConfig(Section):
    """Batches of about the same number of tokens instead of the same number of samples."""

    enabled: bool = Field(False, description="Whether batches are cut by tokens.")
    max_tokens: PositiveCount | None = Field(
        None, description="Number of tokens in a micro-batch, at most; must be given when enabled."
    )
    metrics_path: str | None = Field(
        None, description="Folder with the results of the data analysis; not needed if lengths are given in code."
    )
    lr_scaling_method: Literal["linear", "sqrt", "none"] = Field(
        "linear", description="How the learning rate follows the batch size."
    )
    min_batch_size: PositiveCount = Field(1, description="Number of samples in a micro-batch, at least.")
    max_batch_size: PositiveCount | None = Field(
        None, description="Number of samples in a micro-batch, at most; null sets no limit."
    )
    sequence_picking_order: Literal["dataloader", "random", "seqlen"] = Field(
        "dataloader", description="Order in which samples are put into batches."
    )
    verbose: bool = Field(False, description="Whether the batches are logged as they are made.")

    @model_validator(mode="after")
    def _rules(self) -> DynamicBatchingConfig:
        if self.enabled:
            problems = [
                f"{key} must be given when dynamic batching is enabled" for key in absent(self, ("max_tokens",))
            ]
            if self.max_batch_size is not None and self.min_batch_size > self.max_batch_size:
                problems.append(
                    f"min_batch_size ({self.min_batch_size}) exceeds max_batch_size ({self.max_batch_size})"
                )
            raise_together(problems)
        return self


class DataSamplingConfig(Section):
    """Which samples are drawn, and how they are batched."""

    enabled: bool = Field(False, description="Whether the techniques of this block are used.")
    num_epochs: PositiveCount = Field(1000, description="Length of the sampler, in passes over the data.")
    num_workers: Count = Field(0, description="Number of worker processes of the data loader.")
    pin_memory: bool = Field(False, description="Whether the data loader returns page-locked batches.")
    curriculum_learning: CurriculumLearningConfig = Field(
        default_factory=CurriculumLearningConfig, description="Easy samples first."
    )
    dynamic_batching: DynamicBatchingConfig = Field(
        default_factory=DynamicBatchingConfig, description="Batches of about the same number of tokens."
    )


class RandomLTDStepsConfig(Section):
    """Numbers of the token schedule."""

    require_steps: PositiveCount | None = Field(None, description="Number of steps until all tokens are kept.")
    seq_per_step: PositiveCount | None = Field(None, description="The number of tokens is a multiple of this.")


class RandomLTDScheduleConfig(Section):
    """How many tokens are kept at each step."""

    min_value: PositiveCount | None = Field(None, description="Number of tokens kept at the first step.")
    max_value: PositiveCount | None = Field(None, description="Number of tokens kept at the end.")
    schedule_type: Literal["fixed_linear"] | None = Field(
        None, description="Shape of the schedule; fixed_linear is the only one."
    )
    schedule_config: RandomLTDStepsConfig = Field(
        default_factory=RandomLTDStepsConfig, description="Numbers of the schedule."
    )


class LayerTokenLRConfig(Section):
    """A learning rate by consumed tokens, which was never finished upstream."""

    enabled: bool = Field(False, description="Must be false: this schedule does not exist.")
    total_layer_tokens: Any = Field(None, description="No effect: this schedule does not exist.")
    warmup_type: Any = Field(None, description="No effect: this schedule does not exist.")
    warmup_layer_tokens: Any = Field(None, description="No effect: this schedule does not exist.")

    @model_validator(mode="after")
    def _rules(self) -> LayerTokenLRConfig:
        if self.enabled:
            raise ValueError("enabled is true, but a schedule by layer tokens does not exist; set it to false")
        return self


class RandomLTDConfig(Section):
    """Random layer-wise token dropping: middle layers see a random part of the tokens."""

    enabled: bool = Field(False, description="Whether layers drop tokens.")
    total_layer_num: PositiveCount | None = Field(None, description="Number of layers of the model.")
    random_ltd_layer_num: PositiveCount | None = Field(None, description="Number of layers that drop tokens.")
    random_ltd_layer_id: list[Count] | None = Field(None, description="Numbers of the layers that drop tokens.")
    model_mask_name: str | None = Field(
        None, description="Keyword of the attention mask in the layer's forward; null if there is none."
    )
    model_type: Literal["encoder", "decoder"] | None = Field(None, description="Kind of the model.")
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] | None = Field(
        None, description="Order of the dims of the hidden states."
    )
    random_ltd_schedule: RandomLTDScheduleConfig = Field(
        default_factory=RandomLTDScheduleConfig, description="How many tokens are kept at each step."
    )
    layer_token_lr_schedule: LayerTokenLRConfig = Field(
        default_factory=LayerTokenLRConfig, description="A learning rate by consumed tokens; does not exist."
    )
    global_batch_size: PositiveCount | None = Field(
        None, description="No effect: the engine fills in train_batch_size, in samples."
    )
    micro_batch_size: PositiveCount | None = Field(
        None, description="No effect: the engine fills in train_micro_batch_size_per_gpu, in samples."
    )

    @model_validator(mode="after")
    def _rules(self) -> RandomLTDConfig:
        if not self.enabled:
            return self
        keys = (
            *("total_layer_num", "random_ltd_layer_num", "random_ltd_layer_id"),
            *("model_type", "hidden_state_order"),
        )
        missing = absent(self, keys)
        # null is an answer here: the layers take no mask.
        if "model_mask_name" not in self.model_fields_set:
            missing.append("model_mask_name")
        schedule = self.random_ltd_schedule
        missing += [
            f"random_ltd_schedule.{key}" for key in absent(schedule, ("min_value", "max_value", "schedule_type"))
        ]
        missing += [
            f"random_ltd_schedule.schedule_config.{key}"
            for key in absent(schedule.schedule_config, ("require_steps", "seq_per_step"))
        ]
        raise_together([f"{key} must be given when random_ltd is enabled" for key in missing])
        return self


class DataRoutingConfig(Section):
    """Which tokens pass through which layers."""

    enabled: bool = Field(False, description="Whether the techniques of this block are used.")
    random_ltd: RandomLTDConfig = Field(
        default_factory=RandomLTDConfig, description="Random layer-wise token dropping."
    )


class DataEfficiencyConfig(Section):
    """Training on fewer or better chosen data; a technique is on when its switch and those around it are."""

    enabled: bool = Field(False, description="Whether the techniques of this section are used.")
    seed: Count = Field(1234, description="Seed of the random choices.")
    data_sampling: DataSamplingConfig = Field(
        default_factory=DataSamplingConfig, description="Which samples are drawn, and how they are batched."
    )
    data_routing: DataRoutingConfig = Field(
        default_factory=DataRoutingConfig, description="Which tokens pass through which layers."
    )


class ProgressiveLayerDropConfig(Section):
    """Layers skipped at random, more and more of them."""

    enabled: bool = Field(False, description="Whether forward receives the probability of keeping a layer.")
    theta: Share | None = Field(
        None, description="Probability of keeping a layer that is approached in the end (0 to 1)."
    )
    gamma: Annotated[Number, Ge(0)] | None = Field(
        None, description="Speed of the approach: the distance shrinks by exp(-gamma) per step."
    )

    @model_validator(mode="after")
    def _rules(self) -> ProgressiveLayerDropConfig:
        if self.enabled:
            missing = absent(self, ("theta", "gamma"))
            raise_together([f"{key} must be given when progressive_layer_drop is enabled" for key in missing])
        return self
