"""`ModelKind`: what of building an engine depends on whether its ranks hold whole models or stages of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from deepspeed.data.pacing import NumberedBlocks
from deepspeed.errors import UsageError
from deepspeed.moe.auto_ep import spread_blocks
from deepspeed.moe.placement import SpreadExperts, export_whole
from deepspeed.runtime.compile_blocks import repeated_blocks
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.step.choose import warn_if_frozen
from deepspeed.sequence.build import share_sequences
from deepspeed.tensor_parallel import SplitModel, split_model

if TYPE_CHECKING:
    from deepspeed.config.schema import Schema
    from deepspeed.parallel import AxisGroup, ParallelLayout
    from deepspeed.runtime.parts import Parts
    from deepspeed.zero.interface import NormRanks, Reshard


class ModelKind:
    """Of a whole model; `deepspeed.pipe.axes.PipelineKind` replaces the steps in which a pipeline differs."""

    whole = True
    """The module is a whole model, up to layers and experts that ranks share."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def mpu(self, mpu: Any, mesh_param: Any, sizes: Mapping[str, int]) -> Any:
        """What describes the ranks: what the script gave, or the pipeline's own grid with axes of these `sizes`."""
        return mpu

    def split(self, schema: Schema, layout: ParallelLayout, opened: Reshard, mpu: Any) -> SplitModel:
        """Spread the blocks of experts and split the layers that ranks share."""
        spread_blocks(schema, self.module, layout, opened)
        return split_model(schema, self.module, layout.tensor, opened, mpu)

    def share_sequences(
        self,
        schema: Schema,
        layout: ParallelLayout,
        stack: ExitStack,
        forward: Callable[..., Any],
        heads: tuple[int, int] | None,
    ) -> Callable[..., Any]:
        """`forward` of ranks that share sequences."""
        return share_sequences(schema, self.module, layout, stack, forward, heads)

    def export_experts(self, experts: SpreadExperts | None, stack: ExitStack) -> None:
        """Let state dicts of the module bring along how its experts become whole."""
        export_whole(self.module, experts, stack)

    def measure(self, measure: NormRanks, layout: ParallelLayout) -> NormRanks:
        """The ranks over which the norm of the gradients is summed."""
        return measure

    def model_ranks(self, layout: ParallelLayout) -> AxisGroup:
        """The ranks that share what this rank computes."""
        return layout.model

    def stages(self) -> tuple[int, ...]:
        """The stages of a pipeline on this rank."""
        return ()

    def blocks(self) -> NumberedBlocks:
        """The repeated blocks of the model."""
        found = repeated_blocks(self.module)
        if not found:
            raise UsageError(
                f"{type(self.module).__name__} has no list of two or more modules of one class; name lists in "
                "progressive_layer_drop.blocks, or remove progressive_layer_drop.drop_blocks"
            )
        return NumberedBlocks(list(enumerate(found)), len(found))

    def counted_elsewhere(self) -> frozenset[int]:
        """Parameters, by id, that a stage before this one has, too."""
        return frozenset()

    def warn_if_frozen(self, optimizer: Optimizer | None) -> None:
        """Log a warning if there is an optimizer and nothing to train."""
        warn_if_frozen(self.module, optimizer)

    def engine(self, parts: Parts) -> DeepSpeedEngine:
        return DeepSpeedEngine(parts)
