"""The config's section → a model with fused kernels."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from logging import WARNING

import torch
from torch import nn

from deepspeed.config.schema import Schema
from deepspeed.fusion.attention import find_packing, find_rotation
from deepspeed.fusion.feed_forward import find_feed_forward
from deepspeed.fusion.fp8_linear import LastRounded, choose_scaling, find_feed_forward8, find_product
from deepspeed.fusion.gelu import find_gelu
from deepspeed.fusion.head import find_head
from deepspeed.fusion.norms import find_norm, find_residual
from deepspeed.fusion.shared_input import find_inputs
from deepspeed.log import log_dist, print_dist
from deepspeed.ops.fp8.linear import Scaling
from deepspeed.ops.fp8.product import emulated
from deepspeed.ops.precompile import KernelPrecompiler
from deepspeed.transformers.replacement import Refused, Serves, Swap

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
class FusionFinding:
    """A module that is, or could have been, replaced."""

    kind: str
    name: str
    module: str
    """The name of its class."""
    result: Swap | Refused


def find(
    model: nn.Module, kinds: Sequence[str], exclude: Sequence[str] = (), *, serves: Serves = "train"
) -> Iterator[FusionFinding]:
    """What a model offers that serves such passes.

    Names that match one of `exclude` from their start are left alone.
    """
    for finding in _find(model, kinds, exclude):
        if isinstance(finding.result, Refused) or finding.result.serves in (serves, "both"):
            yield finding


def _find(model: nn.Module, kinds: Sequence[str], exclude: Sequence[str]) -> Iterator[FusionFinding]:
    kept = _kept(exclude)
    norms: dict[nn.Module, Swap] = {}
    for name, module in model.named_modules():
        for kind, finder in _FINDERS.items():
            if kind in kinds and kept(name) and (result := finder(module)) is not None:
                yield FusionFinding(kind, name, type(module).__name__, result)
                if kind == "norm" and isinstance(result, Swap):
                    norms[module] = result
    for name, module in model.named_modules() if norms else ():
        if kept(name) and (before := find_residual(module, norms)) is not None:
            yield FusionFinding("sum", name, type(module).__name__, before)
    if "mlp" in kinds:
        alone = _alone(model)
        for name, module in model.named_modules():
            for inner, result in find_gelu(module, alone):
                if kept(full := f"{name}.{inner}".strip(".")):
                    yield FusionFinding("mlp", full, type(module).__name__, result)
    if "inputs" in kinds:
        yield from _inputs(model, kept)
    if "loss" in kinds:
        for name, module in model.named_modules():
            if (found := find_head(module)) is not None:
                full = f"{name}.{found[0]}".strip(".")
                if kept(full):
                    yield FusionFinding("loss", full, type(module).__name__, found[1])
                return


def _inputs(model: nn.Module, kept: Callable[[str], bool]) -> Iterator[FusionFinding]:
    """After the other kinds, whose computations of the same modules these run."""
    known: dict[type, list[tuple[str, ...]]] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        result = find_inputs(module, known, lambda child, prefix=prefix: kept(prefix + child))  # type: ignore[misc]
        if kept(name) and result is not None:
            yield FusionFinding("inputs", name, type(module).__name__, result)


def find_products(model: nn.Module, scaling: Scaling, exclude: Sequence[str] = ()) -> Iterator[FusionFinding]:
    """Linear layers that can multiply 8-bit numbers; see `find`."""
    kept, recent = _kept(exclude), LastRounded(scaling)
    for name, module in model.named_modules():
        if kept(name) and (result := find_product(module, recent)) is not None:
            yield FusionFinding("fp8", name, type(module).__name__, result)


def find_feed_forwards8(model: nn.Module) -> Iterator[FusionFinding]:
    """Feed-forward layers of which all parts were replaced by now, so that they can be computed as one."""
    for name, module in model.named_modules():
        if (result := find_feed_forward8(module)) is not None:
            yield FusionFinding("fp8", name, type(module).__name__, result)


def _alone(model: nn.Module) -> Callable[[nn.Module], bool]:
    """Whether a module is in one place of the model."""
    uses = Counter(id(child) for module in model.modules() for child in module._modules.values())
    return lambda module: uses[id(module)] == 1


def _kept(exclude: Sequence[str]) -> Callable[[str], bool]:
    hidden = [re.compile(pattern) for pattern in exclude]
    return lambda name: not any(pattern.match(name) for pattern in hidden)


def put(findings: Sequence[FusionFinding], undo: ExitStack) -> None:
    """Put everything in place that was found; `undo` takes it back."""
    for finding in findings:
        if isinstance(finding.result, Swap):
            undo.callback(finding.result.put())


_GATED = ("mask", "norm", "sum", "mlp", "rotary")

FAMILIES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3"), _GATED),
    "mixtral": ("mask", "norm", "sum", "rotary"),
    "gpt2": ("mask", "norm", "sum", "mlp"),
    "gpt_neox": ("mask", "norm", "mlp", "rotary"),
    "opt": ("norm",),
}
"""The kinds of which a model has some, by `config.model_type`; `sum` comes with `norm`."""


def missed(
    model: nn.Module, kinds: Sequence[str], found: Sequence[FusionFinding]
) -> Iterator[tuple[str, FusionFinding]]:
    """(family, why nothing was replaced) for each of these kinds that a model of a known family should have.

    `found` is what the model offers, whatever of it is excluded.
    """
    configs = ((name, module, getattr(module, "config", None)) for name, module in model.named_modules())
    known = ((*each[:2], getattr(each[2], "model_type", None)) for each in configs)
    name, module, family = next((each for each in known if each[2] in FAMILIES), ("", model, None))
    for kind in FAMILIES.get(family or "", ()):
        some = [each for each in found if each.kind == kind]
        if ("norm" if kind == "sum" else kind) in kinds and not any(isinstance(each.result, Swap) for each in some):
            yield str(family), some[0] if some else FusionFinding(kind, name, type(module).__name__, _unseen())


def _unseen() -> Refused:
    version = getattr(sys.modules.get("transformers"), "__version__", "of this version")
    return Refused(f"no module has code of the form that is known; Transformers {version} may have changed it")


_HEAD = ("kind", "module", "count", "first of them", "now computed by")


def lines(findings: Sequence[FusionFinding]) -> list[str]:
    """A row for each kind of module and what became of it, in columns."""
    groups: dict[tuple[str, str, str], list[FusionFinding]] = {}
    for finding in findings:
        groups.setdefault((finding.kind, finding.module, _fate(finding)), []).append(finding)
    rows = [_HEAD]
    rows += [(kind, module, str(len(held)), held[0].name, fate) for (kind, module, fate), held in groups.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _fate(finding: FusionFinding) -> str:
    if isinstance(finding.result, Swap):
        return finding.result.kernel
    return f"itself: {finding.result.reason}"


def fuse(
    schema: Schema,
    model: nn.Module,
    undo: ExitStack,
    rehearsal: KernelPrecompiler | None = None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    whole: bool = True,
) -> None:
    """Replace what the config asks for, and tell it once; `undo` takes it back.

    A `rehearsal` begins to compile the kernels, for models that compute in `dtype`. Of a model that is not `whole`,
    other ranks have the rest.
    """
    fused, eight = schema.fused_kernels, schema.fp8
    findings: list[FusionFinding] = []
    if whole:
        _tell_unmatched(schema, model)
    if fused.enabled:
        kinds = [kind for kind in KINDS if kind != "inputs" and getattr(fused, kind)]
        findings += find(model, kinds, fused.exclude)
        if whole:
            findings += _tell_missed(model, kinds, list(find(model, kinds)) if fused.exclude else findings)
        put(findings, undo)
    if eight.enabled:
        scaling = _measured(model, eight.exclude, dtype) if eight.scaling == "auto" else eight.scaling
        products = list(find_products(model, scaling, eight.exclude))
        put(products, undo)
        put(joined := list(find_feed_forwards8(model)), undo)
        findings += products + joined
        if emulated():
            log_dist(
                "fp8.enabled: this device has no units for 8-bit numbers (CUDA, compute capability 8.9 and later): "
                "they are multiplied as float32, which gives the same numbers and is slower than 16 bits",
                level=WARNING,
            )
    if fused.enabled and fused.inputs:  # last: layers that others compute by now are none of theirs
        inputs = list(find(model, ["inputs"], fused.exclude))
        put(inputs, undo)
        findings += inputs
    if rehearsal is not None and findings:
        wholes = {each.name for each in findings if each.kind == "fp8"}  # these do not compute what was put before
        played = [each.result for each in findings if each.kind != "mlp" or each.name not in wholes]
        scenes = [result.scene for result in played if isinstance(result, Swap)]
        rehearsal.add(partial(scene, dtype=dtype) for scene in scenes if scene is not None)
    if fused.enabled or eight.enabled:
        told = lines(findings) if findings else ["nothing was found that fused kernels compute"]
        print_dist("\n".join(["Fused kernels", *told]))


def _measured(model: nn.Module, exclude: Sequence[str], dtype: torch.dtype) -> Scaling:
    """What `fp8.scaling` "auto" is for this model."""
    names = {each.name for each in find_products(model, "tensor", exclude) if isinstance(each.result, Swap)}
    layers = (module for name, module in model.named_modules() if name in names and isinstance(module, nn.Linear))
    scaling, seconds = choose_scaling(Counter((each.in_features, each.out_features) for each in layers), dtype)
    fastest = min(seconds.values(), default=0.0) or 1.0
    times = ", ".join(f"{each} {took / fastest:.2f}" for each, took in seconds.items()) or "not measured here"
    log_dist(f"fp8.scaling auto: {scaling} (time of each, over the fastest: {times})")
    return scaling


def _tell_missed(model: nn.Module, kinds: Sequence[str], found: Sequence[FusionFinding]) -> list[FusionFinding]:
    """Log what a known model should have and has not, which costs speed; of that, what the table would not show."""
    told = list(missed(model, kinds, found))
    for family, finding in told:
        assert isinstance(finding.result, Refused), "what is missed was not replaced"
        log_dist(
            f"fused_kernels: no {finding.kind!r} was replaced in this model of the family {family!r}, which should "
            f"have some: {finding.result.reason} ({finding.module} {finding.name!r})",
            level=WARNING,
        )
    return [finding for _, finding in told if finding not in found]


def _tell_unmatched(schema: Schema, model: nn.Module) -> None:
    """A pattern that was meant to leave a layer alone and does not is no error: a config may be for many models."""
    names = [name for name, _ in model.named_modules()]
    for key, section in (("fused_kernels", schema.fused_kernels), ("fp8", schema.fp8)):
        given = section.exclude if section.enabled and "exclude" in section.model_fields_set else []
        for pattern in given:
            if not any(map(re.compile(pattern).match, names)):
                log_dist(
                    f"{key}.exclude: {pattern!r} matches the name of no module from its start, so that it leaves "
                    f"nothing alone; the last module of this model is {names[-1]!r}",
                    level=WARNING,
                )
