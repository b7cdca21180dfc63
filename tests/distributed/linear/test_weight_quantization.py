"""`weight_quantization`: frozen weights that rest in few bits at any stage, made by `zero.Init` or by the engine."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.comm.codec import group_codec
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.utils import safe_get_full_grad
from deepspeed.zero import GatheredParameters
from deepspeed.zero.parameters.shard import shard_of
from tests.closeness import Training, assert_same_training
from tests.covering import pairs
from tests.harness import shared_ranks

WIDTH, STEPS = 64, 3


class Net(nn.Module):
    """A frozen body, and a head that is trained."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, ids):
        return self.head(torch.tanh(self.body(self.embed(ids)))).float().square().mean()


def rounded(weight, bits, group, *, symmetric, dim=1):
    """What is left of a weight whose groups lie along `dim`."""
    flat = (weight if dim == 1 else weight.t()).detach().reshape(1, -1).contiguous()
    codec = group_codec(bits, group, symmetric=symmetric)
    found = codec.decode(codec.encode(flat), torch.empty_like(flat))
    return found.view_as(weight) if dim == 1 else found.view(weight.shape[::-1]).t()


def batch(step):
    return torch.randint(0, 16, (4, 8), generator=torch.Generator().manual_seed(step))


def plain_training(**groups):
    """Of one rank, with frozen weights that were rounded."""
    torch.manual_seed(0)
    model = Net()
    for layer in (model.embed, model.body):
        layer.weight.data = rounded(layer.weight.data, **groups).contiguous()
        layer.weight.requires_grad_(False)
    before = {name: param.detach().clone() for name, param in model.named_parameters() if param.requires_grad}
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Training(before, {name: dict(model.named_parameters())[name].detach().clone() for name in before}, losses)


def config(stage, offload=None, **section):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 100}
    if offload is not None:
        zero["offload_param"] = {"device": offload}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
        "weight_quantization": section,
    }


def train(engine):
    losses, rank = [], dist.get_rank()
    for step in range(STEPS):
        loss = engine(batch(step)[2 * rank : 2 * rank + 2])
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / 2)
    return losses


def whole(model, names):
    named = {name: param for name, param in model.named_parameters() if name in names}
    with GatheredParameters(list(named.values())):
        return {name: param.detach().clone() for name, param in named.items()}


@shared_ranks(2)
def test_the_engine_quantises_at_every_stage(tmp_path):
    """The same training as with rounded weights; a checkpoint has the codes, and the optimizer knows the parameter."""
    for stage, bits, (symmetric, dim) in pairs((0, 1, 2, 3), (8, 4), ((False, 1), (True, 1), (False, 0))):
        expected = plain_training(bits=bits, group=16, symmetric=symmetric, dim=dim)
        groups = {"num_bits": bits, "group_size": 16, "group_dim": dim, "symmetric": symmetric}
        torch.manual_seed(0)
        model = Net()
        wanted = config(stage, post_init_quant={"embed": groups, "body": groups})
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=wanted)[0]
        nbytes = group_codec(bits, 16, symmetric=symmetric).nbytes(WIDTH * WIDTH)
        shard = shard_of(model.body.weight)
        assert (model.body.weight.nbytes if shard is None else 2 * shard.stored.nbytes) == nbytes
        losses = train(engine)
        found = Training(expected.before, whole(model, expected.before), losses)
        assert_same_training(found, expected)
        if (stage, bits) in ((0, 8), (3, 8)):
            engine.save_checkpoint(str(tmp_path / str(stage)))
            body = whole(model, ["body.weight"])["body.weight"]
            other = deepspeed.initialize(model=Net(), config=wanted)[0]
            other.load_checkpoint(str(tmp_path / str(stage)))
            assert torch.equal(whole(other.module, ["body.weight"])["body.weight"], body)
            other.destroy()
        engine.destroy()


@shared_ranks(2)
def test_ranks_that_split_quantised_layers():
    """An embedding by its tokens, layers by outputs and by inputs; of a model that is built in shards, too."""
    for stage, symmetric, built in ((1, False, nullcontext), (3, True, nullcontext), (3, False, deepspeed.zero.Init)):
        groups = {"num_bits": 4, "group_size": 8, "symmetric": symmetric}
        kinds = {"body": "column", "out": "row"}
        wanted = config(stage, post_init_quant={"embed": groups, "body": groups, "out": groups})
        specs = [{"patterns": [f".*{name}.weight"], "partition_type": kind} for name, kind in kinds.items()]
        split = {"vocab_parallel_embedding": True, "partition_config": {"layer_specs": specs}}
        torch.manual_seed(0)
        plain = Longer()
        for layer in (plain.embed, plain.body, plain.out):
            layer.weight.data = rounded(layer.weight.data, bits=4, group=8, symmetric=symmetric)
        expected = plain(batch(0))
        expected.backward()
        torch.manual_seed(0)
        with built():
            model = Longer()
        engine = deepspeed.initialize(model=model, config={**wanted, "tensor_parallel": {"autotp_size": 2, **split}})[0]
        assert (model.body.out_features, model.out.in_features, model.embed.num_embeddings) == (32, 32, 8)
        loss = engine(batch(0))
        torch.testing.assert_close(loss, expected)
        engine.backward(loss)
        grad = safe_get_full_grad(model.body.bias)
        torch.testing.assert_close(grad, plain.body.bias.grad.chunk(2)[dist.get_rank()])
        engine.load_module_state_dict(plain.state_dict())
        torch.testing.assert_close(engine(batch(0)), expected)
        engine.destroy()


class Longer(Net):
    """With a layer behind the body's, for ranks that share both."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids):
        return self.head(self.out(torch.tanh(self.body(self.embed(ids))))).float().square().mean()

    def get_input_embeddings(self):
        return self.embed


@shared_ranks(1, 2)
def test_zero_init_quantises():
    """Shards rest and travel as codes from birth on, where the chunks live; what is loaded later is encoded, too."""
    world = dist.get_world_size()
    for offload, bits, symmetric in ((None, 4, False), ("cpu", 8, False), (None, 8, True)):
        groups = {"num_bits": bits, "group_size": 16, "symmetric": symmetric}
        wanted = config(3, offload, quantized_initialization=groups)
        torch.manual_seed(0)
        with deepspeed.zero.Init(config_dict_or_path=wanted):
            model = Net()
        codec = group_codec(bits, 16, symmetric=symmetric)
        shard = shard_of(model.body.weight)
        assert shard.stored.nbytes == codec.nbytes(WIDTH * WIDTH // world)
        assert not model.embed.weight.requires_grad
        assert model.body.bias.requires_grad
        value = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
        with GatheredParameters(model.body.weight, modifier_rank=0):
            model.body.weight.data.copy_(value)
        engine = deepspeed.initialize(model=model, config=wanted)[0]
        found = whole(model, ["body.weight"])["body.weight"]
        kept = {"bits": bits, "group": 16, "symmetric": symmetric}
        torch.testing.assert_close(found, rounded(value, **kept), rtol=0, atol=0)
        assert shard_of(model.body.weight).stored.dtype is torch.uint8
        bias = whole(model, ["body.bias"])["body.bias"]
        first = engine(batch(0))
        plain = Net()
        plain.load_state_dict({**plain.state_dict(), **whole(model, dict(plain.named_parameters()))})
        torch.testing.assert_close(first, plain(batch(0)))
        engine.backward(first)
        engine.step()
        assert not torch.equal(whole(model, ["body.bias"])["body.bias"], bias)
        assert torch.equal(whole(model, ["body.weight"])["body.weight"], found)
        engine.destroy()


@shared_ranks(1)
def test_what_does_not_fit():
    groups = {"num_bits": 8, "group_size": 16}

    def refused(message, section, model=None, stage=1):
        with pytest.raises(DeepSpeedConfigError, match=message):
            deepspeed.initialize(model=model or Net(), config=config(stage, **section))

    refused(r"post_init_quant.boddy: it finds no linear layer .* here: body", {"post_init_quant": {"boddy": groups}})
    refused(r"post_init_quant.body: body matches 'bod', too", {"post_init_quant": {"body": groups, "bod": groups}})
    refused(
        r"post_init_quant.body: group_size 48 does not divide dim 1 of body \(64, 64\); use one that divides 64",
        {"post_init_quant": {"body": {**groups, "group_size": 48}}},
    )
    tied = Net()
    tied.more = nn.Embedding(64, 64)
    tied.more.weight = tied.body.weight
    refused(r"the weight of body is that of another module", {"post_init_quant": {"body": groups}}, tied)
    limited = Net()
    limited.embed.max_norm = 1.0
    refused(r"embed is a Embedding that computes in its own way", {"post_init_quant": {"embed": groups}}, limited)
    refused(r"no weight of the model rests as codes", {"quantized_initialization": groups}, stage=3)
    wide = config(3, quantized_initialization={**groups, "group_size": 48})
    with (
        pytest.raises(DeepSpeedConfigError, match=r"group_size: 48 does not divide dim 1 of Embedding.weight \(16, 64"),
        deepspeed.zero.Init(config_dict_or_path=wide),
    ):
        Net()
