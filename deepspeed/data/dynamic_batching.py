"""Dynamic batching: micro-batches of about equally many tokens, and a learning rate that follows their samples."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from deepspeed.config.data import DynamicBatchingConfig
from deepspeed.data.indexed_dataset import MMapIndexedDataset
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.log import logger

__all__ = [
    "VariableBatchLoader",
    "VariableBatchSizeLR",
    "batch_by_seqlens",
    "dataloader_for_variable_batch_size",
    "get_dataloader_and_lr_scheduler_for_variable_batch_size",
    "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed",
    "lr_scheduler_for_variable_batch_size",
    "scale_lr",
]

MicroBatch = tuple[int, list[int]]
"""The number of a batch, and the samples of one of its micro-batches."""
_SECTION = "data_efficiency.data_sampling.dynamic_batching"


def batch_by_seqlens(
    seqlens: Sequence[int],
    max_tokens: int,
    sequence_ids_per_mb: Sequence[int] | None = None,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: str = "dataloader",
    effective_batch_size: int = 1,
    required_microbatches_of_same_size: bool = False,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[list[MicroBatch], list[int], list[int]]:
    """Pack samples into micro-batches of at most `max_tokens`, `effective_batch_size` of which make a batch.

    Returns the micro-batches, and of each batch its samples and its longest sequence. `sequence_ids_per_mb` are the
    samples to use. Micro-batches that would make no whole batch at the end are left out, as are samples that are too
    long, with a warning. With `required_microbatches_of_same_size` those of a batch have equally many samples.
    """
    if sequence_picking_order not in ("dataloader", "random", "seqlen"):
        raise UsageError(
            f"sequence_picking_order is {sequence_picking_order!r}; it must be dataloader, random or seqlen"
        )
    ids = list(range(len(seqlens)) if sequence_ids_per_mb is None else sequence_ids_per_mb)
    long = [each for each in ids if seqlens[each] > max_tokens]
    if long:
        logger.warning(
            "dynamic batching leaves out %d samples longer than max_tokens %d: %s", len(long), max_tokens, long[:8]
        )
    if sequence_picking_order == "random":
        random.Random(seed).shuffle(ids)
    if sequence_picking_order == "seqlen":
        ids.sort(key=lambda each: (seqlens[each], each))
    ids = [each for each in ids if seqlens[each] <= max_tokens]
    wide = effective_batch_size if required_microbatches_of_same_size else 1
    packs = [pack for group in _groups(ids, seqlens, max_tokens, max_batch_size, wide) for pack in group]
    packs = [pack for pack in packs if len(pack) >= min_batch_size]
    whole = len(packs) // effective_batch_size
    if not whole:
        raise UsageError(
            f"dynamic batching: {len(ids)} samples of at most {max_tokens} tokens make {len(packs)} micro-batches "
            f"of at least {min_batch_size}, fewer than the {effective_batch_size} of a batch; raise max_tokens, or "
            "lower min_batch_size or train_batch_size"
        )
    batches = [packs[at * effective_batch_size : (at + 1) * effective_batch_size] for at in range(whole)]
    sizes = [sum(map(len, batch)) for batch in batches]
    longest = [max(seqlens[each] for pack in batch for each in pack) for batch in batches]
    if verbose:
        for number, batch in enumerate(batches):
            logger.info("batch %d: %d samples, up to %d tokens: %s", number, sizes[number], longest[number], batch)
    return [(number, pack) for number, batch in enumerate(batches) for pack in batch], sizes, longest


def _groups(
    ids: Sequence[int], seqlens: Sequence[int], tokens: int, most: int | None, wide: int
) -> Iterator[list[list[int]]]:
    """Packs side by side, `wide` of them, that take one sample each at a time until one of them is full."""
    packs: list[list[int]] = [[] for _ in range(wide)]
    held = [0] * wide
    for at in range(0, len(ids) - wide + 1, wide):
        row = ids[at : at + wide]
        after = [total + seqlens[each] for total, each in zip(held, row, strict=True)]
        if packs[0] and (max(after) > tokens or (most is not None and len(packs[0]) >= most)):
            yield packs
            packs, after = [[] for _ in range(wide)], [seqlens[each] for each in row]
        for pack, each in zip(packs, row, strict=True):
            pack.append(each)
        held = after
    if packs[0]:
        yield packs


def scale_lr(base_batch_size: int, batch_size: int, base_lr: float = 1, method: str = "linear") -> float:
    """The learning rate of a batch: by its samples, by their square root, or as it is."""
    if method == "linear":
        return base_lr * batch_size / base_batch_size
    if method == "sqrt":
        return base_lr * math.sqrt(batch_size / base_batch_size)
    if method in (None, "none"):
        return base_lr
    raise UsageError(f"lr_scaling_method is {method!r}; it must be linear, sqrt or none")


class _Packed(torch.utils.data.Dataset[list[Any]]):
    """Micro-batches as samples, padded to a length where the stages of a pipeline need one."""

    def __init__(self, dataset: Any, packs: Sequence[MicroBatch], lengths: Sequence[int], pad: Any) -> None:
        self._dataset, self._packs, self._lengths, self._pad = dataset, packs, lengths, pad

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, number: int) -> list[Any]:
        batch, ids = self._packs[number]
        samples = [self._dataset[each] for each in ids]
        return samples if self._pad is None else [self._pad(each, self._lengths[batch]) for each in samples]


class VariableBatchLoader:
    """The micro-batches of one rank, epoch after epoch; its state counts those that all ranks were given."""

    def __init__(self, packed: _Packed, rank: int, replicas: int, size: int, options: dict[str, Any]) -> None:
        if len(packed) % (replicas * size):
            raise UsageError(
                f"{len(packed)} micro-batches do not divide by {replicas} ranks with {size} at a time; "
                "effective_batch_size must be a multiple of their product"
            )
        self._packed, self._rank, self._replicas, self._size = packed, rank, replicas, size
        self._options = options
        self._given = 0  # micro-batches of all ranks, in this epoch
        self._batches: Iterator[Any] | None = None
        self.post_process_func: Callable[[Any, dict[str, Any]], Any] | None = None

    def __len__(self) -> int:
        return len(self._packed) // (self._replicas * self._size)

    def __iter__(self) -> VariableBatchLoader:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            order = list(range(self._given + self._rank, len(self._packed), self._replicas))
            loader = DataLoader(self._packed, batch_size=self._size, sampler=order, **self._options)
            self._batches = iter(loader)
        try:
            batch = next(self._batches)
        except StopIteration:
            self._given, self._batches = 0, None
            raise
        self._given += self._replicas * self._size
        return batch if self.post_process_func is None else self.post_process_func(batch, self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Where the next micro-batch comes from."""
        return {"micro_batches": self._given % len(self._packed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken, on any number of ranks."""
        self._given, self._batches = state["micro_batches"], None


def dataloader_for_variable_batch_size(
    dataset: Any,
    microbatch_ids: Sequence[MicroBatch],
    batch_max_seqlens: Sequence[int],
    dataloader_rank: int = 0,
    dataloader_batch_size: int = 1,
    dataloader_num_replicas: int = 1,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    dataloader_num_workers: int = 2,
    dataloader_pin_memory: bool = False,
    required_microbatches_of_same_seqlen: bool = False,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
) -> tuple[VariableBatchLoader, dict[str, Any]]:
    """The loader of a rank, and arguments of `engine.deepspeed_io` that make a plain one.

    Samples are padded to the longest of their batch where all micro-batches need that length.
    """
    if required_microbatches_of_same_seqlen and sample_padding_fn is None:
        raise UsageError("micro-batches of one length need sample_padding_fn(sample, length), which was not given")
    pad = sample_padding_fn if required_microbatches_of_same_seqlen else None

    def collate(packs: list[list[Any]]) -> Any:
        samples = [each for pack in packs for each in pack]
        return samples if dataloader_collate_fn is None else dataloader_collate_fn(samples)

    packed = _Packed(dataset, microbatch_ids, batch_max_seqlens, pad)
    options = {"num_workers": dataloader_num_workers, "pin_memory": dataloader_pin_memory, "collate_fn": collate}
    loader = VariableBatchLoader(packed, dataloader_rank, dataloader_num_replicas, dataloader_batch_size, options)
    io = {
        "dataset": packed,
        "batch_size": dataloader_batch_size,
        "pin_memory": dataloader_pin_memory,
        "data_sampler": None,
        "collate_fn": collate,
        "num_local_io_workers": dataloader_num_workers,
    }
    return loader, io


class VariableBatchSizeLR:
    """A schedule whose learning rate is scaled by the samples of the batch at hand; step k has batch k."""

    def __init__(
        self,
        lr_scheduler: Any,
        base_batch_size: int,
        batch_sizes: Sequence[int],
        dataloader: Any,
        lr_scaling_method: str = "linear",
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        self.base_lr_scheduler = lr_scheduler
        self.base_batch_size, self.batch_sizes = base_batch_size, list(batch_sizes)
        self.dataloader, self.lr_scaling_method, self.verbose = dataloader, lr_scaling_method, verbose
        self.last_epoch = last_epoch + 1
        self._base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self._scale()

    @property
    def optimizer(self) -> Any:
        """Whose learning rates these are."""
        return self.base_lr_scheduler.optimizer

    def state_dict(self) -> dict[str, Any]:
        """The step, and the state of the schedule inside."""
        return {
            "base_lr_scheduler": self.base_lr_scheduler.state_dict(),
            "base_batch_size": self.base_batch_size,
            "lr_scaling_method": self.lr_scaling_method,
            "batch_sizes": list(self.batch_sizes),
            "last_epoch": self.last_epoch,
            "base_lrs": list(self._base_lrs),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where the state was taken."""
        self.base_lr_scheduler.load_state_dict(state_dict["base_lr_scheduler"])
        self.base_batch_size, self.batch_sizes = state_dict["base_batch_size"], list(state_dict["batch_sizes"])
        self.lr_scaling_method, self.last_epoch = state_dict["lr_scaling_method"], state_dict["last_epoch"]
        self._base_lrs = list(state_dict["base_lrs"])
        self._scale()

    def get_lr(self) -> list[float]:
        """The learning rates in force."""
        return [group["lr"] for group in self.optimizer.param_groups]

    get_last_lr = get_lr

    def step(self, epoch: int | None = None) -> None:
        """Go to the next batch."""
        for group, lr in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = lr
        self.base_lr_scheduler.step() if epoch is None else self.base_lr_scheduler.step(epoch)
        self._base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._scale()

    def _scale(self) -> None:
        size = self.batch_sizes[self.last_epoch % len(self.batch_sizes)]
        for group, lr in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = scale_lr(self.base_batch_size, size, lr, self.lr_scaling_method)
        if self.verbose:
            logger.info("batch %d of %d samples: learning rates %s", self.last_epoch, size, self.get_lr())


def lr_scheduler_for_variable_batch_size(
    base_batch_size: int,
    batch_sizes: Sequence[int],
    dataloader: Any,
    lr_scheduler_or_optimizer: Any,
    lr_scaling_method: str = "linear",
    verbose: bool = False,
) -> VariableBatchSizeLR:
    """The schedule, or the constant learning rate of an optimizer, scaled by the samples of each batch."""
    inner = lr_scheduler_or_optimizer
    if isinstance(inner, Optimizer) or not hasattr(inner, "step") or hasattr(inner, "zero_grad"):
        inner = LambdaLR(getattr(inner, "optimizer", inner), lambda _: 1.0)
    return VariableBatchSizeLR(inner, base_batch_size, batch_sizes, dataloader, lr_scaling_method, verbose=verbose)


def get_dataloader_and_lr_scheduler_for_variable_batch_size(
    dataset: Any,
    dataset_seqlens: Sequence[int],
    max_tokens: int,
    effective_batch_size: int,
    dataset_filter_ids: Sequence[int] | None = None,
    lr_scaling_method: str = "linear",
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: str = "dataloader",
    dataloader_batch_size: int = 1,
    dataloader_rank: int = 0,
    dataloader_num_replicas: int = 1,
    dataloader_num_workers: int = 0,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    dataloader_pin_memory: bool = False,
    lr_scheduler_or_optimizer: Any = None,
    required_microbatches_of_same_size: bool = False,
    required_microbatches_of_same_seqlen: bool = False,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[VariableBatchLoader, VariableBatchSizeLR | None, dict[str, Any]]:
    """The loader, the schedule (None without one or an optimizer) and arguments of `engine.deepspeed_io`."""
    if len(dataset_seqlens) != len(dataset):
        raise UsageError(f"dataset_seqlens has {len(dataset_seqlens)} lengths, and the dataset {len(dataset)} samples")
    packs, sizes, longest = batch_by_seqlens(
        dataset_seqlens,
        max_tokens,
        dataset_filter_ids,
        min_batch_size,
        max_batch_size,
        sequence_picking_order,
        effective_batch_size,
        required_microbatches_of_same_size,
        verbose,
        seed,
    )
    loader, io = dataloader_for_variable_batch_size(
        dataset,
        packs,
        longest,
        dataloader_rank,
        dataloader_batch_size,
        dataloader_num_replicas,
        dataloader_collate_fn,
        dataloader_num_workers,
        dataloader_pin_memory,
        required_microbatches_of_same_seqlen,
        sample_padding_fn,
    )
    schedule = lr_scheduler_or_optimizer
    if schedule is not None:
        schedule = lr_scheduler_for_variable_batch_size(
            effective_batch_size, sizes, loader, schedule, lr_scaling_method, verbose
        )
    return loader, schedule, io


def get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
    dataset: Any,
    engine: Any,
    dataset_seqlens: Sequence[int] | None = None,
    dataset_filter_ids: Sequence[int] | None = None,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
    batch_seqlens_fn: Callable[[Any], int] | None = None,
) -> tuple[VariableBatchLoader, VariableBatchSizeLR | None, dict[str, Any]]:
    """The same as the engine's config says; assign the results to `engine.training_dataloader` and `lr_scheduler`.

    Lengths are those given, what `batch_seqlens_fn` says of each sample, or the analyzer's under `metrics_path`.
    """
    data = engine._config.schema.data_efficiency
    section: DynamicBatchingConfig | None = data.dynamic_batching
    if section is None or section.max_tokens is None:
        raise DeepSpeedConfigError(f"{_SECTION}.enabled is not true; set it and max_tokens", path=f"{_SECTION}.enabled")
    lengths = dataset_seqlens
    if lengths is None and batch_seqlens_fn is not None:
        lengths = [int(batch_seqlens_fn(dataset[number])) for number in range(len(dataset))]
    if lengths is None:
        if section.metrics_path is None:
            raise DeepSpeedConfigError(
                f"{_SECTION}.metrics_path is missing; give the folder of the metric seqlen, or dataset_seqlens",
                path=f"{_SECTION}.metrics_path",
            )
        metric = MMapIndexedDataset(str(Path(section.metrics_path, "seqlen", "seqlen_sample_to_metric")))
        lengths = [int(metric[number][0]) for number in range(len(metric))]
    layout = engine._parts.layout
    staged = not engine._parts.kind.whole
    return get_dataloader_and_lr_scheduler_for_variable_batch_size(
        dataset,
        lengths,
        section.max_tokens,
        engine.train_batch_size(),
        dataset_filter_ids,
        section.lr_scaling_method,
        section.min_batch_size,
        section.max_batch_size,
        section.sequence_picking_order,
        engine.train_micro_batch_size_per_gpu(),
        layout.data.rank,
        layout.data.size,
        data.data_sampling.num_workers,
        dataloader_collate_fn,
        data.data_sampling.pin_memory and engine.device.type != "cpu",
        engine.lr_scheduler or engine.basic_optimizer,
        staged,
        staged,
        sample_padding_fn,
        section.verbose,
        data.seed,
    )
