"""`initialize` lets Triton be loaded before anything else, if the config asks for its kernels."""

from __future__ import annotations

import json

import pytest
from torch import nn

import deepspeed
from deepspeed import _api
from deepspeed.tensor_parallel import model_init


class Reached(Exception):
    pass


@pytest.fixture
def loads(monkeypatch):
    """What `initialize` has begun when it gets to the first thing that follows."""
    begun = []

    def stop(model, source):
        raise Reached

    monkeypatch.setattr(_api, "compiles", lambda: True)
    monkeypatch.setattr(_api, "load_triton", lambda: begun.append("triton"))
    monkeypatch.setattr(model_init, "with_asked", stop)
    return begun


@pytest.mark.parametrize("where", ["dict", "file"])
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"fused_kernels": {"enabled": True}}, ["triton"]),
        ({"fp8": {"enabled": True}}, ["triton"]),
        ({"fused_kernels": {"enabled": False}}, []),
        ({"fused_kernels": "on"}, []),
        ({"train_batch_size": 8}, []),
    ],
)
def test_a_config_that_asks_for_kernels(loads, tmp_path, config, expected, where):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Reached):
        deepspeed.initialize(model=nn.Linear(2, 2), config=config if where == "dict" else tmp_path / "config.json")
    assert loads == expected


def test_nothing_is_loaded_where_nothing_is_compiled(loads, monkeypatch):
    monkeypatch.setattr(_api, "compiles", lambda: False)
    with pytest.raises(Reached):
        deepspeed.initialize(model=nn.Linear(2, 2), config={"fp8": {"enabled": True}})
    assert loads == []
