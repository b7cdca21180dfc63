"""What the reader of a page has: a folder with the files that commands name, objects that snippets begin with."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import deepspeed
from deepspeed import comm
from tests.harness import ROOT

CONFIG = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
# A script that shows what it was given, and takes no time.
SCRIPT = """import os, sys
open(f"ran.{os.environ.get('RANK', 'alone')}", "w").write(" ".join(sys.argv[1:]))
"""


class MyExperts(nn.Module):
    """Layers of which each batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layers[0](hidden)


class MyModel(nn.Module):
    """A model that takes what the snippets give it: a batch, or its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.experts = MyExperts()
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Any, following: Tensor | None = None) -> Tensor:
        if following is None:
            tokens, following = tokens
        logits = self.head(self.experts(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def prepare_folder(folder: Path) -> None:
    """Enter a folder that has what commands name."""
    os.chdir(folder)
    for name in ("ds.json", "ds_config.json", "FILE"):  # another rank may read it already
        own = folder / f"{name}.{os.getpid()}"
        own.write_text(json.dumps(CONFIG))
        own.replace(folder / name)
    (folder / "misspelt.json").write_text(json.dumps({"train_batch_size": 4, "zero_optimizaton": {"stage": 2}}))
    (folder / "train.py").write_text(SCRIPT)
    shutil.copytree(ROOT / "examples", folder / "examples", dirs_exist_ok=True)


def checkpoint_folder(folder: Path) -> None:
    """A checkpoint `out`, which the page also calls `DIR`, with a tag that it calls `TAG`."""
    torch.manual_seed(0)
    model = MyModel()
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG | {"zero_optimization": {"stage": 1}})
    engine.backward(engine(*dataset()[:4]))
    engine.step()
    engine.save_checkpoint(str(folder / "out"))
    engine.save_checkpoint(str(folder / "DIR"), tag="TAG")
    engine.destroy()


def dataset() -> torch.utils.data.TensorDataset:
    tokens = torch.randint(0, 16, (16, 6), generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def namespace() -> dict[str, Any]:
    """The objects that snippets begin with; the same values on every rank."""
    torch.manual_seed(0)
    data = dataset()
    model, trained = MyModel(), MyModel()
    engine, *_ = deepspeed.initialize(model=trained, config=CONFIG, training_data=data)
    loss = engine(*data[:2])
    engine.backward(loss)
    engine.step()
    shard = torch.ones(4)
    return {
        "torch": torch,
        "deepspeed": deepspeed,
        "MyModel": MyModel,
        "MyExperts": MyExperts,
        "model": model,
        "engine": engine,
        "p": engine.module.head.weight,
        "loss": loss.detach(),
        "data": data,
        "dataset": data,
        "loader": torch.utils.data.DataLoader(data, batch_size=2),
        "config": CONFIG,
        "shard": shard,
        "whole": torch.empty(4 * comm.get_world_size()),
    }
