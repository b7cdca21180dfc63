"""Curriculum learning: easy samples first. The schedules, the data-efficiency block and the older top-level section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from .model import Count, PositiveCount, Section
from .values import absent, raise_together

__all__ = ["CurriculumLearningConfig", "CurriculumMetricConfig", "CurriculumScheduleConfig", "LegacyCurriculumConfig"]

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
