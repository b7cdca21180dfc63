"""`Rhythm`: at which steps deferred gradients are applied, and important columns chosen anew."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed.config.zenflow import ZenFlowConfig
from deepspeed.errors import DeepSpeedConfigError

__all__ = ["Beat", "Rhythm"]


@dataclass(frozen=True)
class Beat:
    """What a step does."""

    defers: bool
    """Only important columns are updated; without it everything is, as ever."""
    share: float | None = None
    """So much of what was deferred until now, this step's part included, is applied; None: nothing is."""
    parts: bool = False
    """The columns are chosen anew by the next step."""


class Rhythm:
    """Counts steps; `every` of them, or whoever asks, applies what was deferred."""

    def __init__(self, section: ZenFlowConfig) -> None:
        self._section = section
        self._warm = int(section.full_warm_up_rounds)
        self._every = None if section.update_interval == "auto" else max(int(section.update_interval), 1)
        self._select: int | None = None
        self.waiting = 0
        """Steps whose deferred gradients were not applied yet."""
        self._chosen_for = 0
        if section.select_strategy == "step":
            self._select = int(section.select_interval)
        elif section.steps_per_epoch:
            self.know_epoch(int(section.steps_per_epoch))

    @property
    def by_itself(self) -> bool:
        """True if it does not have to be asked."""
        return self._every is not None

    def know_epoch(self, steps: int) -> None:
        """So many steps are an epoch; without a word, columns that are chosen by epochs stay."""
        section = self._section
        if section.select_strategy == "step" or steps < 1 or self._select is not None:
            return
        self._select = steps * (1 if section.select_interval == "auto" else int(section.select_interval))
        if self._every is not None and self._every > self._select:
            raise DeepSpeedConfigError(
                f"zero_optimization.zenflow.update_interval: {self._every} steps are more than the {self._select} "
                f"after which columns are chosen anew (an epoch has {steps} steps); lower it",
                path="zero_optimization.zenflow.update_interval",
            )

    def beat(self, *, asked: bool = False) -> Beat:
        """What the step does that is taken now."""
        if self._warm > 0:
            self._warm -= 1
            return Beat(defers=False)
        self.waiting += 1
        self._chosen_for += 1
        if not (asked if self._every is None else self.waiting >= self._every):
            return Beat(defers=True)
        share, self.waiting = 1.0 / self.waiting, 0
        parts = self._select is not None and self._chosen_for >= self._select
        if parts:
            self._chosen_for = 0
        return Beat(defers=True, share=share, parts=parts)

    def forget(self) -> None:
        """Nothing is deferred any more."""
        self.waiting = 0
