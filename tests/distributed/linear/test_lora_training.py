"""LoRA over frozen weights that rest as codes, in parts and on the host: parity with plain PyTorch on one rank."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.comm.codec import block_codec
from deepspeed.errors import UsageError
from deepspeed.linear import (
    Init,
    LoRAConfig,
    LoRAOptimizedLinear,
    OptimizedLinear,
    QuantizationConfig,
    init_lora,
    load_adapters,
    save_adapters,
)
from deepspeed.memory.host import HOST_STORAGES
from deepspeed.pipe import PipelineModule
from deepspeed.tensor_parallel import whole_parameters
from deepspeed.zero import GatheredParameters
from tests.closeness import Training, assert_same_training
from tests.covering import pairs
from tests.harness import ranks, shared_ranks

WIDTH, RANK, ALPHA, STEPS = 32, 4, 8.0, 3
SPLIT = {
    "layer_specs": [
        {"patterns": [".*q_proj.*weight"], "partition_type": "column"},
        {"patterns": [".*o_proj.*weight"], "partition_type": "row"},
    ]
}
"""By which tensor-parallel ranks share the layers of `Net`."""
FORMS = {
    "plain": None,
    "int8": QuantizationConfig(q_bits=8, group_size=64, q_dtype=torch.int8),
    "int4": QuantizationConfig(q_bits=4, group_size=64, q_dtype=torch.int8),
    "fp6": QuantizationConfig(q_bits=6, group_size=64),
}
HOLDS = {
    "parameter": {},
    "shared": {"base_weight_sharding": 2},
    "host": {"offload": True, "offload_ratio": 0.5},
    "both": {"base_weight_sharding": 2, "offload": True, "offload_ratio": 1.0},
}
FORMS_OF_PARTS = {"plain": None, "int4": QuantizationConfig(q_bits=4, group_size=8, q_dtype=torch.int8)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.norm(x + self.o_proj(torch.tanh(self.q_proj(x))))).float().square().mean()


class Adapted(nn.Module):
    """The formula, over a weight that is what its codes say."""

    def __init__(self, base, form, seed):
        super().__init__()
        self.base = copy.deepcopy(base).requires_grad_(False)
        if form is not None:
            codec, flat = block_codec(form.form, form.group_size), base.weight.detach().reshape(1, -1)
            self.base.weight.copy_(codec.decode(codec.encode(flat), torch.empty_like(flat)).view_as(base.weight))
        self.a = nn.Parameter(first_half(seed))
        self.b = nn.Parameter(torch.zeros(WIDTH, RANK))

    def forward(self, x):
        return self.base(x) + ALPHA / RANK * (x @ self.a.t() @ self.b.t())


def batch(step, rank=None):
    x = torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(step))
    return x if rank is None else x[2 * rank : 2 * rank + 2]


def expected(form):
    """Adapters by name, before and after, and losses of plain PyTorch."""
    torch.manual_seed(0)
    model = Net().requires_grad_(False)
    for seed, name in enumerate(("q_proj", "o_proj")):
        setattr(model, name, Adapted(getattr(model, name), form, seed))
    names = {"a": "lora_weight_1.weight", "b": "lora_weight_2.weight"}
    trained = {
        f"{layer}.{names[half]}": getattr(getattr(model, layer), half)
        for layer in ("q_proj", "o_proj")
        for half in "ab"
    }
    before = {name: param.detach().clone() for name, param in trained.items()}
    optimizer, losses = torch.optim.AdamW(trained.values(), lr=1e-2, weight_decay=0), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Training(before, {name: param.detach().clone() for name, param in trained.items()}, losses)


def built(form, forms=FORMS, **lora):
    config = LoRAConfig(lora_r=RANK, lora_alpha=ALPHA, target_mods=["q_proj", "o_proj"], **lora)
    torch.manual_seed(0)
    with Init(config, forms[form]):
        model = Net()
    for seed, layer in enumerate((model.q_proj, model.o_proj)):
        if layer.initialized:
            layer.lora_weight_1.weight.data.copy_(first_half(seed))
    return model


def first_half(seed):
    """Of an adapter, as it begins."""
    return torch.randn(RANK, WIDTH, generator=torch.Generator().manual_seed(seed)) / 8


def engine_of(model, stage, split=1, **zero):
    trained = [param for param in model.parameters() if param.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 40, **zero},
        "tensor_parallel": {"autotp_size": split, "partition_config": SPLIT if split > 1 else None},
    }
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]


def whole(model):
    found = {}
    for path, layer in model.named_modules():
        named = {name: param for name, param in layer.named_parameters(recurse=False) if param.requires_grad}
        with GatheredParameters(list(named.values())):
            for name, param in named.items():
                found[f"{path}.{name}"] = whole_parameters(layer).get(id(param), param.detach()).clone()
    return found


def train(engine):
    losses, axis = [], engine._parts.layout["dp"]
    for step in range(STEPS):
        loss = engine(batch(step, axis.rank if axis.size > 1 else None))
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


@shared_ranks(2)
def test_the_same_training_at_every_stage():
    """Also what rests: bytes of codes, a half of them where two ranks share a weight, in host memory if it is told."""
    plain = {form: expected(config) for form, config in FORMS.items()}
    for form, hold, stage in pairs(list(FORMS), list(HOLDS), (0, 1, 2, 3)):
        model = built(form, **HOLDS[hold])
        layer = model.q_proj
        numel = WIDTH * WIDTH // layer.lora_config.base_weight_sharding
        nbytes = 4 * numel if FORMS[form] is None else FORMS[form].codec.nbytes(numel)
        assert layer.held.nbytes == nbytes, (form, hold)
        assert {name for name, param in model.named_parameters() if param.requires_grad} == set(plain[form].before)
        before = whole(model)
        engine = engine_of(model, stage)
        away = [each.held.untyped_storage() in HOST_STORAGES for each in (model.q_proj, model.o_proj)]
        assert away == {"host": [False, True], "both": [True, True]}.get(hold, [False, False])
        if hold == "parameter" and stage == 3:
            assert layer.weight.numel() == 0
            assert layer.weight.dtype is (torch.float32 if FORMS[form] is None else torch.uint8)
        losses = train(engine)
        assert_same_training(Training(before, whole(model), losses), plain[form])
        engine.destroy()


@ranks(2, 4)
def test_ranks_that_split_layers(tmp_path):
    """By outputs and by inputs, with frozen weights in every form; codes are cut, not made anew."""
    plain = {form: expected(config) for form, config in FORMS_OF_PARTS.items()}
    made = partial(built, forms=FORMS_OF_PARTS)
    for form, hold, stage in pairs(list(plain), list(HOLDS), (0, 1, 3)):
        if dist.get_world_size() == 2 and "base_weight_sharding" in HOLDS[hold]:
            continue
        model, before = made(form), whole(made(form))
        model = made(form, **HOLDS[hold])
        rested = model.q_proj.full_weight()
        engine = engine_of(model, stage, split=2)
        assert (model.q_proj.output_dim, model.o_proj.input_dim) == (WIDTH // 2, WIDTH // 2)
        losses = train(engine)
        assert_same_training(Training(before, whole(model), losses), plain[form])
        save_adapters(engine.module, tmp_path / "adapter")
        whole_model = made(form)
        load_adapters(whole_model, tmp_path / "adapter")
        found = whole(engine.module)
        assert all(torch.equal(found[name], value) for name, value in whole(whole_model).items())
        if hold == "parameter":
            assert torch.equal(dequantised(engine), rested)
        engine.save_checkpoint(str(tmp_path / f"{form}{hold}{stage}"))
        other = engine_of(made(form, **HOLDS[hold]), stage, split=2)
        load_adapters(other.module, tmp_path / "adapter")
        other.load_checkpoint(str(tmp_path / f"{form}{hold}{stage}"))
        assert train(other) == pytest.approx(train(engine), rel=1e-6)
        other.destroy()
        engine.destroy()


@shared_ranks(4)
def test_ranks_of_a_stage_share_weights():
    """Of two stages, of which one alone has a layer of this name."""
    lora = LoRAConfig(lora_r=RANK, lora_alpha=ALPHA, base_weight_sharding=2, target_mods=["q_proj"])
    lone = LoRAConfig(lora_r=RANK, lora_alpha=ALPHA, target_mods=["q_proj"])
    losses = []
    for config in (lora, lone):
        torch.manual_seed(0)
        with Init(config, FORMS["int8"]):
            layers = [Named(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
            model = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
        if model.first:
            assert model.get_submodule("0").q_proj.held.nbytes == (1088 if config is lone else 544)
            model.get_submodule("0").q_proj.lora_weight_1.weight.data.copy_(first_half(0))
        else:
            model.requires_grad_(True)
        engine = engine_of(model, 0)
        x = batch(0)[:2]
        losses.append([engine.train_batch(iter([(x, x)])).item() for _ in range(STEPS)])
        with pytest.raises(UsageError, match="save_adapters: each of 2 pipeline stages has the adapters of its own"):
            save_adapters(engine.module, "adapter")
        engine.destroy()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.q_proj(x)


def dequantised(engine):
    """The whole weight of `q_proj`, of the parts that ranks hold."""
    layer, axis = engine.module.q_proj, engine._parts.layout.tensor
    with GatheredParameters([layer.weight]):
        part = layer.full_weight()
    parts = [torch.empty_like(part) for _ in range(axis.size)]
    dist.all_gather(parts, part, group=axis.group)
    return torch.cat(parts)


@shared_ranks(2)
def test_models_that_are_built_in_shards():
    """`zero.Init` around `linear.Init` or inside of it; what rests is in shards again, or this rank's part."""
    for form, inside, hold in pairs(list(FORMS), (True, False), ("parameter", "shared")):
        lora = LoRAConfig(lora_r=RANK, lora_alpha=ALPHA, target_mods=["q_proj", "o_proj"], **HOLDS[hold])
        contexts = [lambda lora=lora, form=form: Init(lora, FORMS[form]), deepspeed.zero.Init]
        torch.manual_seed(0)
        with contexts[inside](), contexts[not inside]():
            model = Net()
        layer, numel = model.q_proj, WIDTH * WIDTH // 2
        held = layer.part if hold == "shared" else layer.weight.ds_tensor
        nbytes = 4 * numel if FORMS[form] is None else FORMS[form].codec.nbytes(2 * numel) // 2
        assert held.nbytes == nbytes
        assert hold == "shared" or layer.weight.numel() == 0
        for seed, each in enumerate((model.q_proj, model.o_proj)):
            with GatheredParameters([each.lora_weight_1.weight], modifier_rank=0):
                each.lora_weight_1.weight.data.copy_(first_half(seed))
        before = whole(model)
        engine = engine_of(model, 3)
        losses = train(engine)
        assert_same_training(Training(before, whole(model), losses), expected(FORMS[form]))
        engine.destroy()


@shared_ranks(2)
def test_codes_at_stage_3_on_the_host_and_in_checkpoints(tmp_path):
    """ZeRO moves a parameter of codes through its tiers; a checkpoint has it; adapters go to PEFT's files and back."""
    model = built("int4")
    engine = engine_of(model, 3, offload_param={"device": "cpu"})
    losses = train(engine)
    assert losses == pytest.approx(expected(FORMS["int4"]).losses, rel=1e-5)
    engine.save_checkpoint(str(tmp_path / "all"), tag="one")
    save_adapters(engine.module, tmp_path / "adapter")
    after = whole(engine.module)
    goes_on = train(engine)
    other = built("int4")
    other.q_proj.weight.data.zero_()
    again = engine_of(other, 3)
    again.load_checkpoint(str(tmp_path / "all"))
    assert train(again) == pytest.approx(goes_on, rel=1e-6)
    third = engine_of(built("int4", base_weight_sharding=2), 3)
    load_adapters(third.module, tmp_path / "adapter")
    found = whole(third.module)
    assert all(torch.equal(found[name], value) for name, value in after.items())


@shared_ranks(2)
def test_ranks_that_share_a_weight(tmp_path):
    """The first rank's values count where parts are alike; another weight is loaded in parts; a copy shares too."""
    torch.manual_seed(dist.get_rank())
    lone = OptimizedLinear(
        WIDTH, WIDTH, lora_config=LoRAConfig(lora_r=2, offload=True, offload_ratio=1.0), dtype=torch.float32
    )
    seen = [torch.empty(WIDTH, WIDTH) for _ in range(2)]
    dist.all_gather(seen, lone.full_weight())
    assert torch.equal(*seen)
    model = built("int8", base_weight_sharding=2)
    values = {"q_proj.weight": torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3))}
    missing, unexpected = model.load_state_dict(values, strict=False)
    assert "q_proj.weight" not in missing
    assert unexpected == []
    torch.testing.assert_close(model.q_proj.full_weight(), values["q_proj.weight"], rtol=0, atol=0.02)
    with pytest.raises(RuntimeError, match=r"q_proj.weight has the shape \(2, 2\) there and \(32, 32\) in the model"):
        model.load_state_dict({"q_proj.weight": torch.ones(2, 2)}, strict=False)
    torch.testing.assert_close(copy.deepcopy(model)(batch(0)), model(batch(0)), rtol=0, atol=0)
    engine = engine_of(model, 1)
    engine.save_checkpoint(str(tmp_path), tag="one")
    other = engine_of(built("int8", base_weight_sharding=2), 1)
    with pytest.raises(UsageError, match=r"frozen weight, which checkpoints leave out, is not the one"):
        other.load_checkpoint(str(tmp_path))
    other.module.load_state_dict(values, strict=False)
    other.load_checkpoint(str(tmp_path))


@shared_ranks(2)
def test_what_does_not_fit():
    with pytest.raises(UsageError, match="base_weight_sharding is 3, which does not divide the 2 ranks"):
        built("plain", base_weight_sharding=3)
    late = built("plain", delay_lora_init=True)
    with pytest.raises(UsageError, match=r"2 LoRA layers, 'q_proj' the first, have no adapters yet"):
        engine_of(late, 1)
    init_lora(late)
    assert isinstance(late.q_proj, LoRAOptimizedLinear)
    with pytest.raises(UsageError, match=r"base_weight_sharding is 2, which does not divide the 1 ranks that have the"):
        engine_of(built("plain", base_weight_sharding=2), 1, split=2)
    with pytest.raises(UsageError, match=r"group_size 64 is to be split over 2 ranks along dim 1, which cuts through"):
        engine_of(built("int4"), 1, split=2)
    with (
        pytest.raises(UsageError, match="base_weight_sharding is 2, which does not divide the 1 ranks"),
        Init(LoRAConfig(base_weight_sharding=2, target_mods=[""])),
    ):
        PipelineModule([nn.Linear(WIDTH, WIDTH)] * 2, num_stages=2, loss_fn=nn.MSELoss())
