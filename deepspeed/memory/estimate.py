"""The memory estimators that users call: published formulas, printed as a table.

P are parameters, G all GPUs, N nodes, g = G / N; parameters and gradients have 16 bits, Adam keeps fp32 masters and two
moments. CPU numbers are per node and times `additional_buffer_factor`. 4·P·g is a model of fp32 built by every process
of a node before anything is sharded.

          offload            per GPU            per CPU
stage 1   none               4·P + 16·P/G       4·P·g
          optimizer          4·P                P·max(4·G, 16)
stage 2   none               2·P + 18·P/G       4·P·g
          optimizer          2·P                P·max(4·G, 16)
stage 3   none               4·L + 18·P/G       4·L·g with zero.Init, else 4·P·g
          optimizer          4·L + 2·P/G        16·P/N with zero.Init, else P·max(4·g, 16/N)
          both               4·L                18·P/N with zero.Init, else P·max(4·g, 18/N)

L are the parameters of the largest layer. The formula of stage 1 follows from its definition: what stage 2 counts as 18
are 2 of gradients, 4 of their fp32 copy, 4 of masters and 8 of moments; stage 1 shards all of these but the gradients,
which are whole on every GPU until the step, also if the optimizer is offloaded. With several
nodes the published CPU number of stages 1 and 2 with an offloaded optimizer counts the processes of all of them, which
is more than a node needs. These are estimates for planning; `model_states` is exact, and `plan_states` says in which
tier its bytes find place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

Row = tuple[int, int, str]
"""(bytes per CPU, bytes per GPU, options)."""


@dataclass(frozen=True, slots=True)
class _WholeParameters:
    """The estimators of a stage with whole parameters."""

    whole: int
    """Bytes of each parameter on every GPU."""
    sharded: int
    """Bytes of each parameter that are spread over all of them."""

    def needs(
        self,
        total_params: int,
        num_gpus_per_node: int = 1,
        num_nodes: int = 1,
        cpu_offload: bool = True,
        additional_buffer_factor: float = 1.5,
    ) -> tuple[int, int]:
        """(bytes per CPU, bytes per GPU) at this stage."""
        gpus = num_gpus_per_node * num_nodes
        if cpu_offload:
            return int(total_params * max(4 * gpus, 16) * additional_buffer_factor), int(self.whole * total_params)
        cpu = 4 * total_params * num_gpus_per_node * additional_buffer_factor
        return int(cpu), int(self.whole * total_params + self.sharded * total_params / gpus)

    def all_live(
        self, model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
    ) -> None:
        """Print the estimates of this stage for a model, which may be sharded already or on the meta device."""
        self.all_cold(_total(model), num_gpus_per_node, num_nodes, additional_buffer_factor)

    def all_cold(
        self, total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
    ) -> None:
        """Print the estimates of this stage for a number of parameters."""
        rows = []
        for offload in (True, False):
            needs = self.needs(total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor)
            rows.append((*needs, f"offload_optimizer={_tier(offload)}"))
        _print(f"{_millions(total_params)} total params", num_gpus_per_node, num_nodes, rows)


_STAGE_1, _STAGE_2 = _WholeParameters(whole=4, sharded=16), _WholeParameters(whole=2, sharded=18)

estimate_zero1_model_states_mem_needs = _STAGE_1.needs
estimate_zero1_model_states_mem_needs_all_live = _STAGE_1.all_live
estimate_zero1_model_states_mem_needs_all_cold = _STAGE_1.all_cold
estimate_zero2_model_states_mem_needs = _STAGE_2.needs
estimate_zero2_model_states_mem_needs_all_live = _STAGE_2.all_live
estimate_zero2_model_states_mem_needs_all_cold = _STAGE_2.all_cold


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """(bytes per CPU, bytes per GPU, bytes of the largest layer) at stage 3."""
    gpus = num_gpus_per_node * num_nodes
    layer = 4 * largest_layer_params
    built = 4 * num_gpus_per_node
    if not cpu_offload:
        gpu = layer + int(18 * total_params / gpus)
        cpu: float = built * (largest_layer_params if zero_init else total_params)
    else:
        gpu = layer if cpu_offload_params else layer + int(2 * total_params / gpus)
        kept = (18 if cpu_offload_params else 16) / num_nodes
        cpu = total_params * (kept if zero_init else max(built, kept))
    return int(cpu * additional_buffer_factor), int(gpu), int(layer)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates of stage 3 for a model, which may be sharded already or on the meta device."""
    estimate_zero3_model_states_mem_needs_all_cold(
        _total(model), _largest_layer(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimates of stage 3 for a number of parameters and that of the largest layer."""
    rows = []
    for params, optimizer in ((True, True), (False, True), (False, False)):
        for zero_init in (True, False):
            cpu, gpu, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                optimizer,
                params,
                zero_init,
                additional_buffer_factor,
            )
            options = f"offload_param={_tier(params)}, offload_optimizer={_tier(optimizer)}, zero_init={int(zero_init)}"
            rows.append((cpu, gpu, options))
    sizes = f"{_millions(total_params)} total params, {_millions(largest_layer_params)} largest layer params"
    _print(sizes, num_gpus_per_node, num_nodes, rows)


def _numel(params: Iterable[nn.Parameter]) -> int:
    # a sharded parameter has no elements of its own and remembers how many it has
    return sum(int(getattr(param, "ds_numel", param.numel())) for param in params)


def _total(model: nn.Module) -> int:
    """Elements of all parameters; torch lists a tied one once."""
    return _numel(model.parameters())


def _largest_layer(model: nn.Module) -> int:
    """Elements of the largest module, its children not counted."""
    return max(_numel(module.parameters(recurse=False)) for module in model.modules())


def _tier(offload: bool) -> str:
    return "cpu" if offload else "none"


def _millions(params: int) -> str:
    return f"{int(params / 1e6)}M"


def _print(sizes: str, gpus_per_node: int, nodes: int, rows: Iterable[Row]) -> None:
    lines = [
        "Estimated memory needed for params, optim states and gradients for a:",
        f"HW: Setup with {_counted(nodes, 'node')}, {_counted(gpus_per_node, 'GPU')} per node.",
        f"SW: Model with {sizes}.",
        "  per CPU  |  per GPU |   Options",
    ]
    lines += [f" {cpu / 2**30:7.2f}GB | {gpu / 2**30:6.2f}GB | {options}" for cpu, gpu, options in rows]
    sys.stdout.write("\n".join(lines) + "\n")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
