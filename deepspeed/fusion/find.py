"""What can be replaced in a model, found and put in place."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torch import nn

from deepspeed.fusion.feed_forward import find_feed_forward
from deepspeed.fusion.feed_forward8 import find_feed_forward8
from deepspeed.fusion.gelu import find_gelu
from deepspeed.fusion.head import find_head
from deepspeed.fusion.inputs import find_inputs
from deepspeed.fusion.norms import find_norm
from deepspeed.fusion.packing import find_packing
from deepspeed.fusion.products import Recent, find_product
from deepspeed.fusion.residual import find_residual
from deepspeed.fusion.rotation import find_rotation
from deepspeed.fusion.swap import Refused, Swap

__all__ = ["KINDS", "Finding", "find", "find_feed_forwards8", "find_products", "put", "unmatched"]

Finder = Callable[[nn.Module], "Swap | Refused | None"]

_FINDERS: dict[str, Finder] = {
    "norm": find_norm,
    "mlp": find_feed_forward,
    "rotary": find_rotation,
    "mask": find_packing,
}

KINDS = (*_FINDERS, "loss", "inputs")
"""What can be replaced, as the config names it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A module that is, or could have been, replaced."""

    kind: str
    name: str
    module: str
    """The name of its class."""
    result: Swap | Refused


def find(model: nn.Module, kinds: Sequence[str], exclude: Sequence[str] = ()) -> Iterator[Finding]:
    """What a model offers; names that match one of `exclude` from their start are left alone."""
    kept = _kept(exclude)
    norms: dict[nn.Module, Swap] = {}
    for name, module in model.named_modules():
        for kind, finder in _FINDERS.items():
            if kind in kinds and kept(name) and (result := finder(module)) is not None:
                yield Finding(kind, name, type(module).__name__, result)
                if kind == "norm" and isinstance(result, Swap):
                    norms[module] = result
    for name, module in model.named_modules() if norms else ():
        if kept(name) and (before := find_residual(module, norms)) is not None:
            yield Finding("sum", name, type(module).__name__, before)
    if "mlp" in kinds:
        alone = _alone(model)
        for name, module in model.named_modules():
            for inner, result in find_gelu(module, alone):
                if kept(full := f"{name}.{inner}".strip(".")):
                    yield Finding("mlp", full, type(module).__name__, result)
    if "inputs" in kinds:
        yield from _inputs(model, kept)
    if "loss" in kinds:
        for name, module in model.named_modules():
            if (found := find_head(module)) is not None:
                full = f"{name}.{found[0]}".strip(".")
                if kept(full):
                    yield Finding("loss", full, type(module).__name__, found[1])
                return


def _inputs(model: nn.Module, kept: Callable[[str], bool]) -> Iterator[Finding]:
    """After the other kinds, whose computations of the same modules these run."""
    known: dict[type, list[tuple[str, ...]]] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        result = find_inputs(module, known, lambda child, prefix=prefix: kept(prefix + child))  # type: ignore[misc]
        if kept(name) and result is not None:
            yield Finding("inputs", name, type(module).__name__, result)


def find_products(model: nn.Module, scaling: str, exclude: Sequence[str] = ()) -> Iterator[Finding]:
    """Linear layers that can multiply 8-bit numbers; see `find`."""
    kept, recent = _kept(exclude), Recent(by_rows=scaling == "row")
    for name, module in model.named_modules():
        if kept(name) and (result := find_product(module, recent)) is not None:
            yield Finding("fp8", name, type(module).__name__, result)


def find_feed_forwards8(model: nn.Module) -> Iterator[Finding]:
    """Feed-forward layers of which all parts were replaced by now, so that they can be computed as one."""
    for name, module in model.named_modules():
        if (result := find_feed_forward8(module)) is not None:
            yield Finding("fp8", name, type(module).__name__, result)


def _alone(model: nn.Module) -> Callable[[nn.Module], bool]:
    """Whether a module is in one place of the model."""
    uses = Counter(id(child) for module in model.modules() for child in module._modules.values())
    return lambda module: uses[id(module)] == 1


def _kept(exclude: Sequence[str]) -> Callable[[str], bool]:
    hidden = [re.compile(pattern) for pattern in exclude]
    return lambda name: not any(pattern.match(name) for pattern in hidden)


def unmatched(model: nn.Module, exclude: Sequence[str]) -> list[str]:
    """Those patterns that leave nothing of a model alone."""
    names = [name for name, _ in model.named_modules()]
    return [pattern for pattern in exclude if not any(map(re.compile(pattern).match, names))]


def put(findings: Sequence[Finding], undo: ExitStack) -> None:
    """Put everything in place that was found; `undo` takes it back."""
    for finding in findings:
        if isinstance(finding.result, Swap):
            undo.callback(finding.result.put())
