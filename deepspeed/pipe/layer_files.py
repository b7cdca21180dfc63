"""The files of layers that `PipelineModule` names, writes and reads by itself, as scripts call it to."""

from __future__ import annotations

__all__ = ["LayerFiles"]


class LayerFiles:
    """Methods of `PipelineModule`."""
