"""What the four scripts of this folder train: a causal language model on source text of Python's standard library.

`--model` is a folder or a name that Transformers can load. Without it a small random Llama reads bytes, so that
everything runs without a download and without a GPU.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

FILES = 20


class Windows(Dataset[dict[str, Tensor]]):
    """Pieces of a text; the model shifts the labels itself."""

    def __init__(self, tokens: Tensor, context: int) -> None:
        self._pieces = tokens[: len(tokens) // context * context].view(-1, context)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        piece = self._pieces[index]
        return {"input_ids": piece, "labels": piece}


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument("--model", default=None, help="folder or name of a causal language model; default: a small one")
    made.add_argument("--steps", type=int, default=40, help="optimizer steps")
    made.add_argument("--context", type=int, default=64, help="tokens per sample")
    made.add_argument("--output", type=Path, default=Path("finetune-output"), help="folder for the trained model")
    made.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    return made


def make_model(name: str | None) -> Any:
    """The model; Transformers makes it of shards if it knows a config with stage 3 by now."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # several ranks share the cores
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, max_position_embeddings=512, **shape))


def make_data(name: str | None, context: int) -> Windows:
    files = sorted(Path(os.__file__).parent.glob("*.py"), key=lambda file: file.name)[:FILES]
    text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    if name is None:
        return Windows(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long(), context)
    return Windows(torch.tensor(AutoTokenizer.from_pretrained(name)(text)["input_ids"]), context)
