"""Rollouts with log-probabilities, the gap to the trainer's, and weights that are streamed to another engine."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist

from deepspeed.errors import UsageError
from deepspeed.events import RolloutCompared
from deepspeed.hybrid.rollout import HybridEngineRollout, RolloutRequest, SamplingConfig, build_rollout
from tests.distributed.hybrid.test_hybrid_engine import llama, plain, prompts, start, train
from tests.harness import shared_ranks

pytestmark = pytest.mark.usefixtures("with_transformers")


@shared_ranks(2)
def test_rollouts():
    given = prompts(dist.get_rank())
    request = RolloutRequest(given["input_ids"], given["attention_mask"])
    for stage in (2, 3):
        engine, told = start(stage), []
        engine.events.subscribe(RolloutCompared, told.append)
        rollout = build_rollout({"engine": "hybrid_engine"}, engine)
        for step in range(2):
            batch = rollout.generate(request, SamplingConfig(max_new_tokens=7, n_samples_per_prompt=2, top_k=20))
            rows = 2 * len(request.prompt_ids)
            assert batch.batch_size == rows
            assert torch.equal(batch.input_ids[::2, :9], request.prompt_ids)
            assert not torch.equal(batch.input_ids[::2], batch.input_ids[1::2])
            gap = rollout.compare(batch)
            assert gap.tokens >= 2 * rows - 4, "of both ranks"
            assert 0 < gap.largest < 1e-4
            assert told[-1] is gap
            assert engine.training
            other = rollout.compare(batch, torch.where(batch.response_mask, batch.logprobs - 0.5, 0.0))
            assert other.mean == pytest.approx(0.5, abs=1e-6)
            train(engine, step)
        assert rollout.compare(batch).mean > 1e-4, "the trainer has moved on"
        greedy = rollout.generate(request, SamplingConfig(max_new_tokens=7, temperature=0.0))
        expected = plain(engine).generate(**given, max_new_tokens=7, do_sample=False)
        assert torch.equal(greedy.input_ids, expected[:, : greedy.seq_len])
    with pytest.raises(UsageError, match=r"found DeepSpeedEngine. Set hybrid_engine.enabled"):
        HybridEngineRollout(start(0, hybrid=False))
    with pytest.raises(UsageError, match="'hybrid_engine' is the only one"):
        build_rollout({"engine": "vllm"}, engine)


def live_bytes(known):
    """Of tensors that were not there before."""
    found = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if isinstance(each, torch.Tensor) and id(each) not in known
    }
    return sum(found.values())


@shared_ranks(2)
def test_streamed_weights():
    """Two buckets of memory at most, at every stage and with shared layers; another engine takes them."""
    from deepspeed.generate.llm import LLM

    limit = 70_000
    for stage, keys in ((0, {}), (1, {}), (3, {}), (3, {"tensor_parallel": {"autotp_size": 2}})):
        engine = start(stage, **keys)
        rank = dist.get_rank()
        given = prompts(0 if keys else rank) | {"max_new_tokens": 6, "do_sample": False}
        if keys:
            dist.broadcast(given["input_ids"], 0)
        train(engine, 0) if not keys else None
        expected = plain(engine).generate(**given)
        assert torch.equal(engine.generate(**given), expected), "with the slices of training, too"
        target = LLM(llama(), {"state_manager": {"memory_config": {"mode": "allocate", "size": 8}}})
        engine.free_inference_cache()
        gc.collect()
        known = {id(each) for each in gc.get_objects() if isinstance(each, torch.Tensor)}
        most, count = 0, 0
        for bucket in engine.stream_weights(limit):
            assert sum(value.nbytes for value in bucket.values()) <= limit
            most = max(most, live_bytes(known))
            count += target.update_weights(bucket)
            del bucket
        assert 0 < most <= 2 * limit
        assert count == len(list(target.model.parameters()))
        row = given["input_ids"][0].tolist()
        from deepspeed.generate.params import SamplingParams

        tokens = target.generate([row], SamplingParams(max_tokens=6, temperature=0), progress=False)[0].token_ids
        assert tokens == expected[0, 9:].tolist()[: len(tokens)]
        halves = [value for bucket in engine.stream_weights("1GB", dtype=torch.bfloat16) for value in bucket.values()]
        assert {value.dtype for value in halves} == {torch.bfloat16}
        target.close()
        engine.destroy()


@shared_ranks(2)
def test_other_precisions_and_places():
    """Numbers of half the width, autocast, parameters in host memory: rollouts are the trainer's."""
    given = prompts(dist.get_rank())
    request = RolloutRequest(given["input_ids"], given["attention_mask"])
    offload = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    for keys, within in (
        ({"bf16": {"enabled": True}}, 0.05),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, 0.05),
        ({"zero_optimization": offload}, 1e-4),
    ):
        engine = start(3, **keys)
        rollout = build_rollout({"engine": "hybrid_engine"}, engine)
        train(engine, 0)
        batch = rollout.generate(request, SamplingConfig(max_new_tokens=7))
        assert 0 < rollout.compare(batch).largest < within, keys
        train(engine, 1)
        engine.destroy()
