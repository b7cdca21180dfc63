"""Elastic jobs: one batch size that fits many world sizes."""

from __future__ import annotations

from deepspeed.elasticity.elasticity import (
    compute_elastic_config,
    elasticity_enabled,
    ensure_immutable_elastic_config,
)
from deepspeed.errors import ElasticityConfigError, ElasticityError, ElasticityIncompatibleWorldSize

__all__ = [
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "compute_elastic_config",
    "elasticity_enabled",
    "ensure_immutable_elastic_config",
]
