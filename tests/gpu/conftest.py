"""Tests on a device run in one process, which `deepspeed.initialize` makes a world of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _end_world() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
