"""The engine whose caller schedules, and the published pieces of its cache."""

from __future__ import annotations

import pytest
import torch
from deepspeed.inference.v2.ragged import (
    DSStateManager,
    DSStateManagerConfig,
    KVCacheConfig,
    MemoryConfig,
    PlaceholderSequenceDescriptor,
    RaggedBatchWrapper,
    split_kv,
)
from deepspeed.inference.v2.ragged.blocked_allocator import BlockedAllocator
from deepspeed.inference.v2.ragged.kv_cache import BlockedKVCache

from deepspeed.errors import CheckpointError, UsageError
from deepspeed.inference import RaggedInferenceEngineConfig, build_engine_from_ds_checkpoint, build_hf_engine
from deepspeed.inference.v2 import InferenceEngineV2, SchedulingError, SchedulingResult
from deepspeed.inference.v2.engine_v2 import InferenceV2Policy
from tests.unit.generate.families import tiny
from tests.unit.generate.test_parity import LONGROPE
from tests.unit.inference.test_engine import ids, llama

MANAGER = {
    "memory_config": {"mode": "allocate", "size": 8},
    "max_context": 200,
    "max_ragged_batch_size": 100,
    "max_ragged_sequence_count": 3,
    "max_tracked_sequences": 4,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    llama().save_pretrained(path)
    return str(path)


@pytest.fixture
def engine(folder):
    made = build_hf_engine(folder, RaggedInferenceEngineConfig(state_manager=MANAGER))
    yield made
    made.close()


def last(tokens):
    return llama()(tokens[None]).logits[0, -1]


def test_logits_of_prompts_in_pieces(engine):
    a, b = ids(70), ids(33) + 1
    first = engine.put([7, 5], [a[:40], b[:31]])
    torch.testing.assert_close(first, torch.stack([last(a[:40]), last(b[:31])]), atol=1e-5, rtol=0)
    second = engine.put([5, 7], [b[31:], a[40:]])
    torch.testing.assert_close(second, torch.stack([last(b), last(a)]), atol=1e-5, rtol=0)
    assert engine.free_blocks.tolist() == [8 - 3 - 2]
    assert engine.get_remaining_block_capacity(7) == 96 - 70
    engine.flush(7)
    assert engine.free_blocks.tolist() == [6]
    assert engine.get_remaining_block_capacity(7) == 0
    assert engine.n_kv_cache_groups == 1
    assert engine._policy._checkpoint_engine.model_config.max_seq_length == 256


def test_what_can_be_scheduled(engine):
    can, result = engine.can_schedule, SchedulingResult
    assert can([1], [100]) is result.Success
    assert can([1], [101]) is result.BatchTokenLimitExceeded
    assert can([1, 2, 3, 4], [1] * 4) is result.BatchSequenceLimitExceeded
    assert can([1, 2, 3, 4, 5], [1] * 5) is result.EngineSequenceLimitExceeded
    assert engine.query(1, 70, 8)[0] == 70
    assert engine.query(1, 70, 1) == (32, torch.tensor(1))
    engine.put([1, 2], [ids(96), ids(4)])
    assert can([1], [104]) is result.BatchTokenLimitExceeded
    engine.put([1], [ids(100)])
    assert can([1], [5]) is result.SequenceTokenLimitExceeded
    assert engine.query(1, 9, 8)[0] == 4
    with pytest.raises(SchedulingError, match="SequenceTokenLimitExceeded"):
        engine.put([1], [ids(5)])
    assert can([3], [32]) is result.KVCacheLimitExceeded
    with pytest.raises(SchedulingError, match="KVCacheLimitExceeded"):
        engine.put([3], [ids(40)], do_checks=False)
    engine.flush(1)
    assert can([3], [32]) is result.Success


def test_a_sequence_that_leaves_the_short_context():
    model = tiny("phi3", **LONGROPE)
    tokens, other = ids(34), ids(9)
    with torch.no_grad():
        expected = [model(each[None]).logits[0, -1] for each in (tokens[:30], other[:5], tokens[:33], other, tokens)]
    engine = InferenceEngineV2(InferenceV2Policy(model=model), {"state_manager": MANAGER})
    parts = ([tokens[:30], other[:5]], [tokens[30:33], other[5:]], [tokens[33:]])
    found = [row for part in parts for row in engine.put([1, 2][: len(part)], part)]
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), atol=1e-4, rtol=1e-4)
    engine.close()


def test_a_batch_without_room_changes_no_sequence(engine):
    engine.put([1], [ids(90)])
    with pytest.raises(SchedulingError, match="KVCacheLimitExceeded"):
        engine.put([1, 2], [ids(4), ids(190)], do_checks=False)
    engine.flush(2)
    torch.testing.assert_close(engine.put([1], [ids(3) + 1])[0], last(torch.cat((ids(90), ids(3) + 1))))


def test_inference_mode_may_come_and_go(folder):
    with torch.inference_mode():
        engine = build_hf_engine(folder, {"state_manager": MANAGER})
        engine.put([1], [ids(9)])
    torch.testing.assert_close(engine.put([1], [ids(3)])[0], last(torch.cat((ids(9), ids(3)))))
    engine.close()


@pytest.mark.parametrize(
    ("uids", "tokens", "message"),
    [
        ([1, 1], [[1], [2]], "each uid once"),
        ([], [], "one at least"),
        ([1], [[]], "has no tokens"),
        ([1], [[999]], "the token id 999, but the vocabulary ends at 127"),
    ],
)
def test_what_is_wrong_with_a_batch(engine, uids, tokens, message):
    with pytest.raises(UsageError, match=message):
        engine.put(uids, [torch.tensor(each, dtype=torch.long) for each in tokens])
    assert engine.free_blocks.tolist() == [8]


@pytest.mark.parametrize(("mode", "memory"), [(None, {}), ("w8a16", {}), (None, {"device": "50KB"})])
def test_serialize(folder, tmp_path, mode, memory):
    config = {"state_manager": MANAGER, "quantization": {"quantization_mode": mode}, "memory": memory}
    engine = build_hf_engine(folder, config)
    expected = engine.put([1], [ids(20)])
    engine.serialize(str(tmp_path))
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".safetensors"}
    again = build_engine_from_ds_checkpoint(str(tmp_path), config)
    torch.testing.assert_close(again.put([1], [ids(20)]), expected, atol=1e-2 if mode else 0, rtol=0)


def test_serialize_packed_experts(tmp_path):
    tiny("mixtral").save_pretrained(tmp_path / "model")
    config = {"state_manager": MANAGER, "quantization": {"quantization_mode": "w8a16"}}
    engine = build_hf_engine(str(tmp_path / "model"), config)
    expected = engine.put([1], [ids(20)])
    engine.serialize(str(tmp_path / "saved"))
    again = build_engine_from_ds_checkpoint(str(tmp_path / "saved"), config)
    torch.testing.assert_close(again.put([1], [ids(20)]), expected, atol=1e-2, rtol=0)


def test_a_pickled_config_is_refused(tmp_path):
    (tmp_path / "ds_model_config.pkl").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="a pickled config, which would run code"):
        build_hf_engine(str(tmp_path))


def test_blocks():
    allocator = BlockedAllocator(4)
    blocks = allocator.allocate(3)
    assert (sorted(blocks.tolist()), allocator.free_blocks) == ([0, 1, 2], 1)
    with pytest.raises(UsageError, match="2 blocks are asked for, 1 of 4 are free"):
        allocator.allocate(2)
    allocator.free(blocks[:1])
    with pytest.raises(UsageError, match="not held"):
        allocator.free(blocks[:1])
    assert allocator.free_blocks == 2


def test_a_state_manager():
    memory = MemoryConfig(mode="allocate", size=4)
    kind = KVCacheConfig(block_size=2, cache_shape=(2, 1, 4), cache_dtype="fp32")
    manager = DSStateManager(DSStateManagerConfig(memory_config=memory, max_context=8), (kind,))
    sequence = manager.get_or_create_sequence(9)
    sequence.extend_kv_cache(manager.allocate_blocks(2))
    sequence.pre_forward(3)
    sequence.post_forward()
    assert (sequence.seen_tokens, sequence.cur_allocated_blocks, manager.free_blocks.tolist()) == (3, 2, [2])
    keys, values = split_kv(manager.get_cache(1))
    assert keys.shape == values.shape == (4, 2, 1, 4)
    manager.flush_sequence(9)
    assert (manager.n_tracked_sequences, manager.free_blocks.tolist()) == (0, [4])
    cache = BlockedKVCache((kind,), memory, offload=True)
    blocks = cache.reserve(2)
    cache.get_cache(0)[blocks[1]] = 7
    moved = cache.offload(blocks)
    cache.get_cache(0).zero_()
    back = cache.restore(moved)
    assert cache.get_cache(0)[back[1]].eq(7).all()


def test_a_batch():
    batch = RaggedBatchWrapper(DSStateManagerConfig(max_ragged_batch_size=5, max_ragged_sequence_count=2))
    for tokens in ([1, 2, 3], [4]):
        batch.insert_sequence(PlaceholderSequenceDescriptor(), torch.tensor(tokens))
    assert batch.input_ids().tolist() == [1, 2, 3, 4]
    assert batch.tokens_to_seq().tolist() == [0, 0, 0, 1]
    with pytest.raises(UsageError, match="max_ragged_sequence_count"):
        batch.insert_sequence(PlaceholderSequenceDescriptor(), torch.tensor([1]))
    batch.clear()
    assert batch.input_ids().tolist() == []
    batch.insert_sequence(PlaceholderSequenceDescriptor(), torch.tensor([1], device="meta"))
    assert batch.input_ids().is_meta, "they stay on their device"
