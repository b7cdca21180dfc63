"""Any checkpoint → a universal one, parameter by parameter: no intermediate files, and memory for a few at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.formats.bulk_read import fetch
from deepspeed.checkpoint.formats.detect import open_checkpoint
from deepspeed.checkpoint.formats.reshard import state_of
from deepspeed.checkpoint.formats.safe_load import safe_load
from deepspeed.checkpoint.formats.source import Source
from deepspeed.checkpoint.formats.universal.merge import merge_slices
from deepspeed.checkpoint.formats.zero_files import writer
from deepspeed.checkpoint.formats.zero_files.file_names import model_file, sort_files
from deepspeed.checkpoint.formats.zero_files.reader import DeepSpeedSource
from deepspeed.errors import CheckpointError

__all__ = ["convert"]

Progress = Callable[[int, int], None]
"""(parameters done, of how many)."""

_INFO = "universal_checkpoint_info"


def convert(
    directory: str | Path,
    output: str | Path,
    *,
    workers: int = 4,
    strict: bool = True,
    progress: Progress | None = None,
) -> Path:
    """Write a universal checkpoint and `latest_universal` beside it; gives its directory."""
    source_path, target = Path(directory), Path(output)
    sources = _sources(source_path)
    first = sources[0]
    zero = target / "zero"
    zero.mkdir(parents=True, exist_ok=True)
    rules = dict(getattr(first, "model_entries", {}).get(_INFO) or {})
    if len(sources) > 1 and not rules and strict:
        raise CheckpointError(
            f"{source_path} has {len(sources)} model-parallel ranks and no {_INFO!r}: how their slices belong together "
            "is unknown. With strict=False (--no_strict) they are put together along dim 0"
        )
    names = list(first.shapes)
    with ThreadPoolExecutor(max_workers=max(workers, 1)) as pool:
        for done, _ in enumerate(pool.map(lambda name: _write(name, sources, zero, rules), names), 1):
            if progress is not None:
                progress(done, len(names))
    for alias, owner in first.aliases.items():
        (zero / alias).mkdir(exist_ok=True)
        shutil.copyfile(zero / owner / "fp32.pt", zero / alias / "fp32.pt")
    torch.save(_optimizer_state(first), zero / "optimizer_state.pt")
    _write_models(first, source_path, target)
    (target.parent / "latest_universal").write_text(target.name, encoding="utf-8")
    return target


def _sources(path: Path) -> Sequence[Source]:
    found = sort_files(entry.name for entry in path.iterdir())
    ranks = sorted(found.models) or sorted({mp for _, mp in found.sharded_models})
    return [open_checkpoint(path, mp_rank=rank) for rank in ranks or [0]]


def _write(name: str, sources: Sequence[Source], zero: Path, rules: Mapping[str, Any]) -> None:
    folder = zero / name
    folder.mkdir(exist_ok=True)
    first = sources[0]
    for kind in first.kinds(name):
        if kind == "param":
            continue
        slices = [fetch(source.find(name, kind)).view(source.shapes[name]).float() for source in sources]
        whole, extra = merge_slices(name, slices, rules)
        file = "fp32" if kind == "master" else kind
        torch.save({"param": _alone(whole), **extra}, folder / f"{file}.pt")
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
    return [sorted({homes[name] for name in names}) for names, _ in source.groups]


def _write_models(source: Source, origin: Path, target: Path) -> None:
    """The model files, whose counters, buffers and shapes a loader needs."""
    if not isinstance(source, DeepSpeedSource):
        state = state_of(source, stage=2, rank=0, world=1)
        entries = writer.files(state).objects[model_file(2, 0, 0)]
        torch.save({**entries, "dp_world_size": source.world}, target / model_file(2, 0, 0))
        return
    found = sort_files(source.files)
    for name in (*found.models.values(), *found.sharded_models.values()):
        entries = safe_load(origin / name)
        if _INFO in entries and (entries.get("param_shapes") or not source.groups):
            shutil.copyfile(origin / name, target / name)
            continue
        shapes = [{item: source.shapes[item] for item in names} for names, _ in source.groups]
        added = {_INFO: {"universal_checkpoint_version": 0.4}, "param_shapes": entries.get("param_shapes") or shapes}
        torch.save({**entries, "optimizer": None, **added}, target / name)
