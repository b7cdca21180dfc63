"""One layer of experts on one CUDA device, forward and backward, against Transformers, DeepSpeed and a dense layer.

    python benchmarks/gpu_moe.py                                    # 8 and 64 experts, every contender in turn
    python benchmarks/gpu_moe.py --deepspeed-path FOLDER            # the real one, too, in a process of its own
    python benchmarks/gpu_moe.py --profile ours --experts 64        # which kernels take the time
    python benchmarks/gpu_moe.py --only ours --reference wide_linear,combine_rows     # without some of the kernels
    python benchmarks/gpu_moe.py --device cpu --hidden 64 --inner 128 --tokens 256 --steps 2      # does it run at all?

Two experts of each token compute a gated unit (three products). `dense` is one such unit over twice as many rows: the
same floating-point operations. Time is that of CUDA events, the median of the steps; the peak counts weights and
gradients. `ours:blocks` is Transformers' block with its experts as `expert_parallel` computes them. `ours:apart` has
experts whose two products of one input are not recognised as gate and value. `ours:capacity` and `deepspeed` drop
tokens that exceed the capacity, the others none.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["CONTENDERS", "main", "table"]

MARK = "gpu-moe-result "
TARGETS = {("ours", 8): 15.0, ("ours", 64): 17.0}  # ms on an H200 with the default sizes

OPS = ("spread_rows", "combine_rows", "combine_slopes", "wide_linear", "gated_halves")  # what a variant can do without

Row = dict[str, Any]
"""contender, experts, ms, gib, or error."""


def _gated(options: argparse.Namespace) -> Any:
    from torch import nn

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = (nn.Linear(options.hidden, options.inner, bias=False) for _ in range(2))
            self.down = nn.Linear(options.inner, options.hidden, bias=False)

        def forward(self, rows: Any) -> Any:
            return self.down(nn.functional.silu(self.gate(rows)) * self.up(rows))

    return Gated()


def _apart(options: argparse.Namespace) -> Any:
    """The same unit in steps that nothing recognises as a gate and its value: two products and an activation."""
    from torch import nn

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unit = _gated(options)
            self.same = nn.Identity()

        def forward(self, rows: Any) -> Any:
            unit = self.unit
            return unit.down(nn.functional.silu(unit.gate(rows)) * unit.up(self.same(rows)))

    return Apart()


def _layer(options: argparse.Namespace, experts: int, expert: Any = None, **choices: Any) -> Callable[[Any], Any]:
    """The layer of whichever deepspeed is imported."""
    from deepspeed.moe.layer import MoE

    layer: Any = MoE(options.hidden, expert or _gated(options), experts, k=2, **choices)
    return lambda tokens: layer(tokens)[0]


def _ours(options: argparse.Namespace, experts: int) -> Callable[[Any], Any]:
    return _layer(options, experts, drop_tokens=False, top2_2nd_expert_sampling=False)


def _ours_apart(options: argparse.Namespace, experts: int) -> Callable[[Any], Any]:
    return _layer(options, experts, _apart(options), drop_tokens=False, top2_2nd_expert_sampling=False)


def _with_capacity(options: argparse.Namespace, experts: int) -> Callable[[Any], Any]:
    return _layer(options, experts)


def _deepspeed(options: argparse.Namespace, experts: int) -> Callable[[Any], Any]:
    import deepspeed
    from deepspeed.moe.layer import MoE

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: os.environ.get(name, value) for name, value in defaults.items()})
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("nccl" if options.device == "cuda" else "gloo", verbose=False)
    layer: Any = MoE(options.hidden, _gated(options), experts, k=2)
    layer.set_deepspeed_parallelism()
    return lambda tokens: layer(tokens)[0]


def _mixtral(options: argparse.Namespace, experts: int) -> Any:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=options.hidden,
        intermediate_size=options.inner,
        num_local_experts=experts,
        num_experts_per_tok=2,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    config._experts_implementation = "grouped_mm"
    block = MixtralSparseMoeBlock(config)
    for param in block.parameters():
        param.data.normal_(std=0.02)
    return block


def _transformers(options: argparse.Namespace, experts: int) -> Callable[[Any], Any]:
    block = _mixtral(options, experts)
    return lambda tokens: block(tokens.unsqueeze(0))


def _blocks(options: argparse.Namespace, experts: int) -> Callable[[Any], Any]:
    """Transformers' block with its experts as `expert_parallel` computes them, all on one rank."""
    from deepspeed.moe.stacked_experts import StackedExperts, kind_of, spread_stack
    from deepspeed.parallel import ParallelLayout

    block = _mixtral(options, experts)
    layout = ParallelLayout.build(world=1, rank=0)
    arguments = kind_of(block.experts) or ()
    stack = StackedExperts(
        "experts", experts, layout.experts(1), grouped=True, arguments=arguments, tensor=layout["tp"]
    )
    spread_stack(block.experts, stack, set())
    return lambda tokens: block(tokens.unsqueeze(0))


def _dense(options: argparse.Namespace, experts: int) -> Callable[[Any], Any]:
    import torch

    unit = _gated(options)
    return lambda tokens: unit(torch.cat((tokens, tokens)))


CONTENDERS: dict[str, Callable[[argparse.Namespace, int], Callable[[Any], Any]]] = {
    "dense": _dense,
    "transformers": _transformers,
    "ours": _ours,
    "ours:apart": _ours_apart,
    "ours:capacity": _with_capacity,
    "ours:blocks": _blocks,
    "deepspeed": _deepspeed,
}


def _measure(name: str, options: argparse.Namespace, experts: int) -> Row:
    """Build a contender, take steps, and let go of it."""
    import torch

    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated() if cuda else 0
    torch.manual_seed(0)
    wide = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(options.device):
            call = CONTENDERS[name](options, experts)
            tokens = torch.randn(options.tokens, options.hidden, requires_grad=True)
            slope = torch.randn(options.tokens, options.hidden)
    finally:
        torch.set_default_dtype(wide)

    def step() -> None:
        out = call(tokens).reshape(-1, options.hidden)
        out.backward(slope if len(out) == len(slope) else torch.cat((slope, slope)))

    weights = _weights(call)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    if options.profile:
        _show_profile(step, weights)
    times = [_one(step, [tokens, *weights], cuda) for _ in range(options.steps + options.warm_up)]
    peak = torch.cuda.max_memory_allocated() - base if cuda else 0
    return {
        "contender": name,
        "experts": experts,
        "ms": statistics.median(times[options.warm_up :]),
        "gib": peak / 2**30,
    }


def _weights(call: Any) -> list[Any]:
    """The parameters of whatever modules a contender's function holds."""
    from torch import nn

    held = [cell.cell_contents for cell in call.__closure__ or ()]
    return [param for each in held if isinstance(each, nn.Module) for param in each.parameters()]


def _one(step: Callable[[], None], leaves: Sequence[Any], cuda: bool) -> float:
    """Milliseconds of one step."""
    import torch

    for leaf in leaves:
        leaf.grad = None
    if not cuda:
        began = time.perf_counter()
        step()
        return (time.perf_counter() - began) * 1e3
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


def _show_profile(step: Callable[[], None], leaves: Sequence[Any]) -> None:
    import torch

    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    _one(step, leaves, False)
    with torch.profiler.profile(activities=kinds) as profile:
        _one(step, leaves, False)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    order = "cuda_time_total" if torch.cuda.is_available() else "cpu_time_total"
    print(profile.key_averages().table(sort_by=order, row_limit=25), flush=True)


def _try(name: str, options: argparse.Namespace, experts: int) -> Row:
    """A contender that fails is a line of the table, not the end of the run."""
    try:
        return _measure(name, options, experts)
    except Exception as error:  # noqa: BLE001 - whatever another library raises is shown
        traceback.print_exc()
        return {"contender": name, "experts": experts, "error": f"{type(error).__name__}: {str(error)[:200]}"}
    finally:
        gc.collect()


def _in_a_process(options: argparse.Namespace) -> list[Row]:
    """Real DeepSpeed, which has the same name as this library."""
    command = [sys.executable, str(Path(__file__).resolve()), "--as-deepspeed", "--device", options.device]
    for name in ("deepspeed_path", "hidden", "inner", "tokens", "steps", "warm_up", "experts"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout, check=False)
    except subprocess.TimeoutExpired:
        return [{"contender": "deepspeed", "experts": 0, "error": f"no result within {options.timeout} s"}]
    rows = [json.loads(line.removeprefix(MARK)) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not rows or any("error" in row for row in rows):
        print(f"--- deepspeed\n{(done.stdout + done.stderr)[-4000:]}", flush=True)
    failed = {"contender": "deepspeed", "experts": 0, "error": f"exit code {done.returncode}"}
    return rows or [failed]


def table(rows: Sequence[Row]) -> list[str]:
    """One line per contender and number of experts; times also as a multiple of the dense layer's."""
    dense = {row["experts"]: row["ms"] for row in rows if row["contender"] == "dense" and "ms" in row}
    lines = [f"{'experts':>7}  {'contender':<16} {'ms':>8} {'÷ dense':>8} {'peak GiB':>9}"]
    for row in sorted(rows, key=lambda row: int(row["experts"])):
        head = f"{row['experts']:>7}  {row['contender']:<16}"
        if "error" in row:
            lines.append(f"{head} failed: {row['error']}")
            continue
        times = row["ms"] / dense[row["experts"]] if row["experts"] in dense else float("nan")
        target = TARGETS.get((row["contender"], row["experts"]))
        told = "" if target is None else f"   target {target:.0f} ms"
        lines.append(f"{head} {row['ms']:>8.2f} {times:>8.2f} {row['gib']:>9.2f}{told}")
    return lines


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="One layer of experts, forward and backward, on one device.")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--experts", default="8,64", help="numbers of experts")
    made.add_argument("--only", default="", help=f"contenders, of {','.join(CONTENDERS)}")
    made.add_argument("--hidden", type=int, default=2048)
    made.add_argument("--inner", type=int, default=5632, help="width of an expert")
    made.add_argument("--tokens", type=int, default=16384)
    made.add_argument("--steps", type=int, default=10)
    made.add_argument("--warm-up", type=int, default=3)
    made.add_argument("--timeout", type=float, default=40.0, help="seconds for real DeepSpeed")
    made.add_argument("--deepspeed-path", default="", help="the folder that has real DeepSpeed's `deepspeed`")
    made.add_argument("--as-deepspeed", action="store_true", help=argparse.SUPPRESS)
    made.add_argument(
        "--reference",
        default="",
        metavar="OPS",
        help="run these operations by their torch reference, as " + ",".join(OPS),
    )
    made.add_argument("--profile", default="", metavar="CONTENDER", help="show the kernels of a step of one contender")
    made.add_argument("--json", type=Path, help="write the rows to this file")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 where ours could not be measured."""
    options = _parser().parse_args(arguments)
    numbers = [int(each) for each in options.experts.split(",")]
    for each in filter(None, options.reference.split(",")):
        os.environ[f"DS_OP_{each.upper()}"] = "reference"
    own = str(Path(__file__).resolve().parent.parent)
    sys.path.insert(0, options.deepspeed_path if options.as_deepspeed else own)
    if options.as_deepspeed:
        for experts in numbers:
            print(MARK + json.dumps(_try("deepspeed", options, experts)), flush=True)
        return 0
    names = [name for name in options.only.split(",") if name] or [name for name in CONTENDERS if name != "deepspeed"]
    if options.profile:
        names = [options.profile]
    rows = [_try(name, options, experts) for experts in numbers for name in names if name != "deepspeed"]
    if options.deepspeed_path and (not options.only or "deepspeed" in names) and not options.profile:
        rows += _in_a_process(options)
    print("\n".join(table(rows)), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return int(any("error" in row for row in rows if row["contender"].startswith("ours")))


if __name__ == "__main__":
    raise SystemExit(main())
