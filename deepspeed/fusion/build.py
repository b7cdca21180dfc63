"""The config's section → a model with fused kernels."""

from __future__ import annotations

from contextlib import ExitStack

from torch import nn

from deepspeed.config.schema import Schema
from deepspeed.fusion.find import KINDS, Finding, find, find_products, put
from deepspeed.fusion.table import lines
from deepspeed.log import print_dist

__all__ = ["fuse"]


def fuse(schema: Schema, model: nn.Module, undo: ExitStack) -> None:
    """Replace what the config asks for, and tell it once; `undo` takes it back."""
    fused, eight = schema.fused_kernels, schema.fp8
    findings: list[Finding] = []
    if fused.enabled:
        findings += find(model, [kind for kind in KINDS if getattr(fused, kind)], fused.exclude)
        put(findings, undo)
    if eight.enabled:
        products = list(find_products(model, eight.scaling, eight.exclude))
        put(products, undo)
        findings += products
    if fused.enabled or eight.enabled:
        told = lines(findings) if findings else ["nothing was found that fused kernels compute"]
        print_dist("\n".join(["Fused kernels", *told]))
