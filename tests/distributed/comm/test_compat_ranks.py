"""Names for scripts that need several ranks: parts of tensors, a backend as an object."""

from __future__ import annotations

import pytest
import torch
from deepspeed.comm.torch import TorchBackend

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.runtime import utils
from tests.harness import ranks


@ranks(3)
@pytest.mark.parametrize("shape", [(2, 5), (3,), (2,), (0, 4), ()])
def test_a_tensor_in_parts(shape):
    group = comm.get_world_group()
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    part = utils.PartitionedTensor(whole, group)
    assert torch.equal(part.full(), whole)
    assert part.full_size() == list(shape)
    assert part.data().numel() == part.local_size()[0]
    meta = part.to_meta()
    bounds = utils.partition_uniform(whole.numel(), 3)
    assert meta.tolist() == [len(shape), *shape, 3, comm.get_rank(), *bounds]
    again = utils.PartitionedTensor.from_meta(meta, part.data().clone(), group)
    assert torch.equal(again.full(), whole)


@ranks(2)
def test_a_part_that_does_not_fit_is_refused():
    group = comm.get_world_group()
    part = utils.PartitionedTensor(torch.ones(5), group)
    with pytest.raises(UsageError, match=r"has 7 elements of a tensor of shape \(5,\)"):
        utils.PartitionedTensor.from_meta(part.to_meta(), torch.ones(7), group)
    alone = [comm.new_group([rank]) for rank in range(2)][comm.get_rank()]
    with pytest.raises(UsageError, match="cut into 2 parts, but the group has 1 ranks"):
        utils.PartitionedTensor.from_meta(part.to_meta(), part.data(), alone)


@ranks(2)
@pytest.mark.parametrize("bucket", [1, 4, 100])
def test_parts_of_groups_are_gathered(bucket):
    group = comm.get_world_group()
    flat = torch.full((10,), -1.0)
    parts = list(flat.chunk(2))
    parts[comm.get_rank()].copy_(torch.arange(5.0) + 5 * comm.get_rank())
    utils.all_gather_dp_groups([flat], [parts], [group], start_alignment_factor=1, allgather_bucket_size=bucket)
    assert flat.tolist() == list(range(10))


@ranks(2)
def test_a_backend_as_an_object():
    backend = TorchBackend("gloo", None, None)
    assert backend.is_initialized()
    assert (backend.get_rank(), backend.world_size) == (comm.get_rank(), 2)
    tensor = torch.ones(2)
    backend.all_reduce(tensor)
    assert tensor.tolist() == [2, 2]
    group = backend.new_group([0, 1])
    out = torch.empty(4)
    backend.get_all_gather_function()(out, tensor, group=group)
    assert out.tolist() == [2] * 4
    assert not hasattr(backend, "process_groups")
