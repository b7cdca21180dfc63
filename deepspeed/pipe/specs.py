"""`LayerSpec` and `TiedLayerSpec`: a layer that is built where it is needed, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from deepspeed.errors import UsageError
from deepspeed.log import logger

__all__ = ["Elsewhere", "Layer", "LayerSpec", "TiedLayerSpec", "name_of"]


class LayerSpec:
    """A class of modules and what to build one with: `LayerSpec(nn.Linear, 8, 8)`."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise UsageError(
                f"{type(self).__name__} takes a class of torch.nn.Module and its arguments; found {typename!r}"
            )
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs
        self.global_rank = -1

    def build(self, log: bool = False) -> nn.Module:
        """A new module."""
        if log:
            logger.info("rank %s builds %r", self.global_rank, self)
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        words = [*map(repr, self.module_args), *(f"{name}={value!r}" for name, value in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(words)})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares weights with the others of its key, on whichever stages they are."""

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        """`forward_fn(module, inputs)` runs in place of the module's forward; `tied_weight_attr`: what is shared."""
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


class Elsewhere:
    """A module that another rank has: its name is all that remains."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: Any) -> Any:
        """Refused."""
        raise UsageError(f"the layer {self.__name__} lies on another stage")


Layer = nn.Module | LayerSpec | Callable[..., Any]
"""What a pipeline is made of."""


def name_of(layer: Any) -> str:
    """The name by which a layer is matched and shown: its class, or its function."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    if isinstance(layer, nn.Module):
        return type(layer).__name__
    return str(getattr(layer, "__name__", type(layer).__name__))
