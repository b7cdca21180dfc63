"""Which samples a data-parallel rank reads and in which order, from any place in an epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DistributedSampler, IterableDataset, Sampler

__all__ = ["GivenOrder", "HasEpoch", "RankOrder", "RankStream", "TakesEpoch"]


@runtime_checkable
class TakesEpoch(Protocol):
    """A sampler, dataset or loader whose order depends on the epoch it was told."""

    def set_epoch(self, epoch: int) -> None: ...


@runtime_checkable
class HasEpoch(TakesEpoch, Protocol):
    """One that also says which epoch it was told."""

    epoch: int


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

    def __init__(self, sampler: Iterable[Any], ranks: int) -> None:
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
        if not isinstance(self._sampler, Sized):
            raise TypeError(f"{type(self._sampler).__name__} has no len()")
        return len(self._sampler)


class RankStream(IterableDataset[Any]):
    """One rank's part of an iterable dataset: every rank reads the stream and keeps its place in each `ranks` samples.

    Ranks always get equally many samples: an incomplete last turn is dropped with `drop_last`, else filled up.
    """

    def __init__(self, dataset: Iterable[Any], *, ranks: int, rank: int, drop_last: bool = False) -> None:
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
        if not isinstance(self._dataset, Sized):
            raise TypeError(f"{type(self._dataset).__name__} has no len()")
        total = len(self._dataset)
        return total // self._ranks if self._drop_last else -(-total // self._ranks)
