"""`initialize` lets Triton and the vendor's libraries load before anything else, if the config asks for kernels."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.ops import precompile
from deepspeed.tensor_parallel import model_init


class Reached(Exception):
    pass


@pytest.fixture
def loads(monkeypatch):
    """What `initialize` has begun when it gets to the first thing that follows."""
    begun = []

    def stop(model, source):
        raise Reached

    def libraries(device, uses):
        begun.append((str(device), len(uses)))

    monkeypatch.setattr(precompile, "compiles", lambda: True)
    monkeypatch.setattr(precompile, "load_triton", lambda: begun.append("triton"))
    monkeypatch.setattr(precompile, "load_libraries", libraries)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(model_init, "with_asked", stop)
    return begun


def start(config, model=None):
    with pytest.raises(Reached):
        deepspeed.initialize(model=nn.Linear(2, 2) if model is None else model, config=config)


@pytest.mark.parametrize("where", ["dict", "file"])
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"fused_kernels": {"enabled": True}}, ["triton", ("cuda:0", 1)]),
        ({"fp8": {"enabled": True}}, ["triton", ("cuda:0", 2)]),
        ({"fused_kernels": {"enabled": False}}, []),
        ({"fused_kernels": "on"}, []),
        ({"train_batch_size": 8}, []),
    ],
)
def test_a_config_that_asks_for_kernels(loads, tmp_path, config, expected, where):
    (tmp_path / "config.json").write_text(json.dumps(config))
    start(config if where == "dict" else tmp_path / "config.json")
    assert loads == expected


def test_nothing_is_loaded_where_nothing_is_compiled(loads, monkeypatch):
    monkeypatch.setattr(precompile, "compiles", lambda: False)
    start({"fp8": {"enabled": True}})
    assert loads == []


@pytest.mark.parametrize(
    ("count", "local_rank", "expected"),
    [
        (8, "3", "cuda:3"),
        (1, None, "cuda:0"),
        (8, None, None),  # ranks that a launcher has not numbered would all open the first one
        (2, "5", None),
        (8, "-1", None),
        (0, None, None),
    ],
)
def test_a_device_is_used_where_it_is_sure_to_be_this_ranks(loads, monkeypatch, count, local_rank, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    start({"fused_kernels": {"enabled": True}})
    assert loads == ["triton", *([(expected, 1)] if expected else [])]


def test_attention_of_the_models_that_let_torch_attend(loads):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 32}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    small = transformers.GPT2Config(n_embd=24, n_head=3, n_layer=1, vocab_size=32, n_positions=16)
    for attends, expected in (("sdpa", (4, 16)), ("eager", None)):
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=attends)
        assert next(filter(None, map(precompile._heads, model.modules())), None) == expected
    model = transformers.GPT2LMHeadModel._from_config(small, attn_implementation="sdpa")
    assert precompile._heads(model) == (3, 8)
    start({"fp8": {"enabled": True}}, nn.Sequential(nn.TransformerEncoderLayer(32, 2)))
    assert loads == ["triton", ("cuda:0", 3)]


class Shy(nn.Module):
    @property
    def config(self):
        raise RuntimeError("not yet")


@pytest.mark.parametrize("model", [nn.Identity(), nn.Conv2d(1, 1, 1), nn.LazyLinear(4), Shy(), "no module"])
def test_models_without_such_layers(loads, model):
    start({"fused_kernels": {"enabled": True}}, model)
    assert loads[0] == "triton"


@pytest.mark.parametrize("fails", [False, True])
def test_no_thread_uses_the_device_afterwards(loads, monkeypatch, fails):
    waits, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(precompile, "load_libraries", lambda device, uses: waits.wait(60) and ended.set())
    monkeypatch.setattr(precompile, "wait", lambda futures: (waits.set(), [each.result(60) for each in futures]))
    try:
        with precompile.load_ahead(nn.Linear(2, 2), {"fused_kernels": {"enabled": True}}):
            if fails:
                raise Reached
    except Reached:
        assert fails
    assert ended.is_set()
