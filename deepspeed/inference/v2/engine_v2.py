"""`InferenceEngineV2`: one forward for tokens of many sequences, over a paged cache; the caller schedules."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.checkpoint.pretrained import take_place, values_from
from deepspeed.config.inference import RaggedInferenceEngineConfig, read_inference_config
from deepspeed.errors import CheckpointError, DeepSpeedError, UsageError
from deepspeed.fusion.packed_linear import packed_parameters
from deepspeed.generate.blocks import BlockCache
from deepspeed.generate.build import build
from deepspeed.generate.params import SamplingParams
from deepspeed.generate.scheduler import ScheduledWork
from deepspeed.generate.sequence import Sequence as CachedSequence
from deepspeed.inference.checkpoint import DESCRIPTION, SlicedFiles, described_files, fill_slices, save_slices
from deepspeed.log import logger
from deepspeed.tensor_parallel import splits_of

__all__ = [
    "CheckpointEngineBase",
    "HuggingFaceCheckpointEngine",
    "InferenceEngineV2",
    "InferenceV2Policy",
    "ModelFacts",
    "SchedulingError",
    "SchedulingResult",
    "build_engine_from_ds_checkpoint",
    "build_hf_engine",
]

_PICKLED = "ds_model_config.pkl"


class SchedulingResult(Enum):
    """Whether a forward can run, or what stands against it."""

    Success = 0
    EngineSequenceLimitExceeded = 1
    BatchSequenceLimitExceeded = 2
    BatchTokenLimitExceeded = 3
    KVCacheLimitExceeded = 4
    SequenceTokenLimitExceeded = 5


class SchedulingError(DeepSpeedError, RuntimeError):
    """A batch that `can_schedule` refuses."""

    def __init__(self, result: SchedulingResult) -> None:
        super().__init__(f"the batch cannot be scheduled: {result.name}; ask can_schedule() or query() first")
        self.status = result


class ModelFacts:
    """A model's config, with the longest sequence under one name for all families."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._config, name)

    @property
    def max_seq_length(self) -> int:
        """The most positions that the model knows."""
        text = self._config.get_text_config()
        for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
            if isinstance(found := getattr(text, name, None), int):
                return found
        return 2048


class CheckpointEngineBase:
    """Where a model comes from: its config, and its tensors by name."""

    model_config: Any

    def parameters(self) -> Iterable[tuple[str, Tensor]]:
        """Names and tensors."""
        raise UsageError(f"{type(self).__name__} does not say what its parameters are; define parameters()")


class HuggingFaceCheckpointEngine(CheckpointEngineBase):
    """A folder, or a name on the hub, of a model of Transformers."""

    def __init__(self, model_name_or_path: str, auth_token: str | None = None, **_: Any) -> None:
        from transformers import AutoConfig

        self.model_name_or_path = str(model_name_or_path)
        self.model_config = ModelFacts(AutoConfig.from_pretrained(model_name_or_path, token=auth_token))

    def parameters(self) -> Iterable[tuple[str, Tensor]]:
        """Names and tensors of the files, which are read one by one."""
        from deepspeed.checkpoint.formats.safetensors import open_file

        for file in sorted(Path(self.model_name_or_path).glob("*.safetensors")):
            yield from open_file(file).tensors.items()


class InferenceV2Policy:
    """Which model an engine runs: a module that is there, or where it comes from."""

    def __init__(self, checkpoint_engine: Any = None, model: nn.Module | None = None) -> None:
        if (checkpoint_engine is None) == (model is None):
            raise UsageError("a policy has either a checkpoint engine or a model")
        self._model = model
        self._checkpoint_engine: Any = checkpoint_engine or _OfModel(model)

    @property
    def source(self) -> Any:
        """What `LLM` would take as its model."""
        return self._checkpoint_engine.model_name_or_path if self._model is None else self._model


class _OfModel(CheckpointEngineBase):
    def __init__(self, model: Any) -> None:
        self.model_config = ModelFacts(model.config)
        self._model = model

    def parameters(self) -> Iterable[tuple[str, Tensor]]:
        yield from self._model.named_parameters()


class InferenceEngineV2:
    """Logits of the last token that was put of each sequence; sequences live until `flush`."""

    @torch.inference_mode(False)  # what it keeps is written to later, in whatever mode that is
    def __init__(
        self, policy: InferenceV2Policy, engine_config: RaggedInferenceEngineConfig | Mapping[str, Any] | None = None
    ) -> None:
        self._config = read_inference_config(RaggedInferenceEngineConfig, engine_config)
        self._policy = policy
        with ExitStack() as stack:
            self._parts = build(policy.source, self._config, "auto", stack)
            self._stack = stack.pop_all()
        groups = self._parts.runner.cache.plan.groups
        self._blocks = BlockCache(groups, self._config.state_manager.block_size)
        self._total = [group.blocks for group in groups]
        self._sequences: dict[int, CachedSequence] = {}

    @property
    def free_blocks(self) -> Tensor:
        """Of each cache group."""
        return torch.tensor([pool.available for pool in self._blocks.pools], dtype=torch.int32)

    @property
    def n_kv_cache_groups(self) -> int:
        """Groups of layers that share block tables."""
        return len(self._blocks.pools)

    def model(self) -> nn.Module:
        """The model, as this rank holds it."""
        return self._parts.model

    @torch.inference_mode(False)
    @torch.no_grad()
    def put(self, batch_uids: Iterable[int], batch_tokens: Iterable[Tensor], do_checks: bool = True) -> Tensor:
        """Compute tokens of sequences: logits [sequences, vocabulary] after the last one of each."""
        uids = [int(uid) for uid in batch_uids]
        tensors = [torch.as_tensor(tokens).flatten() for tokens in batch_tokens]
        fractional = next((each for each in tensors if each.is_floating_point() and each.numel()), None)
        if fractional is not None:
            raise UsageError(f"put(): token ids are whole numbers; found a tensor of {fractional.dtype}")
        given = [each.tolist() for each in tensors]
        if (
            do_checks
            and (found := self.can_schedule(uids, [len(each) for each in given])) is not SchedulingResult.Success
        ):
            raise SchedulingError(found)
        self._check_tokens(uids, given)
        work = []
        for uid, tokens in zip(uids, given, strict=True):
            sequence = self._sequences.get(uid)
            if sequence is None:
                sequence = self._sequences[uid] = CachedSequence(uid, [], SamplingParams())
                self._blocks.claim(sequence, 0)
            end = len(sequence.tokens) + len(tokens)
            if not sequence.long and end > self._parts.runner.entry.short_context:
                self._blocks.free(sequence)  # all its keys become others
                self._blocks.claim(sequence, 0)
                sequence.long = True
            start = sequence.computed
            if self._blocks.grow(sequence, start, end) < end:
                raise SchedulingError(SchedulingResult.KVCacheLimitExceeded)
            work.append(ScheduledWork(sequence, start, end - start, True))
        for each, tokens in zip(work, given, strict=True):  # all have room
            each.sequence.tokens += tokens
        self._blocks.end_step()
        last, wanted = -1, []
        for each in work:
            last += each.count
            wanted.append(last)
        logits, _ = self._parts.runner.run(work, range(len(work)), wanted, [])
        for each in work:
            each.sequence.computed = len(each.sequence.tokens)
        return logits[: len(work)].clone()

    def _check_tokens(self, uids: Sequence[int], given: Sequence[Sequence[int]]) -> None:
        if len(set(uids)) != len(uids) or len(uids) != len(given) or not uids:
            raise UsageError(
                f"put(): {len(uids)} uids for {len(given)} lists of tokens; each uid once, and one at least"
            )
        for uid, tokens in zip(uids, given, strict=True):
            if not tokens:
                raise UsageError(f"put(): sequence {uid} has no tokens; it needs one at least")
            foreign = next((token for token in tokens if not 0 <= token < self._parts.vocabulary), None)
            if foreign is not None:
                raise UsageError(
                    f"put(): sequence {uid} has the token id {foreign}, but the vocabulary ends at "
                    f"{self._parts.vocabulary - 1}"
                )

    def _seen(self, uid: int) -> tuple[int, int]:
        """Tokens that are computed of a sequence, and the blocks that it holds in a group without a window."""
        sequence = self._sequences.get(uid)
        return (0, 0) if sequence is None else (sequence.computed, max(len(blocks) for blocks in sequence.blocks))

    def _needed(self, uid: int, tokens: int) -> int:
        """Blocks that a group without a window takes for more tokens."""
        seen, held = self._seen(uid)
        return max(-(-(seen + tokens) // self._blocks.block_size) - held, 0)

    def query(self, uid: int, max_request_tokens: int, max_request_blocks: Any) -> tuple[int, Tensor]:
        """(how many of so many tokens fit into so many more blocks, the blocks of each group that they take)."""
        seen, held = self._seen(uid)
        full = len(self._sequences) >= self._config.state_manager.max_tracked_sequences
        if full and uid not in self._sequences:
            return 0, torch.zeros(self.n_kv_cache_groups, dtype=torch.int32)
        spare = int(torch.as_tensor(max_request_blocks).min())
        room = max((held + spare) * self._blocks.block_size - seen, 0)
        tokens = max(min(int(max_request_tokens), room, self._parts.context - seen), 0)
        counts = torch.full((self.n_kv_cache_groups,), self._needed(uid, tokens), dtype=torch.int32)
        return tokens, counts if self.n_kv_cache_groups > 1 else counts[0]

    def can_schedule(self, uids: Iterable[int], lengths: Iterable[int]) -> SchedulingResult:
        """Whether one forward can take so many tokens of these sequences."""
        manager, free = self._config.state_manager, min(pool.available for pool in self._blocks.pools)
        listed = list(zip(map(int, uids), map(int, lengths), strict=True))
        new = sum(uid not in self._sequences for uid, _ in listed)
        if len(self._sequences) + new > manager.max_tracked_sequences:
            return SchedulingResult.EngineSequenceLimitExceeded
        if len(listed) > manager.max_ragged_sequence_count:
            return SchedulingResult.BatchSequenceLimitExceeded
        if sum(length for _, length in listed) > manager.max_ragged_batch_size:
            return SchedulingResult.BatchTokenLimitExceeded
        for uid, length in listed:
            if self._seen(uid)[0] + length > self._parts.context:
                return SchedulingResult.SequenceTokenLimitExceeded
            free -= self._needed(uid, length)
        return SchedulingResult.Success if free >= 0 else SchedulingResult.KVCacheLimitExceeded

    def get_remaining_block_capacity(self, uid: int) -> int:
        """Tokens of a sequence that its last block has room for."""
        return -self._seen(uid)[0] % self._blocks.block_size

    def flush(self, uid: int) -> None:
        """Forget a sequence, and free its blocks."""
        sequence = self._sequences.pop(uid, None)
        if sequence is None:
            logger.warning("flush: there is no sequence %s", uid)
            return
        self._blocks.free(sequence)

    def serialize(self, save_path: str) -> None:
        """Write the weights as safetensors and the config as JSON, for `build_engine_from_ds_checkpoint`.

        Weights in fewer bits are written as they are multiplied, in the model's dtype.
        """
        model = self._parts.model
        packed = packed_parameters(model)
        hidden = {f"{name.removesuffix('.weight')}." for name in packed}
        state = {
            name: tensor for name, tensor in model.state_dict().items() if name.rpartition("packed_")[0] not in hidden
        }
        state.update({name: each.weight for name, each in packed.items()})
        axis = self._parts.axis
        save_slices(state, Path(save_path), axis, splits_of(model))
        if axis is None or axis.rank == 0:
            model.config.save_pretrained(save_path)  # type: ignore[union-attr,operator]

    def close(self) -> None:
        """Free the cache, and let the model compute again what its class does."""
        self._sequences.clear()
        self._stack.close()


def build_hf_engine(
    path: str,
    engine_config: RaggedInferenceEngineConfig | Mapping[str, Any] | None = None,
    debug_level: int = logging.INFO,
) -> InferenceEngineV2:
    """An engine of a model of Transformers, or of what `serialize` wrote: a folder, or a name on the hub."""
    logger.setLevel(debug_level)
    if (Path(path) / DESCRIPTION).is_file() or (Path(path) / _PICKLED).exists():
        return build_engine_from_ds_checkpoint(path, engine_config, debug_level)
    return InferenceEngineV2(InferenceV2Policy(HuggingFaceCheckpointEngine(path)), engine_config)


def build_engine_from_ds_checkpoint(
    path: str,
    engine_config: RaggedInferenceEngineConfig | Mapping[str, Any] | None = None,
    debug_level: int = logging.INFO,
) -> InferenceEngineV2:
    """An engine of what `serialize` wrote, for any number of ranks."""
    logger.setLevel(debug_level)
    if not (Path(path) / DESCRIPTION).is_file():
        pickled = (Path(path) / _PICKLED).exists()
        found = f"{_PICKLED}, a pickled config, which would run code" if pickled else "nothing of the kind"
        raise CheckpointError(
            f"{path} has no {DESCRIPTION} of InferenceEngineV2.serialize(), but {found}. Build the engine from the "
            "model's own folder (build_hf_engine), and serialize it anew"
        )
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        config = AutoConfig.from_pretrained(path)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(config, "dtype", None))
    files: SlicedFiles = described_files(Path(path))
    values_from(model, files.whole)
    fill_slices(take_place(model), files, {})
    return InferenceEngineV2(InferenceV2Policy(model=model), engine_config)
