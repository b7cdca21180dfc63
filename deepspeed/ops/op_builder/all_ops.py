"""Every op of the library by its name, and which of them are here."""

from __future__ import annotations

from deepspeed.ops.op_builder import builders
from deepspeed.ops.op_builder.builder import OpBuilder

__all__ = ["ALL_OPS", "compatible_ops", "installed_ops"]

_BUILDERS: tuple[type[builders.Included] | type[builders.OpToCome], ...] = (
    *builders.Included.__subclasses__(),
    *map(builders.to_come, builders.TO_COME),
)
ALL_OPS: dict[str, OpBuilder] = {builder.NAME: builder() for builder in _BUILDERS}


def installed_ops() -> dict[str, bool]:
    """Which ops come with the package, so that nothing has to be built for them."""
    return {name: isinstance(builder, builders.Included) for name, builder in ALL_OPS.items()}


def compatible_ops() -> dict[str, bool]:
    """Which ops can be used on this machine."""
    return {name: builder.is_compatible() for name, builder in ALL_OPS.items()}
