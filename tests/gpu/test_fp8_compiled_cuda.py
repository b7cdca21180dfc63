"""Compiled blocks with products of 8 bits, on a GPU: gradients of all parameters are those without a compiler."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import deepspeed

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _one_rank():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def gradients(scaling, *, compiled):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, num_hidden_layers=2, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=1024, use_cache=False,
    )  # fmt: skip
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config)
    # layers that are called one by one, as a compiler sees them
    fused = {"enabled": True, "mlp": compiled, "inputs": compiled}
    sections = {"fused_kernels": fused, "fp8": {"enabled": True, "scaling": scaling}}
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            **sections,
        },
    )
    if compiled:
        engine.compile()
    tokens = torch.randint(1024, (2, 256), generator=torch.Generator().manual_seed(1)).cuda()
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    found = {name: param.grad.float().clone() for name, param in model.named_parameters()}
    engine.destroy()
    return found


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_gradients_are_those_without_a_compiler(scaling):
    plain, compiled = (gradients(scaling, compiled=each) for each in (False, True))
    for name, grad in plain.items():
        apart = (compiled[name] - grad).norm() / grad.norm()
        assert apart < 0.15, f"{name}: {float(apart):.3f} of the gradient"  # 8 bits round neighbours apart
