"""Domino's layers against the same computation in one piece by plain PyTorch: outputs, gradients, order of events."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.domino import transformer as domino
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.errors import LayoutError, UsageError
from deepspeed.parallel import LayoutMpu, ParallelLayout
from tests.distributed.tensor_parallel.test_overlap import Story
from tests.harness import shared_ranks

LENGTH, HIDDEN, HEADS, DIM, INNER, LAYERS = 5, 16, 4, 4, 24, 2


def settings(**options):
    """A config in Megatron's words."""
    given = {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "ffn_hidden_size": INNER,
        "num_layers": LAYERS,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "init_method": nn.init.xavier_normal_,
        "output_layer_init_method": nn.init.xavier_uniform_,
    }
    return SimpleNamespace(**{**given, **options})


LLAMA = {"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False, "num_query_groups": 2}


def rotate(x, angles):
    """[sequence, batch, heads, dim], by [sequence, 1, 1, dim]."""
    one, two = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-two, one], -1) * angles.sin()


def made(ranks_, config, **options):
    torch.manual_seed(3)
    mpu = LayoutMpu(ParallelLayout.build(tp=ranks_))
    model = domino.DominoTransformer(config, mpu, rotate, domino.ModelType.encoder_or_decoder, **options)
    for norm in (each for each in model.modules() if "Norm" in type(each).__name__):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            nn.init.uniform_(param, -1, 1)
    return model, mpu


def whole_of(model, config):
    """Whole weights by name: rows of column layers and columns of row layers, put together."""
    found = {}
    for name, param in model.named_parameters():
        parts = [torch.empty_like(param) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, param.detach().contiguous())
        if name.endswith(("query_key_value.weight", "query_key_value.bias", "fc1.weight", "fc1.bias")):
            if getattr(config, "swiglu", False) and "fc1" in name:
                parts = [half for at in (0, 1) for half in (part.chunk(2)[at] for part in parts)]
            found[name] = torch.cat(parts)
        elif name.endswith(("dense.weight", "fc2.weight")):
            found[name] = torch.cat(parts, 1)
        else:
            assert all(torch.equal(part, parts[0]) for part in parts), f"{name} differs between ranks"
            found[name] = parts[0]
    return {name: value.requires_grad_() for name, value in found.items()}


def plain(weights, config, x, mask=None, angles=None):
    """What the model computes, written down once more for one process."""
    gated = getattr(config, "swiglu", False)
    groups = getattr(config, "num_query_groups", HEADS)

    def norm(name, value):
        if gated:
            return F.rms_norm(value, (HIDDEN,), weights[f"{name}.weight"], 1e-5)
        return F.layer_norm(value, (HIDDEN,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

    def linear(name, value):
        return F.linear(value, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    length, batch = x.shape[:2]
    seen = torch.ones(length, length).tril().bool()
    seen = seen if mask is None else seen & ~mask
    for at in range(LAYERS):
        layer = f"layers.{at}"
        normed = norm(f"{layer}.input_layernorm", x)
        mixed = linear(f"{layer}.self_attention.query_key_value", normed).view(length, batch, groups, -1, DIM)
        query, key, value = mixed[..., :-2, :].flatten(2, 3), mixed[..., -2, :], mixed[..., -1, :]
        if angles is not None:
            query, key = rotate(query, angles), rotate(key, angles)
        key, value = (each.repeat_interleave(HEADS // groups, 2) for each in (key, value))
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) / DIM**0.5
        scores = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out = torch.einsum("bhqk,kbhd->qbhd", scores, value).flatten(2)
        residual = getattr(config, "apply_residual_connection_post_layernorm", False)
        x = (normed if residual else x) + linear(f"{layer}.self_attention.dense", out)
        normed = norm(f"{layer}.post_attention_layernorm", x)
        wide = linear(f"{layer}.linear_fc1", normed)
        wide = F.silu(wide.chunk(2, -1)[0]) * wide.chunk(2, -1)[1] if gated else F.gelu(wide)
        x = (normed if residual else x) + linear(f"{layer}.linear_fc2", wide)
    return norm("final_layernorm", x) if "final_layernorm.weight" in weights else x


def part_of(name, grad, config, rank, ranks_):
    """This rank's part of a whole gradient."""
    if name.endswith(("dense.weight", "fc2.weight")):
        return grad.chunk(ranks_, 1)[rank]
    if "query_key_value" not in name and "fc1" not in name:
        return grad
    if getattr(config, "swiglu", False) and "fc1" in name:
        return torch.cat([half.chunk(ranks_)[rank] for half in grad.chunk(2)])
    return grad.chunk(ranks_)[rank]


def numbers(batch):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(LENGTH, batch, HIDDEN, generator=generator), torch.randn(
        LENGTH, batch, HIDDEN, generator=generator
    )


CASES = [
    # config, batch, masked, rotary, how it is called
    ({}, 2, False, False, "forward"),
    ({}, 3, True, False, "intra_layer_overlap_forward"),
    ({"apply_residual_connection_post_layernorm": True}, 1, False, True, "inter_layer_overlap_forward"),
    (LLAMA, 4, True, True, "forward"),
    (LLAMA, 2, False, True, "intra_layer_overlap_forward"),
    (LLAMA, 2, False, True, "checkpointed"),
]


@shared_ranks(1, 2)
def test_outputs_and_gradients():
    rank, size = dist.get_rank(), dist.get_world_size()
    angles = torch.arange(LENGTH * DIM // 2).float().view(LENGTH, 1, 1, -1).repeat(1, 1, 1, 2) / 9
    for options, batch, masked, turned, way in CASES:
        config = settings(**options)
        model, _ = made(size, config)
        weights = whole_of(model, config)
        x, flow = numbers(batch)
        mask = None
        if masked:  # the first sample sees less
            mask = torch.zeros(batch, 1, LENGTH, LENGTH, dtype=torch.bool)
            mask[0, :, 2:, 1] = True
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        rotary = angles if turned else None
        if way == "checkpointed":
            found = checkpoint(model, mine, mask, rotary, use_reentrant=False)
        else:
            found = getattr(model, way)(mine, mask, rotary)
        wanted = plain(weights, config, theirs, mask, rotary)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        found.backward(flow)
        wanted.backward(flow)
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-5)
        for name, param in model.named_parameters():
            expected = part_of(name, weights[name].grad, config, rank, size)
            torch.testing.assert_close(
                param.grad, expected, atol=2e-5, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
            )


@shared_ranks(2)
def test_sums_run_beside_products():
    """Forward: between begin and end of a half's sum lies the other half; backward: the product for a weight."""
    model, _ = made(2, settings())
    x, flow = numbers(2)
    with pytest.MonkeyPatch.context() as patch, Story() as story:
        patch.setattr(domino.comm, "all_reduce", story.all_reduce)
        found = model(x.requires_grad_(), None)
        forward = list(story.told)
        story.told.clear()
        found.backward(flow)
    assert forward.count("begin") == forward.count("end") == 2 * 2 * LAYERS
    flying, alone = 0, 0
    for at, word in enumerate(forward):
        flying += {"begin": 1, "end": -1}.get(word, 0)
        if word == "end":
            since = at - forward[:at][::-1].index("begin")
            alone += flying == 0 and "product" not in forward[since:at]
    assert alone <= 1, f"only the last sum has nothing beside it: {forward}"
    assert story.told.count("begin") == story.told.count("end") == 2 * 2 * LAYERS
    begins = [at for at, word in enumerate(story.told) if word == "begin"]
    assert all(story.told[at + 1 : at + 3] == ["product", "end"] for at in begins), story.told


@shared_ranks(4)
def test_an_engine_trains_it():
    """tp 2 × dp 2 with clipping: losses, norms and weights of plain PyTorch; a checkpoint restores them."""
    config = settings()
    layout = ParallelLayout.build(tp=2)
    mpu = LayoutMpu(layout)
    torch.manual_seed(3)
    model = domino.DominoTransformer(config, mpu, None, domino.ModelType.encoder_or_decoder)

    def whole(values):
        parts = [None] * 2
        dist.all_gather_object(parts, values, group=layout["tp"].group)
        joined = {}
        for name, value in values.items():
            dim = {True: 1}.get(name.endswith(("dense.weight", "fc2.weight")))
            dim = 0 if dim is None and ("query_key_value" in name or "fc1" in name) else dim
            joined[name] = value if dim is None else torch.cat([part[name] for part in parts], dim)
        return joined

    def held():
        return {name: param.detach().clone() for name, param in model.named_parameters()}

    weights = {name: value.requires_grad_() for name, value in whole(held()).items()}
    optimizer = torch.optim.SGD(weights.values(), lr=0.1, momentum=0.9)
    for stage in (0, 1):
        section = {"stage": stage}
        sections = {"zero_optimization": section, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.1}
        options = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
        engine, *_ = deepspeed.initialize(
            model=model, mpu=mpu, config={"train_micro_batch_size_per_gpu": 2, "optimizer": options, **sections}
        )
        optimizer.state.clear()
        for step in range(3):
            batch = torch.randn(LENGTH, 4, HIDDEN, generator=torch.Generator().manual_seed(step))
            mine = batch.chunk(2, 1)[layout["dp"].rank]
            loss = engine(mine, None).square().mean()
            engine.backward(loss)
            engine.step()
            optimizer.zero_grad()
            for part in batch.chunk(2, 1):
                (plain(weights, config, part).square().mean() / 2).backward()
            norm = nn.utils.clip_grad_norm_(weights.values(), 0.1)
            optimizer.step()
            assert float(engine.get_global_grad_norm()) == pytest.approx(float(norm), rel=1e-4), (stage, step)
        for name, value in whole(held()).items():
            torch.testing.assert_close(value, weights[name].detach(), atol=1e-5, rtol=1e-4)
        engine.destroy()


@shared_ranks(2)
def test_dropout():
    """Of hidden states alike on all ranks, of scores different for each rank's heads; none in eval mode."""
    model, _ = made(2, settings(hidden_dropout=0.5))
    x, _ = numbers(2)
    torch.manual_seed(1)
    found = [model(x, None).detach() for _ in range(2)]
    assert not torch.equal(*found)
    parts = [torch.empty_like(found[0]) for _ in range(2)]
    dist.all_gather(parts, found[0].contiguous())
    assert torch.equal(*parts), "ranks dropped different hidden states"
    layer = domino.DominoTransformerLayer(
        settings(attention_dropout=0.5), LayoutMpu(ParallelLayout.build(tp=2)), None, 1
    )
    mixed = torch.randn(LENGTH, 1, 2 * 3 * DIM, generator=torch.Generator().manual_seed(1))
    seen = layer.self_attention.attend(mixed, None).detach()
    parts = [torch.empty_like(seen) for _ in range(2)]
    dist.all_gather(parts, seen.contiguous())
    assert not torch.equal(*parts), "ranks dropped the same scores"
    after = [torch.empty(1) for _ in range(2)]
    dist.all_gather(after, torch.rand(1))
    assert torch.equal(*after), "ranks go on with different numbers"
    model.eval()
    torch.testing.assert_close(model(x, None), plain(whole_of(model, settings()), settings(), x), atol=1e-5, rtol=1e-5)


@shared_ranks(2)
def test_layers_alone():
    """Initial values, 16 bits by autocast, frozen weights, copies."""
    torch.manual_seed(0)
    layer = domino.DominoTransformerLayer(settings(), LayoutMpu(ParallelLayout.build(tp=2)), None, 1)
    column, row = layer.linear_fc1, layer.linear_fc2
    parts = [torch.empty_like(column.weight) for _ in range(2)]
    dist.all_gather(parts, column.weight.detach())
    assert not torch.equal(*parts), "both ranks drew the same values"
    assert (column.weight.tensor_model_parallel, column.weight.partition_dim) == (True, 0)
    assert (row.weight.tensor_model_parallel, row.weight.partition_dim) == (True, 1)
    assert not hasattr(row.bias, "tensor_model_parallel"), "all ranks have it"
    x = numbers(2)[0].requires_grad_()
    for frozen in (False, True):
        column.weight.requires_grad_(not frozen)
        out = column(x)
        torch.testing.assert_close(out, F.linear(x, column.weight, column.bias))
        (grad,) = torch.autograd.grad(out.sum(), x)
        torch.testing.assert_close(grad, torch.cat(parts).sum(0).expand_as(x))
    column.weight.requires_grad_(True)
    with torch.autocast("cpu", torch.bfloat16):
        out = column(x)
    assert out.dtype is torch.bfloat16
    grads = torch.autograd.grad(out.float().sum(), [x, column.weight])
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32]
    out, bias = row(torch.ones(2, INNER // 2))
    assert bias is row.bias
    torch.testing.assert_close(out, F.linear(torch.ones(2, INNER // 2), row.weight))
    copy.deepcopy(layer)


@shared_ranks(2)
def test_what_cannot_be_is_refused():
    mpu = LayoutMpu(ParallelLayout.build(tp=2))
    kind = domino.ModelType.encoder_or_decoder
    for options, words in (
        ({"recompute_granularity": "full"}, "config.recompute_granularity is 'full'"),
        ({"normalization": "BatchNorm"}, "config.normalization is 'BatchNorm'"),
        ({"num_attention_heads": 3, "kv_channels": 4}, "3 query heads do not divide by 2 tensor-parallel ranks"),
        ({"ffn_hidden_size": 25}, "25 inner width do not divide by 2"),
        ({"input_split_dim": 0}, "config.input_split_dim is 0"),
    ):
        with pytest.raises(UsageError, match=words):
            domino.DominoTransformer(settings(**options), mpu, None, kind)
    with pytest.raises(UsageError, match=r"drop_path_rate 0\.5"):
        domino.DominoTransformer(settings(), mpu, None, kind, drop_path_rate=0.5)
    with pytest.raises(LayoutError, match="is no mpu with tensor-parallel ranks"):
        domino.DominoTransformerLayer(settings(), object(), None, 1)
    later = domino.DominoTransformer(settings(), mpu, None, kind, pre_process=False, post_process=False)
    with pytest.raises(UsageError, match="set_input_tensor"):
        later(None, None)
    x, _ = numbers(2)
    later.set_input_tensor(x)
    assert later.final_layernorm is None
    assert later(None, None).shape == x.shape
    with pytest.raises(UsageError, match="has no apply_rotary_pos_emb"):
        later(None, None, torch.zeros(LENGTH, 1, 1, DIM))
