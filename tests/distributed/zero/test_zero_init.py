"""Models that are constructed in shards: the same values, nothing left behind."""

from __future__ import annotations

import copy
import gc
import json
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed import zero
from deepspeed.zero.parameters.parameter import SpreadParameter
from deepspeed.zero.parameters.shard import shard_of
from tests.harness import shared_ranks
from tests.models import Tiny, batches, make, share
from tests.sharded_models import settings, whole


class Block(nn.Module):
    """What constructors do to layers that they have made already."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.attention = nn.MultiheadAttention(4, 2)  # writes zeros into the bias of a layer it made
        self.norm = nn.BatchNorm1d(5)
        nn.init.xavier_uniform_(self.first.weight)  # reads the shape
        self.first.bias.data.fill_(0.25)
        with torch.no_grad():
            self.first.weight[0] = 3.0
            self.norm.weight.mul_(2.0)
        self.width = self.first.weight.shape[1] + self.first.weight.size(0) + len(self.first.weight)
        self.second = nn.Parameter(torch.empty(7))
        nn.init.normal_(self.second)
        self.apply(self.scale)
        self.table = nn.Buffer(torch.linspace(0, 1, 3))

    @staticmethod
    def scale(module):
        if isinstance(module, nn.Linear):
            module.weight.data.mul_(0.5)


@shared_ranks(1, 3)
def test_initialisers_give_the_values_of_the_plain_model():
    plain = make(Block)
    torch.manual_seed(dist.get_rank() * 100)  # the values of rank 0 count
    with zero.Init():
        model = Block()
    assert model.width == plain.width == 6 + 5 + 5
    assert all(param.numel() == 0 and param.shape == (0,) for param in model.parameters())
    for (name, mine), theirs in zip(whole(model).items(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    assert torch.equal(model.table, plain.table)
    assert torch.equal(model.norm.running_var, plain.norm.running_var)


@shared_ranks(1, 3)
def test_what_parameters_show():
    with zero.Init():
        layer = nn.Linear(5, 3)
    world, param = dist.get_world_size(), layer.weight
    param._is_hf_initialized = True
    assert isinstance(param, nn.Parameter)
    assert {param: 1}[layer.weight] == 1
    assert layer.weight._is_hf_initialized
    assert (param.numel(), param.shape, param.ds_shape, param.ds_numel) == (0, (0,), (3, 5), 15)
    assert param.ds_status == zero.ZeroParamStatus.NOT_AVAILABLE
    assert param.ds_tensor.numel() == param.partition_numel() == param.ds_tensor.ds_numel == math.ceil(15 / world)
    assert param.padding_size() == math.ceil(15 / world) * world - 15
    assert param.ds_id != layer.bias.ds_id
    assert param.ds_param_type == zero.ZeroParamType.PARTITIONED
    assert param.ds_summary()["ds_shape"] == (3, 5)
    assert layer.state_dict().keys() == {"weight", "bias"}

    param.all_gather()
    assert param.ds_status == zero.ZeroParamStatus.AVAILABLE
    assert param.shape == (3, 5)
    param.data.fill_(4.0)
    param.partition(has_been_updated=True)
    assert param.numel() == 0
    handle = param.all_gather([param, layer.bias], async_op=True)
    handle.wait()
    assert torch.equal(param, torch.full((3, 5), 4.0))
    assert layer.bias.shape == (3,)
    param.partition([param, layer.bias])
    assert param.numel() == layer.bias.numel() == 0

    fresh = nn.Parameter(torch.tensor([2.5]))
    param.convert_to_zero_parameters([fresh])
    assert fresh.numel() == 0
    assert fresh.item() == 2.5
    assert fresh.numel() == 0


@shared_ranks(2)
def test_a_submodule_is_sharded_before_the_next_one_is_made():
    """The most that is whole at any moment is one layer, so that the model may be larger than a rank's memory."""
    peak, kinds = [], (nn.Parameter, SpreadParameter)

    class Watched(nn.Linear):
        def __init__(self):
            super().__init__(64, 64)
            gc.collect()
            with torch._C.DisableTorchFunction():  # to constructors parameters have their whole shape
                tensors = [each for each in gc.get_objects() if type(each) in kinds]
                peak.append(sum(each.numel() for each in tensors if each.numel() in (64, 64 * 64)))

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Watched() for _ in range(6))

    with zero.Init():
        model = Deep()
    assert max(peak) == 64 * 65
    assert all(param.numel() == 0 for param in model.parameters())


@shared_ranks(2)
def test_only_the_outermost_constructor_counts():
    seen = []

    class Base(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    with zero.Init():

        class Derived(Base):
            def __init__(self):
                super().__init__()
                seen.append(shard_of(self.weight))
                self.other = nn.Parameter(self.weight.detach() * 2)

        module = Derived()
    assert seen == [None]
    assert shard_of(module.weight) is not None
    assert torch.equal(whole(module)["other"], torch.full((4,), 2.0))
    assert Derived().weight.numel() == 4, "after the context classes are as they were"


@shared_ranks(1, 2)
def test_an_exception_undoes_everything():
    class Late(nn.Module):
        def __init__(self, fail):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.layer.weight.data.zero_()
            if fail:
                raise KeyError("late")

    before = {kind: kind.__dict__["__init__"] for kind in (nn.Linear, Late, nn.Embedding)}
    apply, empty = nn.Module.apply, torch.empty
    context = zero.Init()
    with pytest.raises(KeyError, match="late"), context:
        Late(fail=True)
    assert {kind: kind.__dict__["__init__"] for kind in before} == before
    assert nn.Module.apply is apply
    assert torch.empty is empty
    assert "__init_subclass__" not in nn.Module.__dict__
    assert nn.Linear(2, 2).weight.shape == (2, 2)
    with context:
        again = Late(fail=False)
    assert not whole(again)["layer.weight"].any()


@shared_ranks(2)
def test_nested_decorator_module_and_disabled():
    @zero.Init(dtype=torch.bfloat16)
    def build(size):
        return nn.Linear(size, size)

    assert build(3).weight.ds_shape == (3, 3)
    assert build(4).weight.dtype == torch.bfloat16
    with zero.Init():
        outer = nn.Linear(2, 2)
        with zero.Init(dtype=torch.float16):
            inner = nn.Linear(2, 2)
        last = nn.Linear(2, 2)
    assert [each.weight.dtype for each in (outer, inner, last)] == [torch.float32, torch.float16, torch.float32]
    assert {each.weight.numel() for each in (outer, inner, last)} == {0}

    with zero.Init(enabled=False, remote_device="nvme"):
        assert nn.Linear(2, 2).weight.shape == (2, 2)

    torch.manual_seed(dist.get_rank())
    model = Tiny()
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    for tensor in expected.values():
        dist.broadcast(tensor, 0)
    zero.Init(module=model)
    assert all(param.numel() == 0 for param in model.parameters())
    assert all(torch.equal(param, expected[name]) for name, param in whole(model).items())


@pytest.mark.parametrize("kind", ["dict", "path"])
@shared_ranks(2)
def test_an_unfinished_config(kind, tmp_path):
    """As clients hand it over before they have resolved it."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "fp16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    }
    source = config
    if kind == "path":
        source = tmp_path / f"{dist.get_rank()}.json"
        source.write_text(json.dumps(config))
    with zero.Init(config_dict_or_path=source):
        layer = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert layer[0].weight.dtype == torch.bfloat16
    assert layer[1].weight.dtype == torch.float32, "as the engine would have it beside fp32 statistics"


@shared_ranks(2)
def test_containers_and_parametrised_layers():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.items = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(2, 2))])
            self.items.append(nn.Parameter(torch.full((5,), 2.0)))
            self.named = nn.ParameterDict({"a": nn.Parameter(torch.ones(4))})
            self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 3, 2))
            self.lazy = nn.LazyLinear(2)
            self.legacy = nn.Parameter(torch.Tensor(2, 3).fill_(7.0))
            self.none = nn.Parameter(torch.empty(0, 4))
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2)
            for param in self.items:
                param.data.add_(1.0)

    plain = make(Mixed)
    torch.manual_seed(0)
    with zero.Init():
        model = Mixed()
    assert model.lazy.weight.__class__ is nn.UninitializedParameter
    del model.lazy, plain.lazy
    theirs = dict(plain.named_parameters())
    assert all(shard_of(param) is not None for param in model.parameters())
    for name, mine in whole(model).items():
        assert torch.equal(mine, theirs[name]), name


@shared_ranks(1, 2)
def test_a_deep_copy_has_shards_of_its_own():
    with zero.Init():
        model = make()
    values = whole(model)
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embedding.weight
    assert twin.up.weight is not model.up.weight
    assert twin.up.weight.numel() == 0
    assert twin.up.weight.ds_shape == (24, 8)
    with zero.GatheredParameters(model.parameters(), modifier_rank=0):
        model.up.weight.data.zero_()
        ordinary = copy.deepcopy(model.down)
    assert all(torch.equal(param, values[name]) for name, param in whole(twin).items())
    assert type(ordinary.weight) is nn.Parameter
    assert torch.equal(ordinary.weight, values["down.weight"])

    config = settings(stage3_param_persistence_threshold=30)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    copied = copy.deepcopy(engine.module)
    assert copied.up.weight.ds_shape == (24, 8)
    losses = [engine(*share(batches(1, 12)[0], dist.get_rank(), dist.get_world_size())) for _ in range(2)]
    assert losses[0].item() == losses[1].item()
    second, *_ = deepspeed.initialize(model=copied, config=config)
    assert second(*share(batches(1, 12)[0], dist.get_rank(), dist.get_world_size())).item() == losses[0].item()


@shared_ranks(2)
def test_edits_in_the_body_of_the_context_are_kept():
    with zero.Init():
        layer = nn.Linear(2, 2)
        nn.init.constant_(layer.weight, 3.0)
        layer.apply(lambda module: module.bias.data.fill_(module.weight.shape[0]))
        assert layer.weight.numel() == 0
    assert torch.equal(whole(layer)["weight"], torch.full((2, 2), 3.0))
    assert torch.equal(whole(layer)["bias"], torch.full((2,), 2.0))


@shared_ranks(2)
def test_apply_may_be_left_alone():
    with zero.Init(config_dict_or_path={"zero_optimization": {"stage": 3, "override_module_apply": False}}):
        assert nn.Module.apply.__module__ == "torch.nn.modules.module"
