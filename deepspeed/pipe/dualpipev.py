"""DualPipeV by the names that scripts know: a module that is cut for it; its engine is the pipeline's."""

from __future__ import annotations

from typing import Any

from deepspeed.pipe.engine import PipelineEngine
from deepspeed.pipe.module import PipelineModule

__all__ = ["DualPipeVEngine", "DualPipeVModule"]


class DualPipeVModule(PipelineModule):
    """A `PipelineModule` of which rank r holds the stages r and 2p - 1 - r of p ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, schedule="dualpipev", **kwargs)


DualPipeVEngine = PipelineEngine
"""One executor plays all schedules."""
