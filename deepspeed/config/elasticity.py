"""The `elasticity` section: one batch size for many possible numbers of GPUs."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from annotated_types import MinLen
from pydantic import BeforeValidator, Field, model_validator

from .model import Count, PositiveCount, Section
from .values import raise_together

__all__ = ["ElasticityConfig"]

_VERSIONS = (0.1, 0.2)


def _version(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number not in _VERSIONS:
        raise ValueError(f"expected elasticity version 0.1 or 0.2, found {value!r}")
    return float(number)


class ElasticityConfig(Section):
    """Elastic training: the batch size is chosen so that it fits the most world sizes."""

    renamed_under: ClassVar[str | None] = "elasticity"

    enabled: bool = Field(
        False, description="Whether the batch sizes are computed from this section and the number of GPUs."
    )
    max_train_batch_size: PositiveCount = Field(
        2000, description="Upper bound on train_batch_size, in samples; must be given when enabled."
    )
    micro_batch_sizes: Annotated[list[PositiveCount], MinLen(1)] = Field(
        [2, 4, 6], description="Micro-batch sizes to choose from, in samples per GPU; must be given when enabled."
    )
    min_gpus: PositiveCount = Field(1, description="Smallest number of GPUs the job may run on.")
    max_gpus: PositiveCount = Field(10_000, description="Largest number of GPUs the job may run on.")
    min_time: Count = Field(0, description="Minutes that the job needs at least to be worth starting; informational.")
    prefer_larger_batch: bool = Field(True, description="Whether the larger of two equally good batch sizes is taken.")
    ignore_non_elastic_batch_info: bool = Field(
        False, description="Whether batch keys elsewhere in the config are ignored rather than refused."
    )
    version: Annotated[float, BeforeValidator(_version)] = Field(
        0.2, description="Version of the algorithm: 0.1, or 0.2 which knows model parallelism."
    )
    model_parallel_size: PositiveCount = Field(
        1, description="Number of ranks that hold one copy of the model; above 1 needs version 0.2."
    )
    num_gpus_per_node: PositiveCount = Field(
        1, description="Number of GPUs in a node; a multiple of model_parallel_size."
    )

    @model_validator(mode="after")
    def _rules(self) -> ElasticityConfig:
        if not self.enabled:
            return self
        problems = [
            f"{key} must be given when elasticity is enabled"
            for key in ("max_train_batch_size", "micro_batch_sizes")
            if key not in self.model_fields_set
        ]
        too_large = [size for size in self.micro_batch_sizes if size > self.max_train_batch_size]
        if too_large:
            problems.append(f"micro_batch_sizes {too_large} exceed max_train_batch_size ({self.max_train_batch_size})")
        if self.min_gpus > self.max_gpus:
            problems.append(f"min_gpus ({self.min_gpus}) exceeds max_gpus ({self.max_gpus})")
        if self.model_parallel_size > 1 and self.version < 0.2:
            problems.append(f"model_parallel_size {self.model_parallel_size} needs version 0.2, found {self.version}")
        if self.version >= 0.2 and self.num_gpus_per_node % self.model_parallel_size:
            problems.append(
                f"num_gpus_per_node ({self.num_gpus_per_node}) must be a multiple of model_parallel_size "
                f"({self.model_parallel_size})"
            )
        raise_together(problems)
        return self
