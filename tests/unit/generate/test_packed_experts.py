"""Experts that rest in few bits: what a model with the widened weights computes, in fewer bytes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from deepspeed.errors import UsageError
from deepspeed.fusion.packed_linear import WeightPacking, pack_layers, packed_parameters
from deepspeed.generate.llm import LLM
from deepspeed.generate.params import SamplingParams
from deepspeed.generate.weights import fix_rows
from tests.unit.generate.families import greedy_of, prompts_of, small_cache, tiny

GREEDY = SamplingParams(max_tokens=4, temperature=0)
LOSS = {"w8a16": 0.02, "w4a16": 0.15, "wf6af16": 0.06, "fp8": 0.04}
"""Of a weight's norm."""


def packed_and_widened(kind: str, mode: str, seed: int = 0) -> tuple[Any, Any]:
    """A packed model, and one of the same class whose weights are those that the packed ones stand for."""
    packed, widened = tiny(kind, seed), tiny(kind, seed)
    pack_layers(packed, WeightPacking(mode, exclude=("lm_head",)))
    params = dict(widened.named_parameters())
    for name, each in packed_parameters(packed).items():
        assert each.weight.shape == params[name].shape
        assert (params[name] - each.weight).norm() < LOSS[mode] * params[name].norm(), name
        params[name].data.copy_(each.weight)
    return packed, widened


@torch.no_grad()
@pytest.mark.parametrize(("kind", "mode"), [("mixtral", "w8a16"), ("qwen3_moe", "w4a16"), ("mixtral", "wf6af16"),
                                            ("qwen3_moe", "fp8"), ("deepseek_v3", "w8a16")])  # fmt: skip
def test_logits(kind: str, mode: str) -> None:
    packed, widened = packed_and_widened(kind, mode)
    experts = [name for name in packed_parameters(packed) if ".experts." in name]
    assert len(experts) == (2 if kind == "deepseek_v3" else 4), "one of its layers is dense"
    ids = torch.arange(11)[None]
    torch.testing.assert_close(packed(ids).logits, widened(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("memory", [{}, {"device": 0, "host": "1GB"}])
def test_tokens_and_other_weights(memory: dict[str, Any]) -> None:
    prompts = prompts_of(4, 9)
    keys = {"quantization": {"quantization_mode": "w8a16"}, "memory": memory}
    with LLM(tiny("qwen3_moe"), {**small_cache(), **keys}) as llm:
        for seed in (0, 1):
            _, widened = packed_and_widened("qwen3_moe", "w8a16", seed)
            found = llm.generate(prompts, GREEDY, progress=False)
            assert [each.token_ids for each in found] == [greedy_of(widened, prompt, 4) for prompt in prompts]
            llm.update_weights(tiny("qwen3_moe", seed=1).state_dict())
        name = "model.layers.0.mlp.experts.down_proj"
        with pytest.raises(UsageError, match=rf"{name} has the shape \(4, 8, 8\), the model \(4, 32, 32\)"):
            llm.update_weights({name: torch.zeros(4, 8, 8)})


def test_what_is_left_alone() -> None:
    model = tiny("gpt_oss")
    _, left = pack_layers(model, WeightPacking("w8a16"))
    assert left["model.layers.0.mlp.experts"] == "GptOssExperts computes in its own way"
    model = tiny("mixtral")
    done, left = pack_layers(model, WeightPacking("w8a16", exclude=(".*experts",)))
    assert left["model.layers.1.mlp.experts"] == "excluded"
    assert "model.layers.1.self_attn.q_proj" in done
    _, left = pack_layers(tiny("mixtral"), WeightPacking("w8a16", rounded_input=torch.round))
    assert left["model.layers.0.mlp.experts"] == "only linear layers round their inputs"
    model = tiny("mixtral")
    pack_layers(model, WeightPacking("w8a16"))
    with pytest.raises(UsageError, match=r"deterministic: gate_up_proj \(PackedStack\) multiplies its weight"):
        fix_rows(model.model.layers[0].mlp.experts, torch.device("cpu"), ExitStack())
