"""Over which ranks a model is constructed in shards: a group, an mpu."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed import zero
from deepspeed.errors import UsageError
from tests.harness import ranks
from tests.models import Tiny, batches
from tests.sharded_models import settings, whole


@ranks(4)
def test_the_ranks_of_a_group():
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    torch.manual_seed(rank)
    context = zero.Init(data_parallel_group=mine)
    with context:
        layer = nn.Linear(3, 3)
    assert layer.weight.ds_process_group is mine
    assert layer.weight.partition_numel() == 5
    torch.manual_seed(rank - rank % 2)
    assert torch.equal(whole(layer)["weight"], nn.Linear(3, 3).weight)
    with pytest.raises(UsageError, match=r"over the ranks .*same mpu"):
        deepspeed.initialize(model=layer, config=settings())


class Mpu:
    """Two data-parallel ranks beside two model-parallel ones."""

    def __init__(self):
        rank = dist.get_rank()
        data = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        model = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        self.data, self.model = data[rank % 2], model[rank // 2]

    def get_data_parallel_group(self):
        return self.data

    def get_data_parallel_world_size(self):
        return 2

    def get_data_parallel_rank(self):
        return dist.get_rank(self.data)

    def get_model_parallel_group(self):
        return self.model

    def get_model_parallel_world_size(self):
        return 2

    def get_model_parallel_rank(self):
        return dist.get_rank(self.model)


@ranks(4)
def test_the_ranks_of_an_mpu():
    mpu = Mpu()
    config = settings() | {"train_micro_batch_size_per_gpu": 6}
    torch.manual_seed(dist.get_rank() % 2)
    with zero.Init(config_dict_or_path=config, mpu=mpu):
        model = Tiny()
    assert model.up.weight.partition_numel() == model.up.weight.ds_numel // 2
    torch.manual_seed(dist.get_rank() % 2)
    assert torch.equal(whole(model)["up.weight"], Tiny().up.weight)
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
    loss = engine(*batches(1, 6)[0])
    engine.backward(loss)
    engine.step()
    assert engine.get_global_grad_norm() > 0
