"""`LLM` with weights that are not on the device: the same tokens, also after other weights and after sleep."""

from __future__ import annotations

import pytest
import torch

from deepspeed.errors import UsageError
from deepspeed.generate.llm import LLM
from deepspeed.generate.params import SamplingParams
from tests.unit.generate.families import greedy_of, prompts_of, small_cache, tiny

GREEDY = SamplingParams(max_tokens=5, temperature=0)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("from_folder", [False, True])
def test_tokens(tmp_path, from_folder, quantised):
    plain, prompts = tiny(), prompts_of(4, 9)
    plain.save_pretrained(tmp_path / "model")
    quantisation = {"quantization": {"quantization_mode": "w8a16"}} if quantised else {}
    memory = {"device": 0, "host": "100KB", "disk": "1GB", "path": str(tmp_path)}
    source = tmp_path / "model" if from_folder else tiny()
    with LLM(source, {**small_cache(), "memory": memory, **quantisation}) as llm:
        tiers = {unit.tier for unit in llm._parts.stream.units if unit.rest is not None}
        assert tiers == {"host", "disk"}
        found = llm.generate(prompts, GREEDY, progress=False)
        if quantised:
            with LLM(tiny(), {**small_cache(), **quantisation}) as whole:
                assert [each.token_ids for each in found] == [
                    each.token_ids for each in whole.generate(prompts, GREEDY, progress=False)
                ]
            return
        assert [each.token_ids for each in found] == [greedy_of(plain, prompt, 5) for prompt in prompts]
        with torch.no_grad():
            for param in plain.parameters():
                param.mul_(1.5)
        llm.update_weights(plain.state_dict())
        llm.sleep()
        llm.wake()
        found = llm.generate(prompts, GREEDY, progress=False)
        assert [each.token_ids for each in found] == [greedy_of(plain, prompt, 5) for prompt in prompts]


def test_what_transformers_has_quantised(tmp_path):
    model = tiny()
    model.config.quantization_config = {"quant_method": "fp8"}
    model.config.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"nor be streamed\. Leave memory\.device out"):
        LLM(tmp_path, {"memory": {"device": 0}})
