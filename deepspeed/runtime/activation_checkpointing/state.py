"""The configuration that `deepspeed.checkpointing` works with: what engines and scripts said, and what follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepspeed.config.activation import ActivationCheckpointingConfig
from deepspeed.log import warn_once
from deepspeed.runtime.activation_checkpointing.axis import ALONE, ModelAxis, model_axis
from deepspeed.runtime.activation_checkpointing.keeping import Keeper
from deepspeed.runtime.activation_checkpointing.settings import SECTION, Settings, given_in

__all__ = ["CONFIGURATION", "Applied", "Configuration", "Plan", "Said", "configure_from"]


@dataclass(frozen=True, eq=False, slots=True)
class Said:
    """What one source said: some settings, and maybe the axis."""

    values: Mapping[str, Any] = field(default_factory=dict)
    axis: ModelAxis | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What holds for the next checkpointed call."""

    settings: Settings
    axis: ModelAxis
    keeper: Keeper

    @classmethod
    def of(cls, sources: list[Said]) -> Plan:
        """Later sources take precedence, key by key."""
        values: dict[str, Any] = {}
        axis = ALONE
        for source in sources:
            values.update(source.values)
            axis = source.axis or axis
        settings = Settings.of(values)
        if settings.partition_activations and axis.size == 1:
            warn_once(
                f"{SECTION}.partition_activations shards nothing: the model-parallel group is this rank alone. Give "
                "an mpu with more ranks to deepspeed.checkpointing.configure or deepspeed.initialize."
            )
        return cls(settings, axis, Keeper(settings, axis))

    @property
    def is_plain(self) -> bool:
        """True if a checkpointed call is torch's, with nothing added."""
        settings = self.settings
        return not (self.keeper.active or settings.profile or settings.synchronize_checkpoint_boundary)


class Configuration:
    """Engines' config sections, overridden by `configure()`, overridden by single switches; made anew on each change.

    A change that does not fit together raises and leaves everything as it was.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything that engines and scripts said."""
        self._engines: list[Said] = []
        self._script: Said | None = None
        self._switches: dict[str, Any] = {}
        self._plan: Plan | None = Plan.of([])

    @property
    def plan(self) -> Plan:
        """What holds now."""
        if self._plan is None:
            self._plan = self._make(self._engines, self._script, self._switches)
        return self._plan

    @property
    def is_explicit(self) -> bool:
        """True once a script called `configure()`."""
        return self._script is not None

    def say(self, said: Said) -> None:
        """A script's `configure()`; it replaces the script's earlier one, and switches for the keys that it gives."""
        switches = {key: value for key, value in self._switches.items() if key not in said.values}
        self._plan = self._make(self._engines, said, switches)
        self._script, self._switches = said, switches

    def switch(self, key: str, value: Any) -> None:
        """One setting from now on."""
        switches = {**self._switches, key: value}
        self._plan = self._make(self._engines, self._script, switches)
        self._switches = switches

    def add_engine(self, said: Said) -> None:
        """An engine's section; of several engines the last one takes precedence, key by key."""
        engines = [*self._engines, said]
        self._plan = self._make(engines, self._script, self._switches)
        self._engines = engines

    def remove_engine(self, said: Said) -> None:
        """The engine is gone; removing it twice is harmless."""
        if said in self._engines:
            self._engines.remove(said)
            self._plan = None  # made at the next use: closing an engine must not fail

    def free_buffers(self) -> None:
        """Let go of the contiguous buffers; inputs that wait in them keep their part."""
        self._plan = None

    @staticmethod
    def _make(engines: list[Said], script: Said | None, switches: dict[str, Any]) -> Plan:
        return Plan.of([*engines, *([script] if script is not None else []), Said(switches)])


CONFIGURATION = Configuration()


class Applied:
    """An engine's section while it counts; `close()` takes it back."""

    def __init__(self, said: Said) -> None:
        self._said = said

    def close(self) -> None:
        """The section counts no more; closing twice is harmless."""
        CONFIGURATION.remove_engine(self._said)


def configure_from(section: ActivationCheckpointingConfig, source: Any = None) -> Applied:
    """Apply the config section of an engine, with its layout or its mpu; what a script configures comes first.

    A section that gives nothing changes nothing: another engine's stays.
    """
    said = Said(given_in(section), None if source is None else model_axis(source))
    CONFIGURATION.add_engine(said)
    return Applied(said)
