"""Graphs that inductor compiles, after the passes; imported with inductor, which takes a while."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass

from deepspeed.errors import UsageError

if TYPE_CHECKING:
    from deepspeed.compile.backend import CapturedGraph


class _SeesBoth(CustomGraphPass):
    """Shows forward and backward together before they are two graphs."""

    def __init__(self, captured: CapturedGraph) -> None:
        self._captured = captured

    def __call__(self, graph: fx.Graph) -> None:
        self._captured.prepare(graph)

    def uuid(self) -> str:
        """What it does is all in the graphs that are compiled."""
        return "deepspeed.compile"


def by_inductor(captured: CapturedGraph, module: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Any:
    """Let inductor compile what passes make of a captured graph; `options` are inductor's."""
    if inductor_config.joint_custom_pre_pass is not None:
        raise UsageError(
            "compile.deepcompile: torch._inductor.config.joint_custom_pre_pass is set, and DeepCompile needs it; unset "
            "it, or turn compile.deepcompile off"
        )

    def inner(graph: fx.GraphModule, fakes: Sequence[Any], **kwargs: Any) -> Any:
        return captured.compile(
            graph, bool(kwargs.get("is_backward")), lambda: compile_fx_inner(graph, fakes, **kwargs)
        )

    # A cache by the captured graph would not know what passes have made of it; the cache of inductor does.
    without_cache = functorch_config.patch(enable_autograd_cache=False)
    with without_cache, inductor_config.patch(joint_custom_pre_pass=_SeesBoth(captured)):
        # No CUDA graphs: the memory of parameters comes and goes.
        patches = {**options, "triton.cudagraphs": False}
        return compile_fx(module, inputs, inner_compile=inner, config_patches=patches)
