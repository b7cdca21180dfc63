"""A profile as text: the numbers of the whole model, the heaviest modules of each depth, and the tree of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from deepspeed.profiling.flops_profiler.count import ModuleProfile, params_of

_WIDTH = 72

_TITLE = "DeepSpeed Flops Profiler"

_NOTES = (
    "MACs are multiplications with an addition; flops are all floating-point operations, FLOPS those per second.",
    "Work is what torch was asked for, so that FLOPS can exceed what a device is able to do.",
    "fwd, bwd and step are the latencies of forward, backward and the optimizer's step; iter is their sum.",
)


@dataclass(frozen=True)
class Stage:
    """What one rank of a pipeline counted of its layers."""

    params: int
    """Those that no stage before it has, too."""
    macs: float
    flops: float
    """Of one micro-batch."""
    phases: Mapping[str, float]
    """Seconds of fwd, bwd and step in a whole step."""
    modules: list[str]
    """Its heaviest modules, and the tree of them, as lines."""


@dataclass(frozen=True)
class Facts:
    """What is known of the job besides the model."""

    world: int | None = None
    data_parallel: int | None = None
    model_parallel: int = 1
    batch: int | None = None
    """Samples per GPU and micro step."""
    samples: int | None = None
    """Of a whole step, over all ranks."""
    micro_steps: int = 1
    """Forward and backward passes of a step."""
    recompute: float = 0.0
    """Share of the forward pass that the backward pass repeats."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of fwd, bwd and step in a whole step, as the engine measured them."""
    peak: float | None = None
    """FLOPS that the device is said to be able to do."""
    stages: tuple[Stage, ...] = ()
    """Of a pipeline, in the order of its ranks, of which this is the first."""
    iteration: float = 0.0
    """Of a pipeline: seconds of a whole step, with the time in which ranks wait for each other."""


def facts_of(engine: Any, recompute: float = 0.0) -> Facts:
    """What an engine tells by its public methods; None is no engine."""
    if engine is None:
        return Facts(recompute=recompute)
    timers = engine.timers.get_timers()
    times = {name: timers[name].elapsed(reset=False) / 1e3 for name in ("fwd", "bwd", "step") if name in timers}
    return Facts(
        world=engine.world_size,
        data_parallel=engine.dp_world_size,
        model_parallel=engine.mp_world_size,
        batch=engine.train_micro_batch_size_per_gpu(),
        samples=engine.train_batch_size(),
        micro_steps=engine.gradient_accumulation_steps(),
        recompute=recompute,
        phases=times if all(times.values()) else {},  # in the middle of a step they belong together no more
    )


def summary(profile: ModuleProfile, facts: Facts, step: int) -> list[str]:
    """The numbers of the whole model, a line each."""
    lines = ["", f"{'-' * 26} {_TITLE} {'-' * 26}", f"Profile of step {step}", *_NOTES, ""]
    return lines + [f"{name + ':':<{_WIDTH}}{value}" for name, value in _rows(profile, facts)]


def _rows(profile: ModuleProfile, facts: Facts) -> Iterator[tuple[str, str]]:
    model, slices = profile.model, facts.model_parallel
    flops, params = profile.flops(model), params_of(model)
    for name, number in (
        ("world size", facts.world),
        ("data parallel size", facts.data_parallel),
        ("model parallel size", slices if facts.world is not None else None),
        ("batch size per GPU", facts.batch),
    ):
        if number is not None:
            yield name, str(number)
    if facts.stages:
        yield from _of_stages(facts)
        return
    yield "params per GPU", params_to_string(params)
    yield "params of model = params per GPU * mp_size", params_to_string(params * slices)
    yield "fwd MACs per GPU", number_to_string(profile.macs(model), "MACs")
    yield "fwd flops per GPU", number_to_string(flops)
    yield "fwd flops of model = fwd flops per GPU * mp_size", number_to_string(flops * slices)
    forward = facts.phases.get("fwd", 0.0) / facts.micro_steps or profile.duration(model)
    yield "fwd latency", number_to_string(forward, "s")
    yield "fwd FLOPS per GPU = fwd flops per GPU / fwd latency", _rate(flops, forward)
    if "bwd" in facts.phases and "step" in facts.phases:
        yield from _whole_step(flops, forward, facts)


def _of_stages(facts: Facts) -> Iterator[tuple[str, str]]:
    """A pipeline: each rank, their sum, and the step that they take together."""
    slices, passes = facts.model_parallel, facts.micro_steps
    yield "pipeline ranks", str(len(facts.stages))
    for number, stage in enumerate(facts.stages):
        forward, backward = (stage.phases.get(name, 0.0) / passes for name in ("fwd", "bwd"))
        yield f"pipeline rank {number}, params", params_to_string(stage.params)
        yield f"pipeline rank {number}, fwd MACs", number_to_string(stage.macs, "MACs")
        yield f"pipeline rank {number}, fwd flops", number_to_string(stage.flops)
        yield f"pipeline rank {number}, fwd latency", number_to_string(forward, "s")
        yield f"pipeline rank {number}, bwd latency", number_to_string(backward, "s")
    flops = slices * sum(stage.flops for stage in facts.stages)
    words = "sum over pipeline ranks * tp_size"
    yield f"params of model = {words}", params_to_string(slices * sum(stage.params for stage in facts.stages))
    yield f"fwd MACs of model = {words}", number_to_string(slices * sum(stage.macs for stage in facts.stages), "MACs")
    yield f"fwd flops of model = {words}", number_to_string(flops)
    total, times, devices = facts.iteration, 3.0 + facts.recompute, slices * len(facts.stages)
    yield "step latency", number_to_string(facts.stages[0].phases.get("step", 0.0), "s")
    yield "iter latency, ranks that wait included", number_to_string(total, "s")
    label = f"FLOPS per GPU = {passes} * {times:g} * fwd flops of model / {devices} / iter latency"
    yield label, _rate(passes * times * flops / devices, total)
    yield from _efficiency(f"{passes} * 3 * fwd flops of model / {devices}", passes * flops / devices, total, facts)


def _whole_step(flops: float, forward: float, facts: Facts) -> Iterator[tuple[str, str]]:
    times, passes = 2.0 + facts.recompute, facts.micro_steps
    backward, step = facts.phases["bwd"] / passes, facts.phases["step"]
    total = passes * (forward + backward) + step
    both = (1 + times) * flops
    yield "bwd latency", number_to_string(backward, "s")
    yield f"bwd FLOPS per GPU = {times:g} * fwd flops per GPU / bwd latency", _rate(times * flops, backward)
    label = f"fwd+bwd FLOPS per GPU = {1 + times:g} * fwd flops per GPU / (fwd+bwd latency)"
    yield label, _rate(both, forward + backward)
    yield "step latency", number_to_string(step, "s")
    count = f"{passes} * " if passes > 1 else ""
    yield f"iter latency = {count}(fwd+bwd latency) + step latency", number_to_string(total, "s")
    yield f"FLOPS per GPU = {count}{1 + times:g} * fwd flops per GPU / iter latency", _rate(passes * both, total)
    yield from _efficiency(f"{count}3 * fwd flops per GPU", passes * flops, total, facts)


def _efficiency(words: str, forward_flops: float, total: float, facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.peak:
        share = 3 * forward_flops / total / facts.peak if total else 0.0
        yield f"MFU = {words} / iter latency / {number_to_string(facts.peak, 'FLOPS')}", f"{share:.1%}"
    if facts.samples:
        yield "samples/second", number_to_string(facts.samples / total if total else 0.0).strip()


def _rate(work: float, seconds: float) -> str:
    return number_to_string(work / seconds if seconds else 0.0, "FLOPS")


def aggregated(profile: ModuleProfile, depth: int = -1, top: int = 1) -> list[str]:
    """The heaviest kinds of modules at each depth, or at one: by parameters, MACs and latency."""
    levels: dict[int, dict[str, list[float]]] = {}

    def walk(module: nn.Module, at: int) -> None:
        held = levels.setdefault(at, {}).setdefault(type(module).__name__, [0.0, 0.0, 0.0])
        for place, value in enumerate(_measured(profile, module)):
            held[place] += value
        for child in module.children():
            walk(child, at + 1)

    walk(profile.model, 0)
    chosen = levels if depth == -1 else {min(depth, max(levels)): levels[min(depth, max(levels))]}
    lines = ["", f"{'-' * 29} Aggregated Profile per GPU {'-' * 29}"]
    lines.append(f"The {top} heaviest kinds of modules at each depth, by params, MACs and fwd latency")
    shows: tuple[tuple[str, Callable[[float], str]], ...] = (
        ("params     ", params_to_string),
        ("MACs       ", lambda number: number_to_string(number, "MACs")),
        ("fwd latency", lambda number: number_to_string(number, "s")),
    )
    for at, kinds in chosen.items():
        lines.append(f"depth {at}:")
        for place, (name, show) in enumerate(shows):
            heaviest = sorted(kinds.items(), key=lambda item: -item[1][place])[:top]
            lines.append(f"    {name} - { {kind: show(values[place]) for kind, values in heaviest} }")
    return lines


def detailed(profile: ModuleProfile) -> list[str]:
    """The tree of modules as torch prints it, each with its share of the whole."""
    lines = [
        "",
        f"{'-' * 30} Detailed Profile per GPU {'-' * 30}",
        "Each module with: params, share of params, MACs, share of MACs, fwd latency, share of latency, fwd FLOPS.",
        "What a module computes by functions is its own: the difference between its numbers and its children's.",
        "",
    ]
    return lines + _tree(profile, profile.model, "", _measured(profile, profile.model))


def _measured(profile: ModuleProfile, module: nn.Module) -> tuple[float, float, float]:
    """Parameters, MACs and latency."""
    return params_of(module), profile.macs(module), profile.duration(module)


def _tree(profile: ModuleProfile, module: nn.Module, name: str, totals: tuple[float, float, float]) -> list[str]:
    label = f"({name}): " if name else ""
    said = ", ".join(part for part in (_numbers(profile, module, totals), module.extra_repr()) if part)
    children = list(module.named_children())
    if not children:
        return [f"{label}{type(module).__name__}({said})"]
    inner = [f"  {line}" for child, part in children for line in _tree(profile, part, child, totals)]
    return [f"{label}{type(module).__name__}(", f"  {said}", *inner, ")"]


def _numbers(profile: ModuleProfile, module: nn.Module, totals: tuple[float, float, float]) -> str:
    params, macs, duration = measured = _measured(profile, module)
    shares = [
        f"{round(100 * value / total, 2) if total else 0.0:g}%" for value, total in zip(measured, totals, strict=True)
    ]
    return ", ".join(
        (
            f"{params_to_string(params)} = {shares[0]} Params",
            f"{number_to_string(macs, 'MACs')} = {shares[1]} MACs",
            f"{number_to_string(duration, 's')} = {shares[2]} latency",
            _rate(profile.flops(module), duration),
        )
    )


_PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, unit: str = "") -> str:
    """The number with the largest prefix of its unit that leaves at least 1 before the point."""
    prefix = next((prefix for prefix, size in _PREFIXES.items() if num >= size), "u") if num > 0 else ""
    return f"{round(num / _PREFIXES[prefix], 2):g} {prefix}{unit}"


def params_to_string(params_num: float) -> str:
    """Parameters, a billion of which are 1 B."""
    return number_to_string(params_num).replace("G", "B").strip()
