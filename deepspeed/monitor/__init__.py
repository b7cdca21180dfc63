"""Monitors: metrics written by rank 0 to TensorBoard, Weights & Biases, Comet and CSV files."""

from __future__ import annotations

from deepspeed.monitor.monitor import Monitor, MonitorMaster, MonitorSubscriber

__all__ = ["Monitor", "MonitorMaster", "MonitorSubscriber"]
