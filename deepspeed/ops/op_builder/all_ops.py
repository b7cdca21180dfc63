"""Every op of the library by its name, and which of them are here."""

from __future__ import annotations

from deepspeed.ops.op_builder import builders
from deepspeed.ops.op_builder.builder import OpBuilder, probe_is_compatible

__all__ = ["ALL_OPS", "compatible_ops", "installed_ops"]

ALL_OPS: dict[str, OpBuilder] = {
    builder.NAME: builder()
    for builder in (getattr(builders, name) for name in builders.__all__)
    if builder is not builders.NotImplementedBuilder
}


def installed_ops() -> dict[str, bool]:
    """Which ops come with the package, so that nothing has to be built for them."""
    return {name: isinstance(builder, builders._Included) for name, builder in ALL_OPS.items()}


def compatible_ops() -> dict[str, bool]:
    """Which ops can be used on this machine."""
    return {name: probe_is_compatible(builder) for name, builder in ALL_OPS.items()}
