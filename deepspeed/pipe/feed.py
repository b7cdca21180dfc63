"""Where the micro-batches of a pipeline come from: an iterator of the script, or the engine's own loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from deepspeed.errors import UsageError
from deepspeed.pipe.executor import Batch
from deepspeed.runtime.dataloader import RepeatingLoader

__all__ = ["Feed"]


class Feed:
    """Takes micro-batches, on the ranks that need them: those of the first and of the last stage."""

    def __init__(self, loader: Any, *, needed: bool) -> None:
        self.needed = needed
        self.batch_fn: Callable[[Any], Any] | None = None
        self._source: Iterable[Any] | None = None
        self._iterator: Iterator[Any] | None = None
        self._again = False
        if loader is not None:
            self.use_loader(RepeatingLoader(loader))

    def use_loader(self, loader: Iterable[Any]) -> None:
        """Take batches from the beginning of a loader from now on."""
        self.use_iterator(loader)

    def use_iterator(self, iterator: Iterator[Any] | Iterable[Any] | None, *, again: bool = False) -> None:
        """Take batches from an iterator from now on; what is none is an error when they are taken, on all ranks.

        A source that is given `again` with every batch must be an iterator: a loader would begin anew each time.
        """
        self._source, self._iterator, self._again = iterator if self.needed else None, None, again

    def reopen(self) -> None:
        """Take batches from where the loader was told to continue."""
        if callable(getattr(self._source, "load_state_dict", None)):
            self._iterator = None

    def take(self, count: int) -> list[Batch]:
        """So many micro-batches, or fewer at the end of the data; nothing where they are not needed."""
        if not self.needed:
            return []
        if self._source is None:
            raise UsageError(
                "there is no data: pass train_batch(data_iter=...), or training_data to deepspeed.initialize; the "
                "ranks of the first and of the last stage need it"
            )
        if self._iterator is None:
            goes_on = hasattr(self._source, "__next__")
            if self._again and not goes_on:
                raise UsageError(
                    f"train_batch(data_iter=...) takes an iterator, which iter(loader) makes once for many batches; "
                    f"found a {type(self._source).__name__}, of which every batch would be the first. Or let the "
                    "engine keep it: engine.set_dataloader(loader), and train_batch()"
                )
            self._iterator = cast("Iterator[Any]", self._source) if goes_on else iter(self._source)
        batches: list[Batch] = []
        while len(batches) < count:
            try:
                batches.append(self._pair(next(self._iterator)))
            except StopIteration:
                break
        return batches

    def lend(self, iterator: Iterator[Any] | Iterable[Any] | None) -> Feed:
        """Another source with the same batch function, for an evaluation."""
        other = Feed(None, needed=self.needed)
        other.batch_fn = self.batch_fn
        other.use_iterator(iterator)
        return other

    def _pair(self, batch: Any) -> Batch:
        if self.batch_fn is not None:
            batch = self.batch_fn(batch)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            found = f"{len(batch)} parts" if isinstance(batch, (tuple, list)) else f"a {type(batch).__name__}"
            raise UsageError(
                f"a pipeline's batch is a pair (inputs, labels); found {found}. Nest the inputs in a tuple of their "
                "own, or make a pair with engine.set_batch_fn(fn)."
            )
        return batch[0], batch[1]
