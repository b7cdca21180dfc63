"""Data loaders: each data-parallel rank's share of a dataset, reshuffled per epoch, resumable at the exact sample."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.discover import local_ranks
from deepspeed.errors import FeatureUnavailable, LayoutError
from deepspeed.log import logger, warn_once


class RankOrder(DistributedSampler[Any]):
    """A DistributedSampler that can begin in the middle of an epoch.

    From the first sample on, the order is that of torch's class. A place in the epoch is counted in samples over
    all ranks, so an epoch that was begun on some number of ranks can be finished on any other. Ranks always get
    equally many samples: the last few of an epoch are dropped with `drop_last`, else filled up with first ones.
    """

    def __init__(
        self, dataset: Sized, *, ranks: int, rank: int, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> None:
        # torch only asks the dataset for its length, although it is annotated as a Dataset.
        super().__init__(dataset, ranks, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        self._total = len(dataset)
        self._start = 0

    def seek(self, samples: int) -> None:
        """Let the next iteration begin after this many samples of the epoch, over all ranks."""
        self._start = min(samples, self._total)

    def left(self) -> int:
        """Samples that an iteration gives to each rank from the current place on."""
        left = self._total - self._start
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        order: Sequence[int] | torch.Tensor = range(self._total)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self._total, generator=generator)
        first, count = self._start + self.rank, self.left()
        own = order[first :: self.num_replicas][:count]
        yield from own.tolist() if isinstance(own, torch.Tensor) else own
        if len(own) < count:  # by one at most
            position = first + len(own) * self.num_replicas
            yield int(order[(position - self._total) % self._total])


class GivenOrder(Sampler[Any]):
    """A user's sampler, which gives one rank's part, begun in the middle of its epoch by passing over indices."""

    def __init__(self, sampler: Any, ranks: int) -> None:
        self._sampler = sampler
        self._ranks = ranks
        self._skip = 0

    def seek(self, samples: int) -> None:
        """Let the next iteration begin after this many samples of the epoch, over all ranks."""
        if samples % self._ranks:
            raise ValueError(
                f"the data loader cannot continue after {samples} samples: they do not divide by the {self._ranks} "
                "data-parallel ranks, and only the loader's own sampler can begin anywhere. Resume on the number of "
                "ranks that saved the position, or pass no data_sampler"
            )
        self._skip = samples // self._ranks

    def left(self) -> int | None:
        """Samples that an iteration gives from the current place on; None if the sampler does not know."""
        return max(0, len(self) - self._skip) if isinstance(self._sampler, Sized) else None

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._sampler), self._skip, None)

    def __len__(self) -> int:
        return len(self._sampler)


class RankStream(IterableDataset[Any]):
    """One rank's part of an iterable dataset: every rank reads the stream and keeps its place in each `ranks` samples.

    Ranks always get equally many samples: an incomplete last turn is dropped with `drop_last`, else filled up.
    """

    def __init__(self, dataset: Any, *, ranks: int, rank: int, drop_last: bool = False) -> None:
        self._dataset = dataset
        self._ranks = ranks
        self._rank = rank
        self._drop_last = drop_last

    def __iter__(self) -> Iterator[Any]:
        stream = iter(self._dataset)
        turn = list(islice(stream, self._ranks))
        while len(turn) == self._ranks:
            yield turn[self._rank]
            turn = list(islice(stream, self._ranks))
        if turn and not self._drop_last:
            yield turn[self._rank % len(turn)]

    def __len__(self) -> int:
        total = len(self._dataset)
        return total // self._ranks if self._drop_last else -(-total // self._ranks)


ROUTE_TRAIN = "train"
ROUTE_EVAL = "eval"
ROUTE_PREDICT = "predict"

_END = object()
_MOST_WORKERS = 2


class DeepSpeedDataLoader:
    """Batches of one data-parallel rank; `iter()` begins the next epoch, `next()` gives the next batch.

    [Note: epochs and places]
    Every pass is an epoch, with its own order, the same on a rerun: the sampler gets the epoch at the start of
    each pass. A pass that is left midway counts as an epoch. A script may still call `set_epoch`, here or on its
    sampler. `state_dict()` says the epoch, the samples of it that all ranks together have been given, and the seed;
    after `load_state_dict()` the next batch is the one that would have come next, also for a loop that is under way,
    and also on another number of ranks or with another batch size. Samples that workers read ahead do not count.
    What a dataset draws at random in a worker is the same on a rerun of an epoch, not after resuming in its middle.

    Without `drop_last` up to one sample per rank is repeated, so that all ranks make equally many steps; with it no
    sample is, and the last global batch is dropped if it is incomplete.

    An iterable dataset is read by every rank, and each keeps its share of the samples; pass `shard_iterable=False`
    if the dataset splits itself among ranks. It must split itself among workers, as torch asks. Resuming reads
    through what was already used.

    `local_rank` is used only if the data-parallel size is not given: if negative the loader is not distributed, else
    all processes are data-parallel. `tput_timer.start()` is called before each batch is fetched.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        pin_memory: bool,
        local_rank: int,
        tput_timer: Any,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Iterable[Any] | None = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: Mapping[str, Any] | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        shard_iterable: bool = True,
    ) -> None:
        _check(batch_size, deepspeed_dataloader_config)
        ranks, rank = _data_parallel(local_rank, data_parallel_world_size, data_parallel_rank)
        self.dataset = dataset
        self.batch_size = batch_size
        self.collate_fn = collate_fn
        self.tput_timer = tput_timer
        self.dataloader_drop_last = dataloader_drop_last
        self.post_process_func: Callable[[Any, dict[str, Any]], Any] | None = None
        """Called with each batch and the state of the sampler (or of this loader); its result is the batch."""
        # Pinning only serves copies to a device, and torch complains where there is none.
        self.pin_memory = pin_memory and get_accelerator().device_name() != "cpu"

        streams = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
        self.data_sampler: Any = data_sampler
        self._order: RankOrder | GivenOrder | None = None
        if streams:
            dataset = self._stream(dataset, ranks if shard_iterable else 1, rank if shard_iterable else 0)
        elif data_sampler is None:
            drop = dataloader_drop_last
            self._order = RankOrder(dataset, ranks=ranks, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop)
            self.data_sampler = self._order
        else:
            self._order = GivenOrder(data_sampler, ranks)
        self.num_local_io_workers = default_workers(streams) if num_local_io_workers is None else num_local_io_workers

        self._ranks, self._rank, self._seed = ranks, rank, seed
        # The epoch that the sampler heard of last; a sampler given by the user may begin at any.
        self._told = _epoch_of(self.data_sampler, 0)
        self._epoch = max(0, self._told)
        self._start = 0  # samples of the epoch, over all ranks, before this pass
        self._given = 0  # batches of this pass
        self._left: int | None = None  # batches of this pass, if known
        self._finished = False
        self._batches: Iterator[Any] | None = None
        # Seeds the workers. torch would draw that seed from the program's own random state at every pass.
        self._generator = torch.Generator()
        self.dataloader = self._torch_loader(dataset)

    def __len__(self) -> int:
        """Batches of a whole epoch, on each rank."""
        return len(self.dataloader)

    def __iter__(self) -> DeepSpeedDataLoader:
        if self._given:
            self._turn()
        self._finished = False
        return self

    def __next__(self) -> Any:
        if self._finished:
            raise StopIteration
        if self.tput_timer is not None:
            self.tput_timer.start()
        batch = next(self._open() if self._batches is None else self._batches, _END)
        if batch is _END and self._start and not self._given:
            # Resumed where nothing of the epoch was left.
            self._turn()
            batch = next(self._open(), _END)
        if batch is _END:
            self._turn()
            self._finished = True
            raise StopIteration
        self._given += 1
        if self.post_process_func is None:
            return batch
        state = getattr(self.data_sampler, "state_dict", self.state_dict)()
        return self.post_process_func(batch, state)

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be that epoch; naming the current epoch changes nothing."""
        if epoch != self._epoch:
            self._turn(epoch)

    def state_dict(self) -> dict[str, int]:
        """Where the next batch comes from: the same on every rank."""
        if self._left is not None and 0 < self._left <= self._given:
            return {"epoch": self._epoch + 1, "samples": 0, "seed": self._seed}
        samples = self._start + self._given * self.batch_size * self._ranks
        return {"epoch": self._epoch, "samples": samples, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where the state was taken, with its seed."""
        missing = {"epoch", "samples", "seed"} - set(state)
        if missing:
            raise ValueError(f"the data loader's state has no {', '.join(sorted(missing))}; it has {sorted(state)}")
        self._seek(state["samples"])
        self._turn(state["epoch"])
        self._start = state["samples"]
        self._seed = state["seed"]
        if isinstance(self._order, RankOrder):
            self._order.seed = self._seed
        self._finished = False
        self._tell_epoch()

    def _stream(self, dataset: Any, ranks: int, rank: int) -> RankStream:
        if self.data_sampler is not None:
            raise ValueError(
                f"a data_sampler ({type(self.data_sampler).__name__}) was given for the iterable dataset "
                f"{type(self.dataset).__name__}, which has no indices to sample; pass one or the other"
            )
        if ranks > 1:
            warn_once(
                f"the iterable dataset {type(dataset).__name__} is read by all {ranks} data-parallel ranks, and each "
                "keeps its share; if it splits itself among ranks, pass shard_iterable=False"
            )
        return RankStream(dataset, ranks=ranks, rank=rank, drop_last=self.dataloader_drop_last)

    def _torch_loader(self, dataset: Any) -> DataLoader[Any]:
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=self.batch_size,
            sampler=self._order,
            num_workers=self.num_local_io_workers,
            collate_fn=self.collate_fn,
            pin_memory=self.pin_memory,
            drop_last=self.dataloader_drop_last,
            generator=self._generator,
        )
        if isinstance(self._order, RankOrder) and len(loader) == 0:
            logger.warning(
                "the data loader has no batch: %d samples, %d ranks with a batch size of %d, drop_last %s",
                *(len(dataset), self._ranks, self.batch_size, self.dataloader_drop_last),
            )
        return loader

    def _turn(self, epoch: int | None = None) -> None:
        """Leave the pass; the next one is the given epoch, or the following one."""
        self._epoch = self._epoch + 1 if epoch is None else epoch
        self._start = self._given = 0
        self._left = None
        self._batches = None

    def _tell_epoch(self) -> None:
        for listener in (self.data_sampler, self.dataset):
            if hasattr(listener, "set_epoch"):
                listener.set_epoch(self._epoch)
        self._told = self._epoch

    def _seek(self, samples: int) -> int:
        """Go to a place in the epoch; returns how many batches must still be passed over."""
        if self._order is not None:
            self._order.seek(samples)
            return 0
        batches, rest = divmod(samples, self.batch_size * self._ranks)
        if rest:
            raise ValueError(
                f"the data loader cannot continue an iterable dataset after {samples} samples: they are not whole "
                f"batches of {self.batch_size} on {self._ranks} ranks. Resume with sizes that divide them"
            )
        return batches

    def _open(self) -> Iterator[Any]:
        epoch = _epoch_of(self.data_sampler, self._epoch)
        if epoch not in (self._told, self._epoch):
            self._turn(epoch)  # the script told the sampler itself
        self._tell_epoch()
        behind = self._seek(self._start)
        left = None if self._order is None else self._order.left()
        if left is not None:
            self._left = left // self.batch_size if self.dataloader_drop_last else -(-left // self.batch_size)
        self._generator.manual_seed(self._seed + self._epoch * self._ranks + self._rank)
        self._batches = iter(self.dataloader)
        for _ in range(behind):
            next(self._batches, None)
        return self._batches


class RepeatingLoader:
    """An endless iterator over a loader, epoch after epoch.

    `loader` is anything that can be iterated again and again (a data loader, a list), or a function that returns a
    fresh iterable. A torch DataLoader whose sampler takes an epoch gets the next one before each further pass.
    """

    def __init__(self, loader: Any) -> None:
        if not isinstance(loader, Iterable) and not callable(loader):
            raise TypeError(
                f"RepeatingLoader got a {type(loader).__name__}; it needs an iterable, or a function that returns one"
            )
        self.loader = loader
        # Begun with the first batch, so that a position loaded before it counts.
        self.data_iter: Iterator[Any] | None = None
        self._passes = 0

    def __iter__(self) -> RepeatingLoader:
        return self

    def __len__(self) -> int:
        """Batches of one pass."""
        return len(self.loader)

    def __next__(self) -> Any:
        if self.data_iter is None:
            self.data_iter = self._begin()
        batch = next(self.data_iter, _END)
        if batch is _END:
            self._passes += 1
            self._tell_epoch()
            self.data_iter = self._begin()
            batch = next(self.data_iter, _END)
        if batch is _END:
            self.data_iter = None
            raise ValueError(
                f"RepeatingLoader: a whole pass over the {type(self.loader).__name__} gave no batch, after "
                f"{self._passes} passes. Give it data, or, if it can be iterated only once, a function that returns "
                "a fresh one"
            )
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The state of the loader that is repeated; empty where that has none."""
        return dict(position_of(self.loader) or {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let that loader continue where the state was taken, as far as it can; the next batch is the first of it."""
        if state and seek(self.loader, state):
            self.data_iter = None

    def _begin(self) -> Iterator[Any]:
        return iter(self.loader if isinstance(self.loader, Iterable) else self.loader())

    def _tell_epoch(self) -> None:
        if isinstance(self.loader, DeepSpeedDataLoader):
            return  # it counts its own passes
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        places = (self.loader, getattr(self.loader, "sampler", None), batch_sampler)
        listeners: list[Any] = [*places, getattr(batch_sampler, "sampler", None)]
        for listener in listeners:
            if hasattr(listener, "set_epoch"):
                listener.set_epoch(_epoch_of(listener, self._passes - 1) + 1)
                return


def _epoch_of(listener: Any, unknown: int) -> int:
    """The epoch that a sampler was given last; `unknown` of one that does not say it, or takes none."""
    return getattr(listener, "epoch", unknown) if hasattr(listener, "set_epoch") else unknown


def position_of(loader: Any) -> Any:
    """Where the next batch of a loader comes from; None for one that cannot tell, such as a plain torch DataLoader."""
    tell = getattr(loader, "state_dict", None)
    return tell() if callable(tell) else None


def seek(loader: Any, position: Any) -> bool:
    """Let a loader continue there; False if it cannot."""
    load = getattr(loader, "load_state_dict", None)
    if callable(load):
        load(position)
    return callable(load)


def build_dataloader(
    dataset: Any,
    *,
    batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    route: str = ROUTE_TRAIN,
    pin_memory: bool = True,
    drop_last: bool = False,
    tput_timer: Any = None,
    shuffle: bool = True,
    **options: Any,
) -> DeepSpeedDataLoader:
    """What `engine.deepspeed_io` returns; only the route `train` shuffles and drives the throughput timer."""
    routes = (ROUTE_TRAIN, ROUTE_EVAL, ROUTE_PREDICT)
    if route not in routes:
        raise ValueError(f"deepspeed_io: route is {route!r}; it must be one of {', '.join(routes)}")
    return DeepSpeedDataLoader(
        dataset,
        batch_size,
        pin_memory,
        local_rank=0,
        tput_timer=tput_timer if route == ROUTE_TRAIN else None,
        data_parallel_world_size=data_parallel_size,
        data_parallel_rank=data_parallel_rank,
        dataloader_drop_last=drop_last,
        shuffle=shuffle and route == ROUTE_TRAIN,
        **options,
    )


def default_workers(streams: bool = False) -> int:
    """Worker processes of a loader that was not told: 2, or what the cores allow.

    None for an iterable dataset, which would have to split itself among them, none where training itself runs on
    the cores, and never more than this rank's share of the cores less one.
    """
    if streams or get_accelerator().device_name() == "cpu":
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, min(_MOST_WORKERS, cores // local_ranks() - 1))


def _check(batch_size: Any, config: Mapping[str, Any] | None) -> None:
    if config:
        raise FeatureUnavailable(
            f"deepspeed_dataloader_config has {', '.join(sorted(config))}, which this loader does not read. Pass "
            "nothing there: training_data of deepspeed.initialize is sampled as data_efficiency says",
            path="data_efficiency",
        )
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"the data loader's batch_size is {batch_size!r}; it must be a positive integer")


def _data_parallel(local_rank: int, size: int | None, rank: int | None) -> tuple[int, int]:
    """The number of data-parallel ranks, and this process's place among them."""
    if size is None:
        if rank is not None:
            raise LayoutError(
                f"the data loader got data_parallel_rank {rank} without data_parallel_world_size; give both or none"
            )
        return (comm.get_world_size(), comm.get_rank()) if local_rank >= 0 and comm.is_initialized() else (1, 0)
    if rank is None:
        rank = comm.get_rank() if size > 1 else 0
    if not 0 <= rank < size:
        raise LayoutError(f"the data loader got data_parallel_rank {rank} of {size}; it must lie in 0..{size - 1}")
    return size, rank
