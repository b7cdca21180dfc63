"""What `tp_model_init` takes and refuses."""

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import UsageError


def test_a_config_that_contradicts_is_refused():
    model = nn.Linear(2, 2)
    agreeing = {"tensor_parallel": {"autotp_size": 2}}
    for config in (None, {}, agreeing, {"tensor_parallel": {"autotp_size": "auto"}}, "ds.json"):
        assert deepspeed.tp_model_init(model, tp_size=2, dtype=torch.float32, config=config) is model
    with pytest.raises(UsageError, match=r"tp_size is 4, but tensor_parallel\.autotp_size of its config is 2"):
        deepspeed.tp_model_init(model, tp_size=4, dtype=torch.float32, config=agreeing)
    with pytest.raises(UsageError, match="unknown arguments size"):
        deepspeed.tp_model_init(model, tp_size=2, dtype=torch.float32, size=2)
