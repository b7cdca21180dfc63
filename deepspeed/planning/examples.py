"""What a model takes for one micro batch: what the user gives, or what a model of Transformers says of itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.errors import UsageError
from deepspeed.pipe.module import PipelineModule

ExampleBatch = Callable[..., Any]
"""`example_batch(batch, sequence)`: the inputs of `batch` samples, a mapping of keywords, a tuple or one tensor."""

_LONGEST = 4096  # tokens, where a model may take more


@dataclass(frozen=True)
class Example:
    """The inputs of one micro batch; of a pipeline, what its loader gives."""

    inputs: Any
    sequence: int | None
    """Tokens of a sample, where the model has some."""
    assumed: tuple[str, ...] = ()

    def run(self, engine: Any) -> Tensor:
        """One forward of the engine; its loss."""
        if isinstance(self.inputs, Mapping):
            out = engine(**self.inputs)
        else:
            out = engine(*self.inputs) if isinstance(self.inputs, tuple) else engine(self.inputs)
        return _loss(out)


def example_of(model: nn.Module, given: ExampleBatch | None, batch: int, sequence: int | None) -> Example:
    """Inputs of `batch` samples of `sequence` tokens."""
    if given is not None:
        inputs = given(*(batch, sequence)[: _takes(given)])
        return Example(inputs, sequence or _tokens(inputs))
    config: Any = getattr(model, "config", None)
    kind = getattr(model if not isinstance(model, PipelineModule) else None, "main_input_name", "input_ids")
    vocabulary = getattr(_text(config), "vocab_size", None)
    if kind == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        side, channels = config.image_size, getattr(config, "num_channels", 3)
        inputs = {"pixel_values": torch.zeros(batch, channels, side, side), "labels": torch.zeros(batch).long()}
        return Example(inputs, None)
    if isinstance(vocabulary, int):
        longest = getattr(_text(config), "max_position_embeddings", None) or _LONGEST
        tokens = sequence or min(longest, _LONGEST)
        assumed = () if sequence else (f"samples of {tokens} tokens; --sequence says otherwise",)
        ids = torch.randint(vocabulary, (batch, tokens))
        return Example({"input_ids": ids, "labels": ids}, tokens, assumed)
    raise UsageError(
        f"what {type(model).__name__} takes is not known: it is no model of Transformers. Define "
        "example_batch(batch, sequence) next to the function that returns the model; it returns the inputs of so many "
        "samples: keywords, a tuple, or a tensor; for a PipelineModule the pair (inputs, labels)"
    )


def _text(config: Any) -> Any:
    get = getattr(config, "get_text_config", None)
    return get() if callable(get) else config


def _takes(function: ExampleBatch) -> int:
    """How many of (batch, sequence) a function takes."""
    try:
        inspect.signature(function).bind(1, None)
    except TypeError:
        return 1
    return 2


def _tokens(inputs: Any) -> int | None:
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    return int(ids.shape[1]) if isinstance(ids, Tensor) and ids.dim() == 2 else None


def _loss(out: Any) -> Tensor:
    loss = getattr(out, "loss", None)
    if loss is None:
        loss = out[0] if isinstance(out, (tuple, list)) else out
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"the model returned a {type(out).__name__}, in which there is no loss. Let it return the loss, an output "
            "with .loss, or a tuple that begins with it"
        )
    return loss if loss.dim() == 0 else loss.float().mean()
