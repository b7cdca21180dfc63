"""Weights in tiers: what is a unit, where it lives, and when it comes."""

from __future__ import annotations

import gc
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from deepspeed.config.memory import MemoryConfig
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.memory.streaming import StreamSettings, WeightStream, stream_weights, units_of

CPU = torch.device("cpu")


class Tied(nn.Module):
    """An embedding that is the head, too, a parameter of its own, and a block that is called in another one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full((8,), 2.0))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, ids):
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(self.norm(x))


def streamed(model, ready=lambda unit: None, stack=None, **memory):
    return stream_weights(model, StreamSettings(MemoryConfig(**memory)), CPU, ready, stack or ExitStack())


def test_units():
    names = [sorted(unit.modules) for unit in units_of(Tied())]
    assert names == [[], ["embed", "head"], ["norm"], *([f"blocks.{number}"] for number in range(5))]
    assert [sorted(unit.modules) for unit in units_of(nn.MultiheadAttention(4, 2))] == [[], ["out_proj"]]
    nested = nn.Sequential(nn.Linear(2, 2), nn.MultiheadAttention(4, 2), nn.ModuleList([nn.Linear(2, 2)]))
    assert [sorted(unit.modules) for unit in units_of(nested)] == [[], ["0"], ["1"], ["2.0"]]


@pytest.mark.parametrize("memory", [{"device": 0}, {"device": 2400, "host": 600, "disk": "1MB"}])
def test_results_and_tensors_stay(tmp_path, memory):
    model, plain, x = Tied().eval(), Tied().eval(), torch.arange(11)
    given = dict(model.named_parameters())
    with ExitStack() as stack:
        path = {"path": str(tmp_path)} if "disk" in memory else {}
        stream = streamed(model, stack=stack, **memory, **path)
        tiers = [unit.tier for unit in stream.units]
        assert tiers == (["device", *["host"] * 7] if not path else ["device"] * 5 + ["host", *["disk"] * 2])
        for _ in range(3):
            with torch.inference_mode():
                assert torch.equal(model(x), plain(x))
            assert len(stream._buffers) == 2
        assert all(torch.equal(each, plain.state_dict()[name]) for name, each in model.state_dict().items())
        model.to(torch.float64)  # what streams is not moved
        model.scale.data, model.norm = model.scale.data.float(), model.norm.float()
        stream.park()
        model.blocks[4].weight.data.mul_(2)
        plain.blocks[4].weight.data.mul_(2)
        torch.testing.assert_close(model.to(torch.float32)(x), plain(x))
    assert all(each is given[name] for name, each in model.named_parameters())
    torch.testing.assert_close(model(x), plain(x))
    assert not model.blocks[4]._forward_pre_hooks
    assert model.to(torch.float64).blocks[4].weight.dtype is torch.float64


def test_what_comes_next_is_learned():
    """Blocks run in another order than they are listed in."""
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    stream, begun = streamed(model, device=0), []
    own = stream._begin
    stream._begin = lambda unit, buffer: (begun.append(next(iter(unit.modules))), own(unit, buffer))[1]
    for _ in range(2):
        for place in (2, 0, 3, 1):
            model[place](torch.ones(1, 4))
    assert begun[-4:] == ["0", "3", "1", "2"]  # each one while the one before it computes


def test_a_block_inside_of_another():
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.own = nn.Parameter(torch.ones(2))
            self.others = [inner]

        def forward(self, x):
            return self.others[0](x * self.own) * self.own

    inner = [nn.Linear(2, 2) for _ in range(2)]
    model = nn.Sequential(*inner, *(Outer(each) for each in inner))
    x = torch.ones(1, 2)
    expected = model(x)
    streamed(model, device=0)
    assert torch.equal(model(x), expected)
    assert torch.equal(model(x), expected)


def test_what_does_not_fit():
    with pytest.raises(DeepSpeedConfigError, match=r"blocks\.1 needs 512 B, and a rank may use device 0 B .*host 1"):
        streamed(Tied(), device=0, host=1700)


def test_everything_fits():
    model = Tied()
    assert streamed(model, device="1MB") is None
    assert not model.blocks[0]._forward_pre_hooks


def held(stream):
    """Bytes of tensors that are alive, without those of the swap file."""
    found = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if type(each) in (torch.Tensor, nn.Parameter) and each.device.type == "cpu" and each.layout is torch.strided
        if stream._swap is None or not stream._swap.holds(each)
    }
    return sum(found.values())


def test_memory_of_a_model_on_disk(tmp_path, monkeypatch):
    """At the peak: the budget and two layers, also while the model is made; one more layer is what is being moved."""
    width, layers = 128, 12
    layer = width * width * 4
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    streams, peaks = [], []
    own = WeightStream.__init__
    monkeypatch.setattr(WeightStream, "__init__", lambda self, *given: (streams.append(self), own(self, *given))[1])

    def ready(unit):
        for name, module in unit.modules.items():
            module.weight = nn.Parameter(torch.full((width, width), float(int(name)) / width))
        peaks.append(held(streams[0]))

    gc.collect()  # what other tests left would be freed in between
    before = held(None or type("None", (), {"_swap": None}))
    with ExitStack() as stack:
        stream = streamed(model, ready, stack, device=3 * layer, host=0, disk="1GB", path=str(tmp_path))
        assert [unit.tier for unit in stream.units].count("device") == 1 + 3
        for block in model:
            block.register_forward_hook(lambda *_: peaks.append(held(stream)))
        x = torch.ones(1, width)
        with torch.no_grad():
            assert model(x)[0, 0] == 0
            peaks.append(held(stream))
        assert max(peaks) - before < 3 * layer + 2 * layer + layer // 4
        assert max(peaks) - before >= 5 * layer
