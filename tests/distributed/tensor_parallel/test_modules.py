"""Layers that a script makes of whole ones, against these: outputs, gradients, and what a rank holds."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers as hf
from deepspeed.module_inject import layers
from deepspeed.module_inject.auto_tp import AutoTP, AutoTPConfig, PartitionType, TPLayerSpec
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.sequence.cross_entropy import configure_vocab_parallel_loss
from deepspeed.sequence.linear_cross_entropy import vocab_parallel_linear_cross_entropy
from deepspeed.tensor_parallel import splits_of, whole_parameters
from tests.distributed.tensor_parallel.families import make, tokens
from tests.harness import ranks

WIDTH = 12


def linear(inputs=WIDTH, outputs=10, bias=True):
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias)


def conv1d(inputs=WIDTH, outputs=10):
    torch.manual_seed(0)
    return hf.pytorch_utils.Conv1D(outputs, inputs)


def given(width=WIDTH):
    return torch.randn(2, 3, width, generator=torch.Generator().manual_seed(1))


def held(module):
    """Each rank's interval of the split dim, in order."""
    return module.share.splits["weight"].parts[dist.get_rank()]


def part(whole, module, dim=-1):
    return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in held(module)], dim)


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def check(whole, made, *, split_input=False, split_output=False, x=None):
    """Output, gradients of the input and of all parameters, and the whole weights of all parts."""
    x = given() if x is None else x
    trains = x.is_floating_point()
    mine = (part(x, made) if split_input else x).clone().requires_grad_(trains)
    wanted_input = x.clone().requires_grad_(trains)
    wanted = whole(wanted_input)
    factor = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2))
    (wanted * factor).sum().backward()
    found = made(mine)
    close(found, part(wanted, made) if split_output else wanted)
    (found * (part(factor, made) if split_output else factor)).sum().backward()
    if trains:
        close(mine.grad, part(wanted_input.grad, made) if split_input else wanted_input.grad)
    for name, param in whole.named_parameters():
        split, mine = made.share.splits.get(name), dict(made.named_parameters())[name]
        close(mine.grad, param.grad if split is None else split.cut(param.grad, dist.get_rank()))
        close(whole_parameters(made).get(id(mine), mine.detach()), param.detach())


@ranks(3)
def test_linear_layers():
    world = dist.group.WORLD
    layers.configure_tensor_parallel_runtime(type("Config", (), {"tp_overlap_comm": False}))
    for overlap in (False, True):
        layers.configure_tensor_parallel_runtime(type("Config", (), {"tp_overlap_comm": overlap}))
        for bias in (True, False):  # 10 outputs and 13 inputs over 3 ranks do not come out even
            check(linear(bias=bias), layers.LinearLayer(linear(bias=bias), world), split_output=True)
            check(linear(bias=bias), layers.LinearLayer(linear(bias=bias), world, gather_output=True))
            wide = given(13)
            check(linear(13, bias=bias), layers.LinearAllreduce(linear(13, bias=bias), world), split_input=True, x=wide)
            for kind in (layers.LmHeadLinearAllreduce, layers.LinearAllreduceWithReplicatedInput):
                check(linear(13, bias=bias), kind(linear(13, bias=bias), world), x=wide)
    layers.configure_tensor_parallel_runtime(type("Config", (), {"tp_overlap_comm": False}))
    check(conv1d(), layers.conv_LinearLayer(conv1d(), world), split_output=True)
    check(conv1d(), layers.Conv_LinearALlreduce(conv1d(), world), split_input=True)
    alone = layers.LinearLayer(linear(), None)
    close(alone(given()), linear()(given()))
    close(
        layers.LinearLayer.from_weights(weight=linear().weight.data, bias=linear().bias.data)(given()), alone(given())
    )
    with pytest.raises(UsageError, match="unknown arguments strange"):
        layers.LinearLayer(linear(), world, strange=1)


@ranks(2)
def test_fused_parts():
    world, rank = dist.group.WORLD, dist.get_rank()
    check(linear(outputs=24), layers.SubParamLinearLayer(linear(outputs=24), world, (3, -1)), split_output=True)
    uneven = layers.SubParamLinearLayer(linear(outputs=24), world, ((16, 4, 4), -1))
    check(linear(outputs=24), uneven, split_output=True)
    assert held(uneven) == (((0, 8), (16, 18), (20, 22)), ((8, 16), (18, 20), (22, 24)))[rank]
    check(linear(), layers.SubParamLinearAllreduce(linear(), world, (-1, 2)), split_input=True)
    check(linear(), layers.GateUpPack_LinearLayer(linear(), world), split_output=True)
    with pytest.raises(UsageError, match="dim 0 of the weight has 24 elements, but shape"):
        layers.SubParamLinearLayer(linear(outputs=24), world, ((16, 4), -1))
    attention = hf.models.phi3.modeling_phi3.Phi3Attention(
        hf.Phi3Config(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0), 0
    )
    whole = copy.deepcopy(attention.qkv_proj)
    made = layers.fused_LinearLayer(attention.qkv_proj, world, fused_module=layers.FusedModuleWrapper(attention))
    check(whole, made, split_output=True, x=given(32))
    assert len(list(made.children())) == 0
    with pytest.raises(UsageError, match="no attention module around the layer tells its heads"):
        layers.fused_LinearLayer(linear(), world)


@ranks(2)
def test_embeddings_and_tied_heads():
    world = dist.group.WORLD

    def embedding():
        torch.manual_seed(0)
        return nn.Embedding(11, 8, padding_idx=3)

    ids = torch.tensor([[0, 3, 10], [5, 6, 7]])
    check(embedding(), layers.VocabParallelEmbedding(embedding(), world), x=ids)
    check(embedding(), layers.HiddenParallelEmbedding(embedding(), world), x=ids)
    for head_kind, kind in (
        (layers.VocabParallelLinear, layers.VocabParallelEmbedding),
        (layers.LmHeadLinearAllreduce, layers.HiddenParallelEmbedding),
    ):
        plain, given_head = embedding(), nn.Linear(8, 11, bias=False)
        given_head.weight = plain.weight
        head = head_kind(given_head, world)
        tied = kind(plain, world, head)
        assert tied.weight is head.weight
        close(tied(ids), embedding()(ids))
    with pytest.raises(UsageError, match="expected an Embedding"):
        layers.VocabParallelEmbedding(linear(), world)


@ranks(2)
def test_what_scripts_do_besides():
    """Gathering for a while, convolutions, patterns for converters, passages."""
    world, rank = dist.group.WORLD, dist.get_rank()
    model = nn.Sequential(layers.LinearLayer(linear(), world), layers.LinearAllreduce(linear(10, WIDTH), world))
    parts = [param.detach().clone() for param in model.parameters()]
    with layers.GatherReplacedLayerParams(model.parameters(), model):
        close(model[0].weight.data, linear().weight.data)
        model[1].weight.data += 1
    parts[2] += 1
    for found, wanted in zip(model.parameters(), parts, strict=True):
        close(found.detach(), wanted)
    model[0].gather_params([model[0].weight, None])
    assert model[0].weight.shape == (10, WIDTH)
    model[0].uneven_partition([model[0].weight])
    assert model[0].weight.shape == (5, WIDTH)
    info = layers.collect_autotp_universal_checkpoint_info(model)
    assert info["parameter_with_row_parallelism_patterns"] == [r"^1\.weight$"]
    assert info["tp_replicated_parameter_patterns"] == [r"^1\.bias$"]
    assert set(splits_of(model)) == {"0.weight", "0.bias", "1.weight"}

    torch.manual_seed(0)
    conv, image = nn.Conv2d(4, 6, 3, padding=1), torch.randn(1, 4, 5, 5)
    own = layers.TensorParallelOcShardConv2d(conv, rank, 2)(image)
    close(own, conv(image)[:, 3 * rank : 3 * rank + 3])
    close(layers.TensorParallelIcShardConv2d(conv, rank, 2)(image[:, 2 * rank : 2 * rank + 2]), conv(image))

    x = given().requires_grad_()
    sizes = (7, 5)
    mine = layers.ScatterToTensorParallelRegion.apply(world, x, sizes, rank)
    close(layers.GatherFromTensorParallelRegion.apply(world, mine, sizes), x)
    close(layers.RowParallel.apply(world, layers.ColumnParallel.apply(world, x), False), 2 * x)
    close(layers.AsyncColumnParallel.apply(world, x, linear().weight, linear().bias), linear()(x))
    close(layers.Normalize(WIDTH)(x), F.layer_norm(x, (WIDTH,)))
    close(layers.RMSNormalize(WIDTH)(x), F.rms_norm(x, (WIDTH,), eps=1e-5))
    rows = torch.randn(9, 4)
    close(layers.EmbeddingLayer(weight=rows)(torch.tensor([2, 8])), rows[[2, 8]])
    close(layers.OPTEmbedding(weight=rows)(torch.tensor([[0, 1, 1]]), 1), rows[None, [2, 3]])


@ranks(2)
def test_auto_tp_and_the_loss_of_a_split_head():
    world, rank = dist.group.WORLD, dist.get_rank()
    batch = tokens()
    for by_config in (False, True):
        model, plain = make("llama")
        policy = AutoTP.tp_parser(model)
        assert policy == [(type(model.model.layers[0]), ["self_attn.o_proj", "mlp.down_proj"])]
        assert AutoTP.supported(model)
        names = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
        specs = [
            TPLayerSpec(
                [rf".*{name}\.weight"], PartitionType.ROW if name in ("o_proj", "down_proj") else PartitionType.COLUMN
            )
            for name in ("o_proj", "down_proj", *names)
        ]
        config = AutoTPConfig(layer_specs=specs) if by_config else None
        split = AutoTP(model, policy[0][1], "", None, None, policy[0][0], partition_config=config)
        split.set_tensor_parallel_config(2, world)
        split.update_linear_policies()
        assert split._replace_module(model) is model
        assert model.model.layers[0].self_attn.q_proj.weight.shape == (16, 32)
        model.lm_head = layers.VocabParallelLinear(model.lm_head, world)
        configure_vocab_parallel_loss(model, model.lm_head)
        loss = model(input_ids=batch, labels=batch).loss
        wanted = plain(input_ids=batch, labels=batch).loss
        close(loss, wanted)
        loss.backward()
        wanted.backward()
        close(model.model.embed_tokens.weight.grad, plain.model.embed_tokens.weight.grad)
        down = plain.model.layers[1].mlp.down_proj.weight.grad[:, 24 * rank : 24 * rank + 24]
        close(model.model.layers[1].mlp.down_proj.weight.grad, down)
    with pytest.raises(UsageError, match="neither a plan nor the names"):
        AutoTP.tp_parser(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(UsageError, match="Sequential has no loss_function"):
        configure_vocab_parallel_loss(nn.Sequential(), model.lm_head)


@ranks(2)
def test_an_output_layer_and_its_loss_in_one():
    """What is whole and what is summed is as DeepSpeed 0.19.8 was seen to do it over two gloo ranks."""
    world, rank = dist.group.WORLD, dist.get_rank()
    whole = linear(outputs=10)
    target = torch.tensor([[1, 9, -100], [0, 4, 7]])
    for reduction, chunk in (("mean", None), ("sum", 4), ("none", 1), ("mean", 2)):
        x, mine = given().requires_grad_(), given().requires_grad_()
        wanted = F.cross_entropy(whole(x).flatten(0, 1), target.flatten(), reduction=reduction)
        rows = slice(5 * rank, 5 * rank + 5)
        weight, bias = (param.detach()[rows].clone().requires_grad_() for param in (whole.weight, whole.bias))
        found = vocab_parallel_linear_cross_entropy(
            mine, weight, target, bias, world, reduction=reduction, chunk_size=chunk
        )
        close(found.flatten(), wanted.flatten())
        grads = torch.autograd.grad(wanted.sum(), [x, whole.weight, whole.bias])
        found.sum().backward()
        for left, right in zip(
            (mine.grad, weight.grad, bias.grad), (grads[0], *(g[rows] for g in grads[1:])), strict=True
        ):
            close(left, right)
    with pytest.raises(UsageError, match="chunk_size is 0"):
        vocab_parallel_linear_cross_entropy(mine, weight, target, chunk_size=0)
    with pytest.raises(UsageError, match="give each token a target"):
        vocab_parallel_linear_cross_entropy(mine, weight, target[0])
