"""`CurriculumDataLoader`: a data loader over the sampler by difficulty, whose state is that of the last batch given."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from deepspeed.data.curriculum import cut_to_length
from deepspeed.data.sampler import DeepSpeedDataSampler

__all__ = ["CurriculumDataLoader"]


class CurriculumDataLoader:
    """Batches of one rank until the sampler's epochs are over; what workers read ahead does not count."""

    def __init__(
        self,
        dataset: Any,
        sampler: DeepSpeedDataSampler,
        *,
        workers: int,
        collate_fn: Callable[..., Any] | None,
        cuts: tuple[str, ...] = (),
    ) -> None:
        self.dataset, self.data_sampler = dataset, sampler
        self.curriculum_schedulers = sampler.curriculum_schedulers
        self.post_process_func: Callable[[Any, dict[str, Any]], Any] | None = None
        self.tput_timer: Any = None
        self._cuts = cuts
        self._ahead: deque[dict[str, Any]] = deque()
        self._last = sampler.state_dict()
        self._batches: Iterator[Any] | None = None
        self.dataloader = DataLoader(dataset, batch_sampler=_Noted(self), num_workers=workers, collate_fn=collate_fn)

    def __len__(self) -> int:
        return self.data_sampler.total_samples // self.data_sampler.micro_batch_times_data_parallel_size

    def __iter__(self) -> CurriculumDataLoader:
        return self

    def __next__(self) -> Any:
        if self.tput_timer is not None:
            self.tput_timer.start()
        if self._batches is None:
            self._batches = iter(self.dataloader)
        batch = next(self._batches)
        self._last = self._ahead.popleft()
        lengths = [self._last["current_difficulties"][name] for name in self._cuts]
        batch = cut_to_length(batch, min(lengths)) if lengths else batch
        return batch if self.post_process_func is None else self.post_process_func(batch, self._last)

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch comes from."""
        return self._last

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken."""
        self.data_sampler.load_state_dict(state)
        self._last = self.data_sampler.state_dict()
        self._ahead.clear()
        self._batches = None


class _Noted:
    """The sampler, with a note of its state after each micro-batch."""

    def __init__(self, loader: CurriculumDataLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        sampler = self._loader.data_sampler
        for each in sampler:
            self._loader._ahead.append(sampler.state_dict())
            yield each
