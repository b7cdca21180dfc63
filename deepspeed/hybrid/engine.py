"""`DeepSpeedHybridEngine`: an engine whose module generates, too, with the weights that train."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from deepspeed.errors import UsageError
from deepspeed.generate.llm import Completion
from deepspeed.hybrid.generation import METHODS, Generation
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.parts import Parts

__all__ = ["DeepSpeedHybridEngine"]


F = TypeVar("F", bound=Callable[..., Any])


def _ends_phase(method: F, *, moves: bool = False) -> F:
    """The method, before which a phase of generation ends; `moves`: graphs would not find the weights again."""

    @functools.wraps(method)
    def call(self: DeepSpeedHybridEngine, *args: Any, **kwargs: Any) -> Any:
        self._generation.close_phase()
        if moves:
            self._generation.free_cache()
        return method(self, *args, **kwargs)

    return cast("F", call)


class DeepSpeedHybridEngine(DeepSpeedEngine):
    """Trains as `DeepSpeedEngine`; `generate` of the engine and of its module run over a paged cache.

    In eval mode what generation needs stays ready between calls (`hybrid_engine.pin_parameters`), until the engine
    trains again. All ranks call `generate` together, each with prompts of its own.
    """

    _collaborators = (*DeepSpeedEngine._collaborators, "_generation")

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        generation = self._generation = Generation(parts)
        parts.resources.callback(generation.close)
        for name in METHODS:
            vars(parts.module)[name] = getattr(self, name)
            parts.resources.callback(vars(parts.module).pop, name, None)

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """What `generate` of Transformers takes and returns; `engine.module.generate` is this."""
        return self._generation.generate(inputs, kwargs, keep=self._pins)

    def generate_batch(self, inputs: Sequence[Sequence[int]], *settings: Any, **kwargs: Any) -> Any:
        """What `generate_batch` of Transformers takes and returns; settings of its schedule are left aside."""
        if settings:
            kwargs["generation_config"] = settings[0]
        return self._generation.generate_batch(inputs, kwargs, keep=self._pins)

    def complete(self, **kwargs: Any) -> list[Completion]:
        """Continuations, with the log-probabilities of their tokens, of a call of `generate`."""
        with self._generation.call(keep=self._pins):
            found = self._generation.complete(**kwargs)
        if found is None:
            raise UsageError("engine.complete(): this call needs Transformers' generate, which gives no completions")
        return found

    def free_inference_cache(self) -> None:
        """Free keys, values and graphs; the next call makes new ones."""
        self._generation.free_cache()

    @property
    def _pins(self) -> bool:
        return not self.training and self._config.schema.hybrid_engine.pin_parameters

    # ---- LoRA

    def fuse_lora_weight(self) -> None:
        """Add adapters to their weights until `unfuse_lora_weight`, or until the engine trains; `generate` does it
        by itself."""
        self._generation.fuse()

    def unfuse_lora_weight(self) -> None:
        """Put the weights back to the bits that they had."""
        self._generation.lora.unfuse()
        if not self._pins:
            self._generation.close_phase()

    def unfuse_lora_weight_non_pinned(self) -> None:
        """As `unfuse_lora_weight`, and release the parameters."""
        self._generation.close_phase()

    # ---- what ends a phase

    def train(self, mode: bool = True) -> DeepSpeedHybridEngine:
        """Training mode ends a phase of generation."""
        if mode and "_generation" in self.__dict__:
            self._generation.close_phase()
        super().train(mode)
        return self

    forward = _ends_phase(DeepSpeedEngine.forward)
    backward = _ends_phase(DeepSpeedEngine.backward)
    step = _ends_phase(DeepSpeedEngine.step)
    save_checkpoint = _ends_phase(DeepSpeedEngine.save_checkpoint)
    load_checkpoint = _ends_phase(DeepSpeedEngine.load_checkpoint)
    load_module_state_dict = _ends_phase(DeepSpeedEngine.load_module_state_dict)
    offload_states = _ends_phase(DeepSpeedEngine.offload_states, moves=True)
