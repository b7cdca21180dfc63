"""Helpers by which scripts cut models themselves, against the models in one piece and against Transformers' own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers as hf
from deepspeed.module_inject import auto_tp_model_utils, fusedqkv_utils, tp_shard
from deepspeed.module_inject.auto_tp import Loading, ReplaceWithTensorSlicing
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, Yuan_LinearAllreduce, Yuan_LinearLayer
from deepspeed.module_inject.tp_shard import AutoTPMeta
from deepspeed.runtime.tensor_parallel.init_utils import infer_config_dtype, load_ds_config, tp_group_world_size
from deepspeed.runtime.tensor_parallel.tp_manager import TpTrainingManager
from torch import nn

from deepspeed.config.parallel import TPTrainingConfig
from deepspeed.errors import UsageError
from deepspeed.tensor_parallel import plan_model
from tests.distributed.tensor_parallel.families import FAMILIES, make, start, tokens
from tests.harness import ranks


def test_sizes_without_a_meta():
    """As older scripts ask: what is told once counts for all calls, the name comes third."""
    try:
        tp_shard.set_num_kv_heads(3)
        assert tp_shard.get_shard_size_list(12, 2) == [8, 4]
        assert tp_shard.get_shard_size_list(12, 2, "mlp.up") == [6, 6]
        assert tp_shard.get_shard_size(12, 2, None, rank=1) == 4
        tp_shard.set_tp_grain_size(4)
        assert tp_shard.get_shard_size_list(12, 2, "mlp.up") == [8, 4]
        assert tp_shard.get_shard_size_list(12, 2, AutoTPMeta()) == [6, 6], "a meta counts for itself"
        with pytest.raises(UsageError, match="at least 1"):
            tp_shard.set_tp_grain_size(0)
    finally:
        tp_shard.set_num_kv_heads(None)
        tp_shard.set_tp_grain_size(1)


FUSED = {"bloom": "query_key_value", "phi3": "qkv_proj", "codegen": "qkv_proj", "bigcode": "c_attn"}


def test_fused_weights_are_cut_as_the_plan_cuts_them():
    """The rows that the published function gives a rank are those that a split model computes with."""
    for name, leaf in FUSED.items():
        model = FAMILIES[name]()
        (layer,) = [each for path, each in model.named_modules() if path.endswith(leaf)][:1]
        weight = layer.weight.detach().t() if type(layer).__name__ == "Conv1D" else layer.weight.detach()
        meta = AutoTPMeta.from_model_config(model.config)
        changes = plan_model(TPTrainingConfig(autotp_size=2), model, 2).changes
        change = next(each for each in changes if each.path.endswith(leaf))
        for rank in range(2):
            found = fusedqkv_utils.prepare_tp_fused_qkvw(model, weight, 2, rank, meta)
            if change.rows is None:
                wanted = [weight[start:stop] for start, stop in change.splits["weight"].parts[rank]]
            else:
                wanted = [weight[start:stop] for start, stop in change.rows[rank]]
            assert torch.equal(found, torch.cat(wanted)), f"{name}, rank {rank}"
    assert fusedqkv_utils.prepare_tp_fused_qkvw(model, None, 2, 0, meta) is None
    assert fusedqkv_utils.get_fused_qkv_type(FAMILIES["bloom"]()) == "bloomtype"
    assert fusedqkv_utils.get_fused_qkv_type(FAMILIES["llama"]()) is None
    with pytest.raises(UsageError, match="LlamaForCausalLM has no block that is known to fuse"):
        fusedqkv_utils.prepare_tp_fused_qkvw(FAMILIES["llama"](), torch.ones(6, 2), 2, 0, meta)
    assert fusedqkv_utils.require_tp_fused_qkvw("h.0.attn.c_attn", 2)
    assert not fusedqkv_utils.require_tp_fused_qkvw("h.0.attn.c_attn", 1)
    assert not fusedqkv_utils.require_tp_fused_qkvw("mlp.up_proj", 2)
    config = hf.Phi3Config(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
    block = hf.models.phi3.modeling_phi3.Phi3DecoderLayer(config, 0)
    sizes = fusedqkv_utils.fused_qkv_subparam_sizes(block, (64, 32), AutoTPMeta.from_model_config(config))
    assert sizes == (32, 16, 16)
    pieces = fusedqkv_utils.split_by_qkvlist_and_refuse([torch.arange(4), torch.arange(10, 14)], 2)
    assert [each.tolist() for each in pieces] == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_blocks_of_codegen_and_widths_of_qwen():
    """As DeepSpeed 0.19.8 answers."""
    ids = {0: [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11], 1: [12, 14, 16, 13, 15, 17, 18, 20, 22, 19, 21, 23]}
    assert fusedqkv_utils.codegen_block_layout(96, 2, 16) == (4, ids)
    assert fusedqkv_utils.codegen_block_layout(48, 1, 8) is None
    assert fusedqkv_utils.codegen_block_layout(24, 4, 8) is None
    block = type("QWenBlock", (nn.Module,), {})()
    block.attn = nn.Module()
    block.attn.split_size = 12
    fusedqkv_utils.set_fused_qkv_shard_state(block, [8, 4], 1)
    assert block.attn.split_size == 4


def test_values_that_heads_share():
    meta = AutoTPMeta(num_kv_heads=8)
    ids = [fusedqkv_utils.shared_qk_value_head_ids(8, 2, rank) for rank in range(2)]
    assert ids == [[0, 1, 4, 5], [2, 3, 6, 7]]
    weight, bias = torch.arange(16.0).view(16, 1).expand(16, 3), torch.arange(16.0)
    part, of_bias = fusedqkv_utils.shard_value_with_share_qk(weight, bias, 1, 2, True, meta)
    assert part[:, 0].tolist() == of_bias.tolist() == [4, 5, 6, 7, 12, 13, 14, 15]
    part, of_bias = fusedqkv_utils.shard_value_with_share_qk(weight.t(), bias[:3], 0, 2, False, meta)
    assert part[0].tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert of_bias.tolist() == [0, 1, 2]
    with pytest.raises(UsageError, match="12 elements of 6 heads in two halves do not divide by 2 ranks"):
        fusedqkv_utils.shard_value_with_share_qk(torch.ones(12, 2), None, 0, 2, True, AutoTPMeta(num_kv_heads=6))


def test_of_configs(tmp_path):
    assert infer_config_dtype({"bf16": {"enabled": True}}) is torch.bfloat16
    assert infer_config_dtype({"fp16": {"enabled": True}}) is torch.float16
    assert infer_config_dtype({}) is None
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 4}')
    given = {"train_batch_size": 4}
    assert load_ds_config(str(file)) == load_ds_config(given) == given
    assert load_ds_config(given) is not given


@ranks(2)
def test_yuan():
    """A pair of layers around values that heads share is the pair of whole layers."""
    world, rank = dist.group.WORLD, dist.get_rank()
    torch.manual_seed(0)
    first, second = nn.Linear(6, 16), nn.Linear(16, 6)
    x = torch.randn(3, 6).requires_grad_()
    wanted = second(first(x))
    (expected,) = torch.autograd.grad(wanted.square().sum(), x, retain_graph=True)
    meta = AutoTPMeta(num_kv_heads=8)
    values, out = nn.Linear(6, 16), nn.Linear(16, 6)
    values.load_state_dict(first.state_dict())
    out.load_state_dict(second.state_dict())
    made = Yuan_LinearLayer(values, world, tp_meta=meta), Yuan_LinearAllreduce(out, world, tp_meta=meta)
    part = made[0](x)
    heads = first(x).view(3, 8, 2)[:, fusedqkv_utils.shared_qk_value_head_ids(8, 2, rank)].flatten(1)
    torch.testing.assert_close(part, heads)
    found = made[1](part)
    torch.testing.assert_close(found, wanted)
    (grad,) = torch.autograd.grad(found.square().sum(), x)
    torch.testing.assert_close(grad, expected)
    made[0].gather_params(list(made[0].parameters()))
    torch.testing.assert_close(made[0].weight.detach(), first.weight.detach())


@ranks(2)
def test_loading_and_slicing():
    world, rank = dist.group.WORLD, dist.get_rank()
    torch.manual_seed(0)
    state = {"up.weight": torch.randn(8, 4), "up.bias": torch.randn(8), "down.weight": torch.randn(4, 8)}
    state |= {"norm.running_mean": torch.randn(3), "plain.weight": torch.randn(2, 2)}
    up, down = LinearLayer(nn.Linear(4, 8), world), LinearAllreduce(nn.Linear(8, 4, bias=False), world)
    with torch.device("meta"):
        plain = nn.Linear(2, 2, bias=False)
    norm = nn.BatchNorm1d(3, affine=False)
    for name, module in (("up.", up), ("down.", down), ("plain.", plain), ("norm.", norm)):
        assert Loading.is_load_module(module)
        Loading.load(module, state, name, world)
    assert not Loading.is_load_module(nn.ReLU())
    rows = slice(4 * rank, 4 * rank + 4)
    assert torch.equal(up.weight.data, state["up.weight"][rows])
    assert torch.equal(up.bias.data, state["up.bias"][rows])
    assert torch.equal(down.weight.data, state["down.weight"][:, rows])
    assert torch.equal(plain.weight.data, state["plain.weight"])
    assert torch.equal(norm.running_mean, state["norm.running_mean"])
    with pytest.raises(UsageError, match=r"up\.weight has the shape \(7, 4\)"):
        Loading.load(up, {"up.weight": torch.ones(7, 4)}, "up.")

    slicer = ReplaceWithTensorSlicing(world, 2)
    whole = torch.arange(24.0).view(2, 12)
    assert torch.equal(slicer.copy(torch.zeros(2, 6), whole), whole[:, 6 * rank : 6 * rank + 6])
    assert torch.equal(slicer.copy(torch.zeros(1, 12), whole, allocate_tensor=True), whole[rank : rank + 1])
    parts = slicer.strided_copy(torch.zeros(2, 6), whole, 3)
    assert torch.equal(parts, torch.cat([each[:, 2 * rank : 2 * rank + 2] for each in whole.chunk(3, 1)], 1))
    turned = slicer.strided_copy(torch.zeros(6, 2), whole.t(), 3, int8=True)
    assert torch.equal(turned, parts.t())
    target = torch.zeros(2, 12)
    slicer.copy(target, whole)
    assert torch.equal(target, whole), "what is whole is copied whole"
    assert slicer.copy(target, None) is None
    for wrong, words in ((torch.zeros(2, 5), "of which 2 ranks make 10"), (torch.zeros(1, 6), "differ in one")):
        with pytest.raises(UsageError, match=words):
            slicer.copy(wrong, whole)
    with pytest.raises(UsageError, match="a part must be smaller"):
        slicer.copy(torch.zeros(2, 13), whole)
    assert tp_group_world_size(world, dist) == 2
    assert tp_group_world_size(None, dist) is None


@ranks(1, 2, 3)
def test_biases_by_distance():
    """All ranks' heads together are what Transformers' models make for all heads; 6 is no power of 2."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, :2] = 0
    for heads in (4, 6):
        wanted = hf.models.bloom.modeling_bloom.build_alibi_tensor(mask, heads, torch.float32).view(2, heads, 1, 5)
        found = auto_tp_model_utils.build_bloom_alibi_tensor(mask, heads, torch.float32)
        mine = torch.arange(heads).tensor_split(size)[rank]
        torch.testing.assert_close(found.view(2, -1, 1, 5), wanted[:, mine])
        whole = hf.models.mpt.modeling_mpt.build_mpt_alibi_tensor(heads, 5)
        torch.testing.assert_close(auto_tp_model_utils.build_mpt_alibi_tensor(None, heads, 5), whole[mine])
        holder = SimpleNamespace(n_head=heads)
        seen = auto_tp_model_utils.get_alibi_mask(holder, torch.zeros(1), 5)
        holder.get = lambda tensor, length: "for all heads"
        twin = SimpleNamespace(n_head=heads)
        meta = AutoTPMeta(num_attention_heads=heads, num_kv_heads=heads)
        auto_tp_model_utils.install_head_sharded_helper(holder, "get", auto_tp_model_utils.get_alibi_mask, meta)
        torch.testing.assert_close(holder.get(torch.zeros(1), 5), seen)
        assert holder.get_orig(torch.zeros(1), 5) == "for all heads"
        assert not hasattr(twin, "get")
        bloom = nn.Module()
        bloom.build = hf.models.bloom.modeling_bloom.build_alibi_tensor
        helper = auto_tp_model_utils.build_bloom_alibi_tensor
        auto_tp_model_utils.install_head_sharded_helper(bloom, "build", helper, meta, dist.group.WORLD)
        torch.testing.assert_close(bloom.build(mask, len(mine), torch.float32), found)
        scores = torch.randn(len(mine), 5, 5)
        by_bloom = scores + wanted[1, mine]  # distances differ by a number for each query, which softmax does not see
        by_bloom = by_bloom.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
        torch.testing.assert_close(F.softmax(scores + seen, -1), F.softmax(by_bloom, -1))


@ranks(2)
def test_manager():
    model, plain = make("llama")
    manager = TpTrainingManager(model, 2, torch.float32)
    assert manager.module is model
    engine = start(manager.module, 0)
    found = engine(input_ids=tokens(), labels=tokens()).loss
    assert found.item() == pytest.approx(plain(input_ids=tokens(), labels=tokens()).loss.item(), abs=1e-5)
    assert model.model.layers[0].mlp.up_proj.out_features == 24
    engine.destroy()
