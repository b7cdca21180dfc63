"""Adagrad for parameters on the CPU; elsewhere torch.optim.Adagrad serves."""

from __future__ import annotations

from deepspeed.ops.adagrad.cpu_adagrad import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
