"""States that live away from the device train as those on it: every stage against plain PyTorch."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import pytest
import torch.distributed as dist

from deepspeed.zero.states.tiles import StepTiling
from tests.closeness import assert_same_training
from tests.covering import triples
from tests.distributed.zero.test_zero_parity import DTYPES, train, train_plainly
from tests.harness import shared_ranks

CPU = {"offload_optimizer": {"device": "cpu"}}


STAGES = (0, 1, 2, 3)
WINDOWS = ((1, 0.0), (1, 0.3), (3, 0.0), (3, 0.3))  # accumulation and clipping
OF_OPTIMIZERS = triples((1, 3), STAGES, list(DTYPES), ("cpu", "nvme"), WINDOWS)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("precision", list(DTYPES))
@shared_ranks(1, 3)
def test_optimizer_states_in_host_memory_and_on_the_disk(precision, device, tmp_path):
    offload = dict(CPU)
    if device == "nvme":
        offload = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}, "sub_group_size": 50}
    for world, stage, kind, where, (accumulation, clip) in OF_OPTIMIZERS:
        if (world, kind, where) == (dist.get_world_size(), precision, device):
            plain = train_plainly(precision, accumulation=accumulation, clip=clip)
            assert_same_training(train(stage, precision, accumulation=accumulation, clip=clip, **offload), plain)
    assert not list(tmp_path.iterdir())


@contextmanager
def late_updates():
    """Steps of the host go on while the caller does, as on a device."""
    of = StepTiling.of.__func__
    with mock.patch.object(
        StepTiling, "of", classmethod(lambda cls, *args, **kwargs: of(cls, *args, **{**kwargs, "late": True}))
    ):
        yield


@pytest.mark.parametrize("clip", [0.0, 0.3])
@pytest.mark.parametrize("accumulation", [1, 3])
@shared_ranks(1, 2)
def test_updates_that_are_late(accumulation, clip, tmp_path):
    plain = train_plainly("bf16", accumulation=accumulation, clip=clip)
    memory, disk = {"device": "cpu"}, {"device": "nvme", "nvme_path": str(tmp_path)}
    tried = [(stage, {"offload_optimizer": where}) for stage in (0, 1, 2, 3) for where in (memory, disk)]
    tried += [(3, {"offload_optimizer": where, "offload_param": where}) for where in (memory, disk)]
    with late_updates():
        for stage, zero in tried:
            mine = train(stage, "bf16", accumulation=accumulation, clip=clip, sub_group_size=50, **zero)
            assert_same_training(mine, plain)


@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("precision", list(DTYPES))
@shared_ranks(1, 3)
def test_parameters_in_host_memory(precision, accumulation, optimizer):
    plain = train_plainly(precision, accumulation=accumulation, clip=0.3)
    offload = {"offload_param": {"device": "cpu"}, **(CPU if optimizer else {})}
    assert_same_training(train(3, precision, accumulation=accumulation, clip=0.3, **offload), plain)


@pytest.mark.parametrize("optimizer", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("precision", list(DTYPES))
@shared_ranks(1, 3)
def test_parameters_on_the_disk(precision, optimizer, tmp_path):
    plain = train_plainly(precision, accumulation=2, clip=0.3)
    offload = {
        "offload_param": {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 100},
        "offload_optimizer": {"device": optimizer, "nvme_path": str(tmp_path)},
    }
    assert_same_training(train(3, precision, accumulation=2, clip=0.3, **offload), plain)
    assert not list(tmp_path.iterdir())
