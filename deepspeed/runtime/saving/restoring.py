"""A checkpoint into the parts of an engine, whatever topology wrote it: every rank reads the intervals that it holds.

[Note: order of a load] First everything is compared, then read into masters, shards and states, then published. Only
publishing communicates, so that a rank which fails before can tell the others, and none of them waits for it in vain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from deepspeed.checkpoint.formats.bulk_read import BulkRead
from deepspeed.checkpoint.formats.source import Source
from deepspeed.errors import CheckpointError, UsageError
from deepspeed.log import log_dist
from deepspeed.ops.optimizer import BatchOptimizer
from deepspeed.runtime.base_optimizer import reload
from deepspeed.runtime.parts import Parts
from deepspeed.runtime.saving.model_state import load_by
from deepspeed.runtime.saving.training_state import listed_groups, model_names, model_values, settle_edits, shape_of
from deepspeed.zero.interface import Shard, shard_of, shards_of
from deepspeed.zero.interface import gather as fetch

# Whether an optimizer here can go on with the optimizer states of a checkpoint. No file says which class wrote it,
# DeepSpeed's least of all; but its states and its options tell. Classes that keep the same states by the same options,
# such as the Adams of torch and of this library, are taken for one optimizer.

# Options that say how an update is computed or where it is listed, not which update it is.
_SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum", "step")
_LISTED = ("params", "param_names", "name", "use_muon", "weight_decay", "amsgrad", "bias_correction")
_COMPUTED = ("foreach", "fused", "maximize", "capturable", "differentiable", "decoupled_weight_decay")
_NEUTRAL = frozenset((*_SCHEDULED, *_LISTED, *_COMPUTED))
_WRITERS = {
    ("exp_avg", "exp_avg_sq"): "an optimizer like Adam or AdamW",
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"): "Adam or AdamW with amsgrad",
    ("exp_avg",): "an optimizer like Lion",
    ("momentum_buffer",): "an optimizer like SGD with momentum",
    ("sum",): "an optimizer like Adagrad",
    ("square_avg",): "an optimizer like RMSprop",
    (): "an optimizer without states, like SGD",
}


def expected_kinds(optimizer: Optimizer) -> frozenset[str] | None:
    """The states of a parameter's shape that the optimizer keeps; None if that cannot be known without training."""
    if isinstance(optimizer, BatchOptimizer):
        return frozenset(optimizer.moments)
    found = frozenset(kind for param, state in optimizer.state.items() for kind in _shaped(state, param))
    if found:
        return found
    if isinstance(optimizer, LBFGS) or not type(optimizer).__module__.startswith("torch.optim."):
        return None
    return _tried(optimizer)


def _tried(optimizer: Optimizer) -> frozenset[str] | None:
    """By a step over a parameter of its own; the optimizer is as before then."""
    first = next((param for group in optimizer.param_groups for param in group["params"]), None)
    if first is None:
        return None
    trial = nn.Parameter(torch.zeros(2, 2, device=first.device))
    trial.grad = torch.zeros_like(trial)
    groups, states = optimizer.param_groups, optimizer.state
    optimizer.param_groups, optimizer.state = [{**groups[0], "params": [trial]}], defaultdict(dict)
    try:
        type(optimizer).step(optimizer)
        return _shaped(optimizer.state[trial], trial)
    except (RuntimeError, TypeError, ValueError):
        return None  # one that cannot be tried is not judged by this
    finally:
        optimizer.param_groups, optimizer.state = groups, states


def _shaped(state: Mapping[str, Any], param: Tensor) -> frozenset[str]:
    return frozenset(key for key, value in state.items() if isinstance(value, Tensor) and value.shape == param.shape)


def require_match(optimizer: Optimizer, kinds: Iterable[str], saved: Iterable[Mapping[str, Any]]) -> None:
    """Refuse states of another optimizer; `kinds` are those that were saved, `saved` the options of its groups."""
    found, expected = frozenset(kinds), expected_kinds(optimizer)
    theirs = {key for options in saved for key in options} - _NEUTRAL
    ours = {key for options in optimizer.param_groups for key in options} - _NEUTRAL
    if not theirs:
        return
    foreign, lacking = theirs - ours, ours - theirs
    other = bool(foreign and lacking)
    if found and expected is not None and found != expected:
        needed = isinstance(optimizer, BatchOptimizer) or bool(found - expected)
        other = other or bool(foreign or lacking) or bool(needed and expected - found)
    if not other:
        return
    writer = _WRITERS.get(tuple(sorted(found)), "another optimizer")
    name = type(optimizer).__name__
    needs = "" if expected is None else f", which keeps {', '.join(sorted(expected)) or 'no states'}"
    raise CheckpointError(
        f"the optimizer states of this checkpoint were written by {writer} "
        f"(states {', '.join(sorted(found)) or 'none'}; options {', '.join(sorted(theirs))}), "
        f"but this engine trains with {name}{needs}. Resume with the optimizer that wrote it, or pass "
        "load_optimizer_states=False to load the weights and begin with a new optimizer."
    )


def fitting(saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a saved group that the optimizer here knows too."""
    return {key: value for key, value in saved.items() if key in own or key in ("initial_lr", "step")}


def rates(optimizer: Optimizer | None) -> list[Any]:
    """The learning rate of each group."""
    return [] if optimizer is None else [group.get("lr") for group in optimizer.param_groups]


def warn_of_rates(optimizer: Optimizer | None, before: list[Any]) -> None:
    """A learning rate that was edited in the config does not survive a resume: log that where nothing sets it."""
    if optimizer is None or any("initial_lr" in group for group in optimizer.param_groups):
        return  # a schedule of the caller's sets it
    changed = [(old, new) for old, new in zip(before, rates(optimizer), strict=True) if old != new]
    if changed:
        old, new = changed[0]
        log_dist(
            f"the learning rate of the checkpoint, {new}, replaces that of the optimizer as it was built, {old}. To "
            "train with the latter, pass load_optimizer_states=False, or set 'lr' in engine.optimizer.param_groups "
            "after the load.",
            level=WARNING,
        )


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What of a checkpoint is wanted."""

    strict: bool = True
    """The checkpoint has to hold exactly the model's names."""
    weights: str = "master"
    """From which kind the weights are read: "master" or "param"."""
    optimizer: bool = True
    load_fn: Callable[..., Any] | None = None
    """The user's own way to put a state dict into the model."""


@dataclass(frozen=True, slots=True)
class _HeldParameter:
    """What this rank holds of a parameter that the optimizer trains."""

    name: str
    shape: torch.Size
    interval: tuple[int, int]
    master: nn.Parameter | None
    whole: bool


class Restoring:
    """One load, in three steps: `examine` and `read` on every rank by itself, `publish` on all together."""

    def __init__(self, parts: Parts, source: Source, wish: LoadRequest) -> None:
        self._parts, self._source, self._wish = parts, source, wish
        self._groups = listed_groups(parts)
        self._held = [
            _HeldParameter(name, shape_of(param), group.interval(place), group.masters[place], group.layout is None)
            for group in self._groups
            for place, (name, param) in enumerate(zip(group.names, group.params, strict=True))
        ]
        owned = {held.name for held in self._held}
        named = [(parts.name_of(name), param) for name, param in parts.module.named_parameters()]
        self._others = [(name, param) for name, param in named if name not in owned]
        self._state_dict: dict[str, Tensor] | None = None
        self._reads = BulkRead()
        self._after: list[tuple[Tensor, Tensor]] = []
        self._coded: list[tuple[Shard, Tensor]] = []

    # ---- compare

    def examine(self) -> None:
        """Refuse a checkpoint of another model, before anything has changed."""
        for shard in shards_of(self._parts.module.parameters()):
            if shard.holds and not shard.persistent:
                raise UsageError(f"{shard.name} is in use, inside GatheredParameters or a forward; load after it")
        optimizer = self._parts.basic_optimizer
        if optimizer is not None and self._wish.optimizer:
            mine = [each.name for each in self._held if each.master is not None]
            kinds = {kind for name in mine for kind in self._kinds(name)}
            require_match(optimizer, kinds, [settings for _, settings in self._source.groups])
        if self._wish.load_fn is not None:
            return
        source, experts = self._source, self._parts.experts
        names = model_names(self._parts)
        values = model_values(self._parts)
        wanted = {name: names.get(id(value), name) for name, value in values.items()}
        known = {*source.shapes, *source.aliases, *source.small.extra}
        absent = [name for name, owner in wanted.items() if name not in known and owner not in known]
        spare = [name for name in known if name not in wanted and source.aliases.get(name, name) not in wanted]
        if experts is not None:
            spare = [name for name in spare if not experts.elsewhere(name)]
        wrong = [
            f"{name} has the shape {tuple(self._shape(name))} there and {tuple(shape)} here"
            for name, shape in self._shapes(values).items()
            if self._has(name) and self._shape(name) != shape
        ]
        problems = list(wrong)
        if self._wish.strict:
            problems += [f"not in the checkpoint: {_some(absent)}"] if absent else []
            problems += [f"not in the model: {_some(sorted(spare))}"] if spare else []
        if problems:
            hint = "" if wrong else ". Pass load_module_strict=False to load what fits"
            raise CheckpointError(f"the checkpoint does not fit the model; {'; '.join(problems)}{hint}")
        if absent:
            log_dist(f"not in the checkpoint and left as they are: {_some(absent)}", level=WARNING)

    def _shapes(self, values: Mapping[str, Any]) -> dict[str, torch.Size]:
        named = self._parts.module.named_parameters()
        parameters = {self._parts.name_of(name): shape_of(param) for name, param in named}
        others = {n: v.shape for n, v in values.items() if isinstance(v, Tensor) and not isinstance(v, nn.Parameter)}
        return {**parameters, **others}

    def _shape(self, name: str) -> torch.Size:
        return self._source.shapes[self._source.aliases.get(name, name)]

    def _has(self, name: str) -> bool:
        return self._source.aliases.get(name, name) in self._source.shapes

    # ---- read

    @torch.no_grad()
    def read(self) -> None:
        """Put what lies on this rank into its place, without a word to the others."""
        settle_edits(self._parts)
        self._let_go()
        if self._wish.load_fn is not None:
            self._state_dict = self._whole_state_dict()
        else:
            self._read_weights()
        optimizer = self._parts.basic_optimizer if self._wish.optimizer else None
        found = None if optimizer is None else self._read_optimizer(optimizer)
        self._read_all()
        if optimizer is not None and found is not None:
            reload(optimizer, found)

    def _let_go(self) -> None:
        """Whole copies of shards would be stale after this."""
        for shard in shards_of(self._parts.module.parameters()):
            if (shard.whole or shard.pending is not None) and shard.numel and not (shard.persistent or shard.alone):
                shard.release()
        if self._parts.sharded.coordinator is not None:
            self._parts.sharded.coordinator.schedule.invalidate()

    def _read_weights(self) -> None:
        kind = self._wish.weights
        for held in self._held:
            if held.master is None or not self._has(held.name):
                continue
            self._take(held.name, kind, held.interval, held.master.data)
        for name, param in self._others:
            if self._has(name):
                self._fill(name, param)
        self._read_rest()

    def _take(self, name: str, kind: str, interval: tuple[int, int], target: Tensor) -> None:
        """Want values in memory that is there."""
        if not target.is_contiguous():
            target, place = torch.empty(target.shape, dtype=target.dtype, device=target.device), target
            self._after.append((place, target))
        self._reads.add(self._source.find(name, kind, *interval), target.view(-1))

    def _read_all(self) -> None:
        self._reads.run()
        for target, values in self._after:
            target.copy_(values)
        for shard, chunk in self._coded:
            shard.put(chunk)

    def _fill(self, name: str, param: nn.Parameter) -> None:
        """A parameter that no optimizer trains."""
        shard: Shard | None = shard_of(param)
        if shard is None or shard.alone:
            self._take(name, "param", (0, shape_of(param).numel()), param.data)
        else:
            chunk = shard.data
            self._take(name, "param", shard.interval, chunk[: shard.interval[1] - shard.interval[0]])
            if shard.codec is not None:
                self._coded.append((shard, chunk))

    def _read_rest(self) -> None:
        """Buffers, and what modules keep besides tensors."""
        module, source = self._parts.module, self._source
        present, parameters = model_values(self._parts), model_names(self._parts)
        axis = self._parts.layout.samples
        own = source.rank_state(axis.rank).get("buffers") if source.writers == axis.size else None
        for name, tensor in {**source.buffers, **(own or {})}.items():
            target = present.get(name)
            if isinstance(target, Tensor) and id(target) not in parameters:
                target.data.copy_(tensor)
        for name, target in present.items() if self._parts.experts is not None else ():
            kept = isinstance(target, Tensor) and id(target) not in parameters and name not in source.buffers
            if kept and self._has(name):  # a buffer of an expert
                self._take(name, "param", (0, target.numel()), target.data)
        for name, value in source.small.extra.items():
            if name in present:
                module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)

    def _whole_state_dict(self) -> dict[str, Tensor]:
        """The model's state dict as it was saved, whole, for the user's function."""
        source = self._source
        found = {}
        for name, shape in source.shapes.items():
            if name in source.buffers:
                found[name] = source.buffers[name].clone()
            else:
                values = source.read(name, "param").view(shape)
                found[name] = values.to(source.dtype(name) or values.dtype, copy=True)
        found.update({alias: found[owner] for alias, owner in source.aliases.items()})
        return {**found, **source.small.extra}

    # ---- the optimizer

    def _read_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        held = {id(each.master): each for each in self._held if each.master is not None}
        states: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        number = 0
        for options in optimizer.param_groups:
            places = []
            for master in options["params"]:
                state = self._state(held[id(master)], optimizer) if id(master) in held else {}
                if state:
                    states[number] = state
                places.append(number)
                number += 1
            groups.append({**self._settings(options), "params": places})
        if not self._source.groups:
            log_dist("the checkpoint has no optimizer states for this model; the optimizer begins anew", level=WARNING)
        return {"state": states, "param_groups": groups}

    def _kinds(self, name: str) -> tuple[str, ...]:
        if not self._has(name):
            return ()
        return tuple(kind for kind in self._source.kinds(name) if kind not in ("param", "master"))

    def _state(self, held: _HeldParameter, optimizer: Optimizer) -> dict[str, Any]:
        kinds = self._kinds(held.name)
        if self._has(held.name) and self._shape(held.name) != held.shape:
            return {}  # the user's own function brought the weights
        if not kinds and not (self._has(held.name) and self._source.scalars(held.name)):
            return {}
        assert held.master is not None, "only what lies here is asked for"
        state: dict[str, Any] = {}
        for key, value in self._source.scalars(held.name).items():
            state[key] = value.clone() if isinstance(value, Tensor) else value
        for kind in kinds:
            parts = self._source.find(held.name, kind, *held.interval)
            shape = held.shape if held.whole else torch.Size([held.interval[1] - held.interval[0]])
            dtype = parts[0].values.dtype if parts else held.master.dtype
            old = optimizer.state.get(held.master, {}).get(kind)
            if not isinstance(old, Tensor) or (old.shape, old.dtype) != (shape, dtype) or not old.is_contiguous():
                old = self._room(held.master, kind, shape, dtype)
            self._reads.add(parts, old.view(-1))  # memory that is there costs less than new
            state[kind] = old
        return state

    def _room(self, master: Tensor, kind: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Memory for a state that there is not yet: in the tier where it lives, or beside its master."""
        states = self._parts.states
        room = None if states is None else states.room(master, kind, dtype, shape.numel())
        return torch.empty(shape, dtype=dtype, device=master.device) if room is None else room.view(shape)

    def _settings(self, options: dict[str, Any]) -> dict[str, Any]:
        """The hyperparameters of a group: those on which all saved groups agree that its parameters come from."""
        own = {key: value for key, value in options.items() if key != "params"}
        names = {name for group in self._groups if group.options is options for name in group.names}
        owners = {self._source.aliases.get(name, name) for name in names}
        found = [settings for members, settings in self._source.groups if owners & set(members)]
        if not found:
            return own
        agreed = {key: value for key, value in found[0].items() if all(_same(value, o.get(key)) for o in found)}
        return {**own, **fitting(agreed, own)}

    # ---- publish

    @torch.no_grad()
    def publish(self) -> None:
        """Make it the parameters of every rank; all of them call this."""
        parts = self._parts
        if self._state_dict is not None and self._wish.load_fn is not None:
            load_by(parts.module, self._state_dict, self._wish.load_fn)
            settle_edits(parts)
            return
        if parts.states is not None:
            parts.states.publish()
        lasting = [s for s in map(shard_of, (param for _, param in self._others)) if s is not None and s.persistent]
        if lasting and not lasting[0].alone:
            fetch.gather(lasting)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
