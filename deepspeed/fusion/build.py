"""The config's section → a model with fused kernels."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from logging import WARNING

import torch
from torch import nn

from deepspeed.config.schema import Schema
from deepspeed.fusion.families import missed
from deepspeed.fusion.find import KINDS, Finding, find, find_feed_forwards8, find_products, put, unmatched
from deepspeed.fusion.swap import Refused, Swap
from deepspeed.fusion.table import lines
from deepspeed.log import log_dist, print_dist
from deepspeed.ops.fp8.linear import emulated
from deepspeed.ops.rehearsal import Rehearsal

__all__ = ["fuse"]


def fuse(
    schema: Schema,
    model: nn.Module,
    undo: ExitStack,
    rehearsal: Rehearsal | None = None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    whole: bool = True,
) -> None:
    """Replace what the config asks for, and tell it once; `undo` takes it back.

    A `rehearsal` begins to compile the kernels, for models that compute in `dtype`. Of a model that is not `whole`,
    other ranks have the rest.
    """
    fused, eight = schema.fused_kernels, schema.fp8
    findings: list[Finding] = []
    if whole:
        _tell_unmatched(schema, model)
    if rehearsal is not None and (fused.enabled or eight.enabled):
        rehearsal.begin()
    if fused.enabled:
        kinds = [kind for kind in KINDS if kind != "inputs" and getattr(fused, kind)]
        findings += find(model, kinds, fused.exclude)
        if whole:
            findings += _tell_missed(model, kinds, list(find(model, kinds)) if fused.exclude else findings)
        put(findings, undo)
    if eight.enabled:
        products = list(find_products(model, eight.scaling, eight.exclude))
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


def _tell_missed(model: nn.Module, kinds: Sequence[str], found: Sequence[Finding]) -> list[Finding]:
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
    for name, section in (("fused_kernels", schema.fused_kernels), ("fp8", schema.fp8)):
        given = section.exclude if section.enabled and "exclude" in section.model_fields_set else []
        for pattern in unmatched(model, given):
            last = [each for each, _ in model.named_modules()][-1]
            log_dist(
                f"{name}.exclude: {pattern!r} matches the name of no module from its start, so that it leaves nothing "
                f"alone; the last module of this model is {last!r}",
                level=WARNING,
            )
