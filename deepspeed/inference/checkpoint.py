"""The `checkpoint` key of `init_inference`: descriptions of files, slices of any number of ranks, and writing them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.checkpoint.formats.safetensors import TensorFile, open_file, save
from deepspeed.checkpoint.pretrained import Cuts, Empty, give_value
from deepspeed.config.inference import DeepSpeedInferenceConfig
from deepspeed.config.parallel import TPTrainingConfig
from deepspeed.errors import CheckpointError, UsageError, printable
from deepspeed.fragments import DimSplit
from deepspeed.log import log_dist
from deepspeed.parallel.regions import RankGroup
from deepspeed.tensor_parallel import split, splits_of
from deepspeed.trust import inside, read_regular

DESCRIPTION = "ds_inference_config.json"
"""The file that describes what `save_mp_checkpoint_path` wrote."""

_MOST_BYTES = 2**26
_INJECTED = re.compile(
    r"(^|\.)(attn_qkvw|attn_qkvb|attn_ow|attn_ob|attn_nw|attn_nb|inter_w|inter_b|inter_up_w|inter_gate_w|output_w|"
    r"output_b)(\.|$)"
)
_NESTED = ("model", "module", "state_dict", "model_state_dict")


@dataclass(frozen=True)
class SlicedFiles:
    """Tensors of files, whole ones and those that ranks have slices of."""

    whole: Mapping[str, Tensor]
    slices: Sequence[Mapping[str, Tensor]] = ()
    """By rank of the job that wrote them."""
    splits: Mapping[str, DimSplit] = field(default_factory=dict)
    """How they are cut, where the files tell it."""


def find_files(config: DeepSpeedInferenceConfig) -> Path | SlicedFiles | None:
    """What the config's `checkpoint` names: a folder of safetensors, described files, or nothing."""
    section = config.checkpoint_config
    source = config.checkpoint if config.checkpoint is not None else section.checkpoint_dir
    if source is None:
        return None
    base = config.base_dir or section.base_dir or ""
    if isinstance(source, str):
        path = Path(base) / source
        if path.is_dir():
            if not (path / DESCRIPTION).is_file():
                return _folder(path)
            path = path / DESCRIPTION
        if not path.is_file():
            raise UsageError(f"checkpoint: {path} is neither a folder nor a JSON file that describes a checkpoint")
        return _described(_read_json(path), Path(base) if config.base_dir else path.parent, strict=True)
    return _described(source, Path(base), strict=bool(base))


def described_files(folder: Path) -> SlicedFiles:
    """The files that `save_slices` wrote."""
    return _described(_read_json(folder / DESCRIPTION), folder, strict=True)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(path, _MOST_BYTES))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint: {path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"checkpoint: {path} holds {type(found).__name__}, expected an object")
    return found


def _folder(path: Path) -> Path | SlicedFiles:
    """A folder of safetensors as it is; one of older files by its index."""
    if any(path.glob("*.safetensors")):
        return path
    files = sorted(path.glob("pytorch_model*.bin")) or [_of_megatron(each) for each in sorted(path.glob("mp_rank_*"))]
    if not files:
        raise UsageError(f"checkpoint: {path} has no files of safetensors, pytorch_model*.bin or mp_rank_*")
    tensors = [_tensors(file) for file in files]
    return SlicedFiles(_together(tensors)) if files[0].suffix == ".bin" else SlicedFiles({}, tensors)


def _of_megatron(path: Path) -> Path:
    """The weights of a rank: a file of DeepSpeed's, or the one in a folder of Megatron's."""
    if not path.is_dir():
        return path
    found = sorted(path.glob("model*.pt"))
    if not found:
        raise CheckpointError(f"checkpoint: the folder {path} has no file model*.pt")
    return found[0]


def _described(about: Mapping[str, Any], base: Path, *, strict: bool) -> SlicedFiles:
    """The files of a description: {type, checkpoints, parallelization, tp_size, base_dir, version}."""
    files = about.get("checkpoints")
    own = Path(str(about["base_dir"])) if about.get("base_dir") else base
    if not isinstance(files, (list, tuple, Mapping)) or not files:
        raise UsageError(
            f"checkpoint: 'checkpoints' is {files!r:.100}, expected a list of files or {{'tp': [...], 'non_tp': [...]}}"
        )

    def read(names: Any) -> list[dict[str, Tensor]]:
        listed = [names] if isinstance(names, str) else list(names or ())
        return [_tensors(inside(own, name, "a file of the checkpoint") if strict else own / name) for name in listed]

    if isinstance(files, Mapping):
        if not files.keys() <= {"tp", "non_tp"}:
            raise UsageError(f"checkpoint: 'checkpoints' has the keys {sorted(files)}, expected 'tp' and 'non_tp'")
        splits = {name: _split_of(name, told) for name, told in (about.get("splits") or {}).items()}
        made = SlicedFiles(_together(read(files.get("non_tp"))), read(files.get("tp")), splits)
        told = about.get("tp_size")
        if told is not None and len(made.slices) not in (0, int(told)):
            raise CheckpointError(f"checkpoint: tp_size is {told}, but 'tp' lists {len(made.slices)} files")
        return made
    kind = str(about.get("type", "")).lower()
    sliced = str(about.get("parallelization") or ("tp" if kind == "megatron" else "pp")).lower()
    found = read(files)
    return SlicedFiles({}, found) if sliced == "tp" and len(found) > 1 else SlicedFiles(_together(found))


def _split_of(name: str, told: Any) -> DimSplit:
    try:
        parts = tuple(tuple((int(start), int(stop)) for start, stop in part) for part in told["parts"])
        return DimSplit(int(told["dim"]), parts)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint: the split of {name!r:.200} is not readable ({error!r:.200})") from error


def _tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, as views that are not read yet."""
    if path.suffix == ".safetensors":
        if not path.is_file():
            raise CheckpointError(f"checkpoint: there is no file {path}")
        found = dict(open_file(path).tensors)
    else:
        try:
            state: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # whatever a file that is none raises
            raise CheckpointError(f"checkpoint: {path} cannot be read as tensors alone: {error!r:.300}") from error
        while isinstance(state, Mapping) and (nested := next((k for k in _NESTED if k in state), None)):
            state = state[nested]
        found = {str(k): v for k, v in dict(state).items() if isinstance(v, Tensor)}
    injected = next((name for name in found if _INJECTED.search(name)), None)
    if injected is not None:
        raise CheckpointError(
            f"checkpoint: {path} was written by DeepSpeed's injected kernels, whose layers ({injected}) are not "
            "those of the model: which parts of fused weights belong to which rank is not told. Convert the original "
            "weights: init_inference(checkpoint=FOLDER_OF_SAFETENSORS, save_mp_checkpoint_path=...) writes slices"
        )
    return found


def _together(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    for part in parts:
        whole.update(part)
    return whole


@dataclass(frozen=True)
class _Place:
    """One rank of so many, for a plan that nothing is sent for."""

    size: int
    rank: int = 0

    @property
    def group(self) -> Any:
        raise UsageError("a plan has no process group")


def splits_for(model: nn.Module, section: TPTrainingConfig, ranks: int) -> dict[str, DimSplit]:
    """How a model is cut over another number of ranks."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    other = copy.deepcopy(model, memo)
    split(other, _Place(ranks), section)
    return splits_of(other)


@torch.no_grad()
def fill_slices(empty: Empty, files: SlicedFiles, splits: Mapping[str, DimSplit], *cuts: Cuts) -> None:
    """Give parameters that wait their values of slices; only what this rank holds is read.

    `splits` says how the job that wrote them cut its layers, where the files do not.
    """
    ranks = len(files.slices)
    nbytes = 0
    for param, names in empty.items():
        known = files.slices[0] if files.slices else {}
        name = next((each for each in names if each in known or each in files.whole), None)
        if name is None:
            raise UsageError(f"the files of the checkpoint have no tensor {' or '.join(names)}, which the model needs")
        own = [each[name] for each in cuts if name in each]
        shape = tuple(param.shape)
        for cut, _ in reversed(own):
            shape = cut.whole_shape(shape)
        pieces = [files.whole[name]] if name in files.whole else [part[name] for part in files.slices if name in part]
        written = next((files.splits.get(each) or splits.get(each) for each in names), None)
        if len(pieces) not in (1, ranks):
            raise CheckpointError(f"checkpoint: {len(pieces)} of {ranks} files have {name}")
        if tuple(pieces[0].shape) != shape:
            _require_slices(name, pieces, written, shape)
            assert written is not None, "slices of a tensor whose split is not known are refused"
        if len(own) == 1 and tuple(pieces[0].shape) != shape:
            cut, place = own[0]
            part = _read_part(pieces, written, cut, place)  # type: ignore[arg-type]
        else:
            part = pieces[0] if tuple(pieces[0].shape) == shape else written.join(pieces)  # type: ignore[union-attr]
            for cut, place in own:
                part = cut.cut(part, place)
        give_value(param, part)
        nbytes += part.nbytes
    log_dist(f"checkpoint: {nbytes} bytes of {len(empty)} tensors were read for this rank, of slices of {ranks} ranks")


def _require_slices(name: str, pieces: Sequence[Tensor], written: DimSplit | None, shape: Sequence[int]) -> None:
    expected = [tuple(shape)] if written is None else [written.shape(shape, rank) for rank in range(written.ranks)]
    found = [tuple(piece.shape) for piece in pieces]
    if written is None or found != expected:
        raise CheckpointError(
            f"checkpoint: {printable(name)} has the shapes {found} in the files, but the model has {tuple(shape)}"
            + (f", which {len(expected)} ranks cut to {expected}" if written is not None else " and it is not cut")
        )


def _read_part(pieces: Sequence[Tensor], written: DimSplit, cut: DimSplit, place: int) -> Tensor:
    """One rank's part of slices that were cut in another way along the same dim."""
    if written.dim != cut.dim:
        return cut.cut(written.join(pieces), place)

    def read(start: int, stop: int) -> Tensor:
        found: list[tuple[int, Tensor]] = []
        seen: set[tuple[int, int]] = set()
        for rank, piece in enumerate(pieces):
            reached = 0
            for begin, end in written.parts[rank]:
                low, high = max(start, begin), min(stop, end)
                if low < high and (low, high) not in seen:  # ranks may hold copies
                    seen.add((low, high))
                    found.append((low, piece.narrow(written.dim, reached + low - begin, high - low)))
                reached += end - begin
        parts = [part for _, part in sorted(found, key=lambda each: each[0])]
        return torch.cat(parts, written.dim) if parts else pieces[0].narrow(written.dim, 0, 0)

    return cut.cut_with(read, place)


def save_slices(
    state: Mapping[str, Tensor], folder: Path, axis: RankGroup | None, cuts: Mapping[str, DimSplit]
) -> None:
    """Write this rank's slices, and what is whole on the first; `checkpoint` takes the folder again."""
    rank, ranks = (0, 1) if axis is None else (axis.rank, axis.size)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().cpu().contiguous() for name, t in state.items()}
    sliced = {name: tensor for name, tensor in tensors.items() if name in cuts}
    if ranks > 1:
        save(TensorFile(sliced, {"format": "pt"}), folder / f"tp_{rank:02d}.safetensors")
    if rank:
        return
    whole = tensors if ranks == 1 else {name: t for name, t in tensors.items() if name not in cuts}
    save(TensorFile(whole, {"format": "pt"}), folder / "non-tp.safetensors")
    about = {
        "type": "ds_model",
        "checkpoints": {
            "non_tp": ["non-tp.safetensors"],
            "tp": [f"tp_{place:02d}.safetensors" for place in range(ranks)] if ranks > 1 else [],
        },
        "parallelization": "tp",
        "tp_size": ranks,
        "version": 1.0,
        "splits": {name: {"dim": cut.dim, "parts": cut.parts} for name, cut in cuts.items()} if ranks > 1 else {},
    }
    (folder / DESCRIPTION).write_text(json.dumps(about, indent=2), encoding="utf-8")
