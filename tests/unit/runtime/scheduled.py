"""Optimizers for tests of schedules, and what these set."""

from __future__ import annotations

import torch


def adam(*lrs, **options):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs or (1.0,)]
    return torch.optim.Adam(groups, **options)


def lrs_of(optimizer):
    return [group["lr"] for group in optimizer.param_groups]
