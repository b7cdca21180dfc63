"""Where the engine is between two optimizer steps: which micro step, and whether it is the last one."""

from __future__ import annotations

from deepspeed.errors import DeepSpeedConfigError


class Accumulation:
    """Counts micro steps; the boundary is the micro step that ends with an optimizer step.

    The count decides unless the caller does: `boundary = True` or `False` holds until it is set again or to None.
    Unmanaged, every step is a boundary.
    """

    __slots__ = ("_began", "_micro_steps", "_seen", "boundary", "managed", "steps")

    def __init__(self, steps: int, *, managed: bool = True) -> None:
        self.steps = steps
        """Micro steps per optimizer step; a new number counts from the last boundary."""
        self.managed = managed
        self._micro_steps = 0
        self._began = 0
        self._seen = 0
        self.boundary: bool | None = None

    @property
    def micro_steps(self) -> int:
        """Micro steps since training began; where it is set, boundaries are at the multiples of `steps`."""
        return self._micro_steps

    @micro_steps.setter
    def micro_steps(self, value: int) -> None:
        self._micro_steps, self._began = value, value - value % self.steps

    @property
    def position(self) -> int:
        """Micro steps since the last boundary of the count."""
        return self._micro_steps - self._began

    @property
    def at_boundary(self) -> bool:
        """True if this micro step ends with an optimizer step."""
        if not self.managed:
            return True
        if self.boundary is not None:
            return self.boundary
        return self.position + 1 >= self.steps  # more where `steps` has become less

    @property
    def reduces_in_backward(self) -> bool:
        """True if gradients are reduced while this micro step's backward runs, because it is known to be the last."""
        return self.managed and self.at_boundary

    @property
    def micro_batches(self) -> int:
        """Micro batches in the optimizer step that comes next: those of the config, or as many as the caller ran."""
        return self.steps if self.managed else self._seen

    def saw_micro_batch(self) -> None:
        """One more backward pass begins."""
        self._seen += 1

    def override(self, at_boundary: bool) -> None:
        """Decide the boundary by hand from now on."""
        if not self.managed:
            raise DeepSpeedConfigError(
                "set_gradient_accumulation_boundary has no meaning with managed_gradient_accumulation false: "
                "every engine.step() is a boundary. Remove the call, or the key.",
                path="managed_gradient_accumulation",
            )
        self.boundary = at_boundary

    def advance(self) -> None:
        """This micro step is over."""
        self._seen = 0
        self._micro_steps += 1
        if self.position >= self.steps:
            self._began = self._micro_steps
