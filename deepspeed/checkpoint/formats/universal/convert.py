"""Any checkpoint → a universal one, parameter by parameter: no intermediate files, and memory for a few at a time.

[Note: linear matching] Python's `re` tries one way after the other, and there are patterns of twenty characters for
which it needs longer than anybody lives. Here all ways are followed at once: where each part of a pattern may end in
the name follows from where it may begin. What cannot be matched so (references back, looking around) does not occur in
rules for names, and is refused.
"""

from __future__ import annotations

import functools
import importlib
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.formats.adapters import Resliced, Stages, state_of
from deepspeed.checkpoint.formats.bulk_read import fetch
from deepspeed.checkpoint.formats.consolidate import Progress
from deepspeed.checkpoint.formats.detect import open_checkpoint
from deepspeed.checkpoint.formats.guard import reading
from deepspeed.checkpoint.formats.safe_load import safe_load
from deepspeed.checkpoint.formats.source import Source
from deepspeed.checkpoint.formats.zero_files import writer
from deepspeed.checkpoint.formats.zero_files.file_names import model_file, sort_files
from deepspeed.checkpoint.formats.zero_files.reader import DeepSpeedSource
from deepspeed.checkpoint.storage.commit import LATEST_UNIVERSAL
from deepspeed.checkpoint.storage.publishing import new_directory, publishing
from deepspeed.errors import CheckpointError
from deepspeed.trust import inside

_INFO = "universal_checkpoint_info"


def convert(
    directory: str | Path,
    output: str | Path,
    *,
    workers: int = 4,
    strict: bool = True,
    progress: Progress | None = None,
) -> Path:
    """Write a universal checkpoint and `latest_universal` beside it; gives its directory, which must be a new one."""
    source_path = Path(directory)
    target = new_directory(output, [source_path])
    with reading(source_path):
        sources = _sources(source_path)
        rules = _rules(sources, source_path, strict)
        with publishing(target, "universal", sources[0].world, latest=LATEST_UNIVERSAL) as folder:
            _fill(folder, source_path, sources, rules, workers, progress)
    return target


def _rules(sources: Sequence[Source], path: Path, strict: bool) -> Mapping[str, Any]:
    rules = dict(getattr(sources[0], "model_entries", {}).get(_INFO) or {})
    if len(sources) > 1 and not rules.keys() - {"universal_checkpoint_version"} and strict:
        raise CheckpointError(
            f"{path} has {len(sources)} model-parallel ranks and no rules in {_INFO!r}: how their slices belong "
            "together is unknown. With strict=False (--no_strict) they are put together along dim 0"
        )
    return rules


def _fill(
    target: Path,
    origin: Path,
    sources: Sequence[Source],
    rules: Mapping[str, Any],
    workers: int,
    progress: Progress | None,
) -> None:
    first, zero = sources[0], target / "zero"
    zero.mkdir()
    names = list(first.shapes)
    with ThreadPoolExecutor(max_workers=max(workers, 1)) as pool:
        for done, _ in enumerate(pool.map(lambda name: _write(name, sources, zero, rules), names), 1):
            if progress is not None:
                progress(done, len(names))
    for alias, owner in first.aliases.items():
        if owner not in first.shapes:
            raise CheckpointError(f"{origin}: {alias} is to be the same as {owner}, of which there is nothing")
        _folder(zero, alias).mkdir()
        shutil.copyfile(_folder(zero, owner) / "fp32.pt", _folder(zero, alias) / "fp32.pt")
    torch.save(_optimizer_state(first), zero / "optimizer_state.pt")
    _write_models(sources, origin, target)


def _folder(zero: Path, name: object) -> Path:
    """Where a parameter's files go: a folder of its name, which therefore has to be a name."""
    place = inside(zero, name, "the parameter")
    if place.parent != zero or place.name != name:
        raise CheckpointError(f"the parameter {name!r:.200} has a slash in its name, for which there is no folder")
    return place


def _sources(path: Path) -> Sequence[Source]:
    ranks = sort_files(entry.name for entry in path.iterdir()).model_ranks
    whole = open_checkpoint(path)
    parts = whole.sources if isinstance(whole, Stages) else [whole]
    if any(isinstance(part, Resliced) for part in parts) or len(ranks) < 2:
        return [whole]  # slices that tell how they belong together
    if isinstance(whole, Stages):  # stages are one source; what is left to put together are slices
        return [whole, *(open_checkpoint(path, mp_rank=part) for part in range(1, len(ranks) // whole.count))]
    return [open_checkpoint(path, mp_rank=rank) for rank in ranks]


def _write(name: str, sources: Sequence[Source], zero: Path, rules: Mapping[str, Any]) -> None:
    folder = _folder(zero, name)
    folder.mkdir()
    first = sources[0]
    for kind in (each for each in first.kinds(name) if each != "param"):
        slices = [fetch(source.find(name, kind)).view(source.shapes[name]).float() for source in sources]
        whole, extra = merge_slices(name, slices, rules)
        file = inside(folder, f"{'fp32' if kind == 'master' else kind}.pt", f"the state of {name}")
        if file.parent != folder or file.exists():
            raise CheckpointError(f"{name} has a state called {kind!r:.200}, for which there is no file")
        torch.save({"param": _alone(whole), **extra}, file)
    step = first.scalars(name).get("step")
    if step is not None:
        torch.save(step, folder / "step.pt")


def _alone(tensor: Tensor) -> Tensor:
    """Not a view: torch.save writes the whole storage."""
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor.contiguous()


def _optimizer_state(source: Source) -> dict[str, Any]:
    """What loaders of every stage look for."""
    groups = [dict(settings) for _, settings in source.groups]
    steps = [step for names, _ in source.groups for name in names if (step := source.scalars(name).get("step"))]
    small = source.small
    numbered = [{**group, "params": places} for group, places in zip(groups, _flats(source), strict=True)]
    return {
        "dynamic_loss_scale": bool((small.loss_scale or {}).get("dynamic", False)),
        "loss_scale": None if small.loss_scale is None else dict(small.loss_scale),
        "overflow": small.overflow,
        **({} if small.clip is None else {"clip_grad": small.clip}),
        "zero_stage": source.stage,
        "partition_count": source.world,
        "ds_version": small.version or "0.19.8",
        "param_groups": groups,
        "optimizer_state_dict": {
            "state": {0: {"step": max(steps)}} if steps else {},
            "param_groups": numbered,
        },
    }


def _flats(source: Source) -> list[list[int]]:
    """Per group the numbers of its entries in the model file's `param_shapes`."""
    shapes = getattr(source, "model_entries", {}).get("param_shapes") or [dict.fromkeys(n) for n, _ in source.groups]
    homes = {name: place for place, group in enumerate(shapes) for name in group}
    # experts of other ranks than the first are not listed; they are in the group of those that are
    return [sorted({homes[name] for name in names if name in homes}) for names, _ in source.groups]


def _write_models(sources: Sequence[Source], origin: Path, target: Path) -> None:
    """The model files, whose counters, buffers and shapes a loader needs."""
    source = sources[0]
    if not isinstance(source, DeepSpeedSource):
        state = state_of(source, stage=2, rank=0, world=1)
        entries = writer.files(state).objects[model_file(2, 0, 0)]
        torch.save({**entries, "dp_world_size": source.world}, target / model_file(2, 0, 0))
        return
    found = sort_files(source.files)
    ranks = {name: place for place, (_, name) in enumerate(sorted(found.models.items()))}
    for name in (*found.models.values(), *found.sharded_models.values()):
        entries = safe_load(origin / name)
        if layered := entries.get("module", "") is None:
            entries["module"] = _module(sources[ranks.get(name, 0)])
        if _INFO in entries and not layered and (entries.get("param_shapes") or not source.groups):
            shutil.copyfile(origin / name, target / name)
            continue
        shapes = [{item: source.shapes[item] for item in names} for names, _ in source.groups]
        info = entries.get(_INFO) or {"universal_checkpoint_version": 0.4}
        added = {_INFO: info, "param_shapes": entries.get("param_shapes") or shapes}
        torch.save({**entries, "optimizer": None, **added}, target / name)


def _module(source: Source) -> dict[str, Tensor]:
    """The weights and buffers that a pipeline has in files of its layers, which a universal checkpoint has not."""
    return {name: fetch(source.find(name, "param")).view(shape) for name, shape in source.shapes.items()}


def merge_slices(name: str, slices: Sequence[Tensor], rules: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """The whole tensor and what a universal file says of it besides.

    `rules` is `universal_checkpoint_info`: lists of patterns of names by how their slices are put together.
    """

    def named(key: str) -> bool:
        return any(matches(pattern, name) for pattern in rules.get(key, ()))

    if named("tp_replicated_parameter_patterns") or named("pipeline_replicated_parameter_patterns"):
        if any(not torch.equal(part, slices[0]) for part in slices[1:]):
            raise CheckpointError(f"{name} should be the same on all {len(slices)} model-parallel ranks, but differs")
        return slices[0], {}
    if named("parameter_to_average_patterns"):
        return torch.stack(list(slices)).mean(0), {}
    if named("parameter_with_row_parallelism_patterns"):
        return torch.cat(list(slices), 1), {"cat_dim": 1}
    if named("parameter_with_2_sub_params_cat_dim_0"):
        halves = [part.chunk(2) for part in slices]
        whole = torch.cat([half[place] for place in (0, 1) for half in halves])
        return whole, {"cat_dim": 0, "param_n_sub_params": 2}
    for rule in rules.get("parameter_with_sub_params", ()):
        if any(matches(pattern, name) for pattern in rule["patterns"]):
            return _sub_parameters(slices, rule), {"cat_dim": rule["partition_dim"]}
    whole = torch.cat(list(slices)) if len(slices) > 1 else slices[0]
    extra: dict[str, Any] = {"cat_dim": 0}
    if named("vocabulary_parameter_patterns"):
        extra["vocab_tensor"] = True
        whole = whole[: rules.get("original_vocab_size", whole.shape[0])]
    return whole, extra


def _sub_parameters(slices: Sequence[Tensor], rule: Mapping[str, Any]) -> Tensor:
    """Parameters that are several in one: each is cut over the ranks by itself."""
    dim = rule["partition_dim"]
    sizes = rule["shape"][dim]
    sizes = list(sizes) if isinstance(sizes, (list, tuple)) else [sizes]
    local = [size // len(slices) for size in sizes]
    cut = [part.split(local, dim) for part in slices]
    return torch.cat([torch.cat([parts[place] for parts in cut], dim) for place in range(len(sizes))], dim)


_LONGEST = 1000  # characters of a pattern, and of a name
_MOST_STEPS = 1_000_000
_FLAGS = re.UNICODE | re.IGNORECASE | re.ASCII | re.DOTALL
_AT_ONE_PLACE = ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT")
_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_compiler: Any = importlib.import_module("re._compiler" if sys.version_info >= (3, 11) else "sre_compile")


def matches(pattern: object, name: str) -> bool:
    """As `bool(re.match(pattern, name))`; a CheckpointError for a pattern that cannot be matched in bounded time."""
    if not isinstance(pattern, str) or len(pattern) > _LONGEST or len(name) > _LONGEST:
        raise CheckpointError(
            f"the rule {pattern!r:.100} for {name!r:.100} is no pattern of at most {_LONGEST} letters"
        )
    return bool(_Matching(pattern, name).ends(_parsed(pattern), {0}))


@functools.lru_cache(maxsize=256)
def _parsed(pattern: str) -> Any:
    try:
        parsed = _parser.parse(pattern)
    except (re.error, RecursionError, OverflowError, ValueError) as error:
        raise CheckpointError(f"the rule {pattern!r:.100} is no pattern that can be used ({error})") from error
    if parsed.state.flags & ~_FLAGS:
        raise CheckpointError(f"the rule {pattern!r:.100} has flags that are not known here")
    return parsed


class _Matching:
    """A pattern over one name: where its parts end, for all places where they may begin at once."""

    def __init__(self, pattern: str, name: str) -> None:
        self._pattern, self._name = pattern, name
        self._left = _MOST_STEPS

    def ends(self, items: Any, starts: set[int]) -> set[int]:
        """Where items that follow each other end."""
        for item in items:
            self._left -= 1 + len(starts)
            if self._left < 0:
                raise self._refused(f"more than {_MOST_STEPS} steps")
            starts = self._item(items.state, item, starts)
        return starts

    def _item(self, state: Any, item: tuple[Any, Any], starts: set[int]) -> set[int]:
        op, argument = str(item[0]), item[1]
        if op in _AT_ONE_PLACE:  # `re` itself has nothing to try there
            one = _compiler.compile(_parser.SubPattern(state, [item]))
            return {found.end() for start in starts if (found := one.match(self._name, start))}
        if op == "SUBPATTERN":
            _, added, removed, inner = argument
            if added or removed:
                raise self._refused("flags of a group")
            return self.ends(inner, starts)
        if op == "BRANCH":
            return set().union(*(self.ends(way, starts) for way in argument[1]))
        if op in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, inner = argument
            return self._repeated(least, most, inner, starts)
        raise self._refused(op)

    def _repeated(self, least: int, most: int, inner: Any, starts: set[int]) -> set[int]:
        if least > _LONGEST:
            raise self._refused(f"a repetition of {least}")
        for _ in range(least):
            starts = self.ends(inner, starts)
        found, fresh = set(starts), starts
        for _ in range(min(most, least + _LONGEST) - least):
            fresh = self.ends(inner, fresh) - found
            found |= fresh
            if not fresh:
                break
        return found

    def _refused(self, what: str) -> CheckpointError:
        return CheckpointError(f"the rule {self._pattern!r:.100} uses {what}, which rules for names may not")
