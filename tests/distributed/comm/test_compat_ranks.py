"""Old names that need several ranks: norms over a model that is cut, parts of tensors, a backend as an object."""

from __future__ import annotations

import math

import pytest
import torch
from deepspeed.comm.torch import TorchBackend
from torch import nn

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.runtime import utils
from tests.harness import ranks


class Mpu:
    """All ranks together hold one model."""

    def get_model_parallel_rank(self):
        return comm.get_rank()

    def get_model_parallel_group(self):
        return comm.get_world_group()


def cut_model(norm_type):
    """This rank's half of a matrix, a vector that both ranks have, and the norm of the whole gradient."""
    torch.manual_seed(0)
    whole, shared = torch.randn(4, 3), torch.randn(5)
    half, vector = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(5))
    half.grad, vector.grad = whole.chunk(2)[comm.get_rank()].clone(), shared.clone()
    half.tensor_model_parallel = True
    return half, vector, torch.linalg.vector_norm(torch.cat([whole.flatten(), shared]), norm_type)


@ranks(2)
@pytest.mark.parametrize("norm_type", [2, 1, math.inf])
def test_a_model_that_is_cut_has_one_norm(norm_type):
    half, vector, expected = cut_model(norm_type)
    before = half.grad.clone()
    norm = utils.clip_grad_norm_([half, vector], 0.5, norm_type=norm_type, mpu=Mpu())
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(half.grad, before * 0.5 / (expected + 1e-6))


@ranks(2)
def test_the_norm_of_tensors_is_that_of_all_ranks():
    mine = torch.tensor([3.0]) if comm.get_rank() == 0 else torch.tensor([4.0])
    assert float(utils.get_global_norm_of_tensors([mine], mpu=Mpu())) == 5
    assert float(utils.clip_tensors_by_global_norm([mine], max_norm=1.0, mpu=Mpu())) == 5
    assert float(mine) == pytest.approx([0.6, 0.8][comm.get_rank()], rel=1e-5)
    empty = [] if comm.get_rank() == 0 else [torch.tensor([2.0])]
    assert float(utils.get_global_norm_of_tensors(empty, mpu=Mpu())) == 2


@ranks(2)
def test_an_overflow_is_everybodys():
    param = nn.Parameter(torch.zeros(1))
    param.grad = torch.tensor([math.inf if comm.get_rank() == 0 else 1.0])
    assert utils.CheckOverflow([[param]], zero_reduce_scatter=True).check()
    assert utils.CheckOverflow([[param]], mpu=Mpu()).check()
    assert utils.CheckOverflow([[param]]).has_overflow([param], has_moe_params=True)
    alone = utils.CheckOverflow([[param]])  # gradients are equal on all ranks: nobody asks
    assert alone.check() == (comm.get_rank() == 0)
    assert utils.CheckOverflow(mpu=Mpu()).check_using_norm([-1.0 if comm.get_rank() == 1 else 1.0])


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
    other = torch.full((4,), -1.0)
    halves = list(other.chunk(2))
    halves[comm.get_rank()].fill_(comm.get_rank())
    utils.all_gather_into_tensor_dp_groups([other], [halves], [group])
    assert other.tolist() == [0, 0, 1, 1]


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
    assert backend.process_groups == [group]
