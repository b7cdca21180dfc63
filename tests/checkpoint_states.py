"""States to save, known in advance: a small set of tensors as the shards of any rank, and the files' model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.checkpoint.formats.native import writer as native_writer
from deepspeed.checkpoint.formats.source import Source
from deepspeed.checkpoint.formats.training_state import Counters, GroupState, TrainingState
from deepspeed.checkpoint.formats.zero_files import writer as deepspeed_writer
from deepspeed.fragments import ContiguousLayout, StripedLayout

FIXTURES = Path(__file__).parent / "fixtures" / "deepspeed-0.19.8"
EXPECTED: dict[str, list[float]] = json.loads((FIXTURES / "expected.json").read_text())
ORDER = [
    ["emb.weight", "body.0.weight", "body.3.weight"],
    ["body.0.bias", "body.2.weight", "body.2.bias", "body.3.bias"],
]
WRITERS = {"deepspeed": deepspeed_writer.files, "native": native_writer.files}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Net(nn.Module):
    """What the fixtures were trained with: tied embedding, a buffer, a frozen layer, sizes that do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(50, 24)
        self.body = nn.Sequential(nn.Linear(24, 37), nn.GELU(), nn.LayerNorm(37), nn.Linear(37, 24))
        self.out = nn.Linear(24, 50, bias=False)
        self.out.weight = self.emb.weight
        self.register_buffer("seen", torch.zeros(3))
        self.frozen = nn.Linear(24, 24)
        self.frozen.requires_grad_(False)


def fixture(name: str) -> Path:
    """The tag's directory of a checkpoint that DeepSpeed 0.19.8 wrote."""
    return FIXTURES / name / "global_step3"


@dataclasses.dataclass(frozen=True)
class Whole:
    """A run's state before any sharding."""

    shapes: list[dict[str, tuple[int, ...]]]
    kinds: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    precision: str = "bf16"
    frozen: tuple[tuple[str, tuple[int, ...]], ...] = (("ice.weight", (3, 5)), ("ice.bias", (1,)))
    untouched: tuple[str, ...] = ()
    """Parameters that never had a gradient."""
    steps: tuple[tuple[str, int], ...] = ()
    """Parameters whose step differs."""

    def tensor(self, name: str, kind: str) -> Tensor:
        """The flat values, the same in every process."""
        shape = {**{n: s for group in self.shapes for n, s in group.items()}, **dict(self.frozen)}[name]
        seed = sum((place + 1) * ord(letter) for place, letter in enumerate(f"{name}/{kind}"))
        values = torch.randn(torch.Size(shape).numel(), generator=torch.Generator().manual_seed(seed))
        return values.to(DTYPES[self.precision]).float() if name in dict(self.frozen) else values

    def state(self, stage: int, rank: int, world: int, **more: Any) -> TrainingState:
        """What a rank holds."""
        groups = [self._group(place, stage, rank, world) for place in range(len(self.shapes))]
        module: dict[str, Tensor] = {"count": torch.tensor([7, 8]), "mean": torch.tensor([1.5])}
        for name, shape in self._whole_shapes().items():
            kind = "param" if name in dict(self.frozen) else "master"
            value = self.tensor(name, kind).to(DTYPES[self.precision])
            if stage == 3:
                start, stop = StripedLayout((value.numel(),), world).interval(0, rank)
                module[name] = value[start:stop]
            else:
                module[name] = value.view(shape)
        first = next(iter(self.shapes[0]))
        module["tied.weight"] = module[first]
        return TrainingState(
            stage=stage,
            precision=self.precision,
            module=module,
            groups=groups,
            buffers=["count", "mean"],
            frozen={name: torch.Size(shape) for name, shape in self.frozen},
            aliases={"tied.weight": first},
            dp_rank=rank,
            dp_size=world,
            counters=Counters(5, 60, 1, 10),
            loss_scale={"cur_scale": 512.0, "dynamic": True, "cur_iter": 5} if self.precision == "fp16" else None,
            clip=1.0,
            lr_scheduler={"last_batch_iteration": 4},
            rng={"cpu": torch.arange(3, dtype=torch.uint8) + rank},
            data={"samples": 12 * rank},
            client_state={"epoch": 2, "global_steps": 99, "best": (1.0, "x")},
            ds_config={"train_batch_size": 12},
            **more,
        )

    def _whole_shapes(self) -> dict[str, tuple[int, ...]]:
        return {**{n: s for group in self.shapes for n, s in group.items()}, **dict(self.frozen)}

    def _group(self, place: int, stage: int, rank: int, world: int) -> GroupState:
        shapes = {name: torch.Size(shape) for name, shape in self.shapes[place].items()}
        numels = tuple(shape.numel() for shape in shapes.values())
        layout = {0: None, 3: StripedLayout(numels, world)}.get(stage, ContiguousLayout(numels, world))
        tensors: dict[str, list[Tensor | None]] = {}
        for kind in ("master", *self.kinds):
            column: list[Tensor | None] = []
            for index, name in enumerate(shapes):
                start, stop = (0, numels[index]) if layout is None else layout.interval(index, rank)
                absent = kind != "master" and name in self.untouched
                column.append(None if absent else self.tensor(name, kind)[start:stop])
            tensors[kind] = column
        steps = dict(self.steps)
        scalars = [{} if name in self.untouched else {"step": steps.get(name, 5)} for name in shapes]
        settings = {"lr": 0.1 / (place + 1), "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1 * place}
        return GroupState(list(shapes), list(shapes.values()), tensors, scalars, settings, layout, rank)

    def save(self, path: Path, stage: int, world: int, form: str = "deepspeed", **more: Any) -> Path:
        """All ranks' files."""
        write: Callable[[TrainingState], Any] = WRITERS[form]
        for rank in range(world):
            write(self.state(stage, rank, world, **more)).write(path)
        return path

    def check(self, source: Source) -> None:
        """Everything that was saved can be read."""
        trained = [name for group in self.shapes for name in group]
        wanted = {**self._whole_shapes(), "count": (2,), "mean": (1,)}
        assert {name: tuple(shape) for name, shape in source.shapes.items()} == wanted
        assert dict(source.aliases) == {"tied.weight": trained[0]}
        assert source.buffers["count"].tolist() == [7, 8]
        assert source.buffers["mean"].tolist() == [1.5]
        steps = dict(self.steps)
        for name in trained:
            kinds = () if name in self.untouched else self.kinds
            assert source.kinds(name) == ("param", "master", *kinds), name
            for kind in ("master", *kinds):
                assert torch.equal(source.read(name, kind), self.tensor(name, kind)), (name, kind)
            assert dict(source.scalars(name)) == ({} if name in self.untouched else {"step": steps.get(name, 5)}), name
            assert source.dtype(name) == DTYPES[self.precision]
        for name, _ in self.frozen:
            assert torch.equal(source.read(name, "param").float(), self.tensor(name, "param")), name
        groups = [(list(names), settings["lr"]) for names, settings in source.groups]
        assert groups == [(list(group), 0.1 / (place + 1)) for place, group in enumerate(self.shapes)]


SMALL = Whole([{"a.weight": (7, 5), "b.weight": (4,), "c.weight": (2, 3, 3)}, {"a.bias": (7,), "b.bias": (1,)}])
