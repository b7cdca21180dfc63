"""Where a model comes from: a script, `module:function`, or the config file of a model of Transformers."""

from __future__ import annotations

import importlib
import inspect
import json
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.comm.watch.threads import is_users
from deepspeed.errors import UsageError
from deepspeed.pipe.module import PipelineModule

NAMES = ("model_fn", "build_model", "make_model", "get_model", "create_model", "model")
"""What is looked for in a script, in this order: functions without arguments, or a module."""
EXAMPLE = "example_batch"
_NO_TRAINING = "as __main__ only: `if __name__ == '__main__':`"


class _RefusesTraining(TorchDispatchMode):
    """While it is entered, a backward is an error."""

    def __init__(self, source: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._source = source

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch._C._current_autograd_node() is not None:
            raise UsageError(
                f"{self._source} trains when it is imported: a backward ran. Let it build its model in a function, and "
                f"train {_NO_TRAINING}"
            )
        return func(*args, **(kwargs or {}))


class ModelSource:
    """Builds the model anew at each call; `example` is what the same place says of its inputs."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._example: ExampleBatch | None = None
        file, _, name = target.partition(":")
        self._file, self._name = file, name
        if file.endswith((".py", ".json")) and not Path(file).is_file():
            raise UsageError(f"{file} is no file; expected a script, module:function, or a Transformers config.json")
        if not file.endswith((".py", ".json")) and not name:
            raise UsageError(
                f"{target!r} names no function; expected a script (train.py), module:function, or the config.json of a "
                "model of Transformers"
            )

        here = "" if name and not file.endswith(".py") else str(Path(file).resolve().parent)
        sys.path.insert(0, here)  # as Python does for the script that it runs

    def __call__(self) -> nn.Module:
        with _building(self._target), _RefusesTraining(self._target):
            if self._file.endswith(".json"):
                return _of_transformers(Path(self._file))
            names = self._namespace()
            given = names.get(EXAMPLE)
            self._example = given if callable(given) else None
            return self._built(names)

    def example(self) -> ExampleBatch | None:
        """`example_batch` of the script or module, once the model was built."""
        return self._example

    def _namespace(self) -> Mapping[str, Any]:
        if self._file.endswith(".py"):
            return runpy.run_path(self._file, run_name="__plan__")
        return vars(importlib.import_module(self._file))

    def _built(self, names: Mapping[str, Any]) -> nn.Module:
        wanted = (self._name,) if self._name else NAMES
        found = next((names[name] for name in wanted if name in names), None)
        if found is None:
            raise UsageError(
                f"{self._file} has no {self._name or ' or '.join(NAMES)}; define a function that returns the model, or "
                f"name yours: {self._file}:FUNCTION"
            )
        made = found
        if callable(found) and not isinstance(found, nn.Module):
            _require_no_arguments(found, self._file)
            made = found()
        if not isinstance(made, nn.Module):
            raise UsageError(f"{self._target} returned a {type(made).__name__}; expected a torch module")
        return made


def _require_no_arguments(function: Callable[..., Any], file: str) -> None:
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise UsageError(
            f"{file}: {getattr(function, '__name__', 'it')}() takes arguments ({error}), and a plan has none to give. "
            f"Give them defaults, or name a function without arguments: {file}:FUNCTION"
        ) from error


@contextmanager
def _building(target: str) -> Iterator[None]:
    """Errors of a script say what the plan needs of it."""
    words = sys.argv
    sys.argv = [target]
    try:
        yield
    except SystemExit as error:
        raise UsageError(
            f"{target} ended the program when it was imported (status {error.code}). Parse the command line "
            f"{_NO_TRAINING}"
        ) from error
    except OSError as error:
        raise UsageError(
            f"{target} needs a file to build its model, and a plan reads no data and no weights: {error}. Build the "
            "model from its config, such as AutoModelForCausalLM.from_config(...)"
        ) from error
    except UsageError:
        raise
    except Exception as error:  # whatever the script does
        raise UsageError(
            f"{target} failed before its model was there{_place(error)}: {type(error).__name__}: "
            f"{str(error).rstrip('.')}. A plan runs all of a script but what is below `if __name__ == '__main__':`, "
            "then the function that returns the model"
        ) from error
    finally:
        sys.argv = words


def _place(error: Exception) -> str:
    """The last line of the user's own that led to an error."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return f", in line {frames[-1].lineno} of {frames[-1].filename}" if frames else ""


def _of_transformers(file: Path) -> nn.Module:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{file} is no JSON ({error}); expected the config.json of a model of Transformers") from error
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str):
        raise UsageError(f"{file} has no model_type; expected the config.json of a model of Transformers")
    try:
        import transformers  # an optional dependency
    except ImportError as error:
        raise UsageError(f"{file}: models of Transformers need `pip install transformers` ({error})") from error
    try:
        config = transformers.AutoConfig.for_model(**values)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{file}: this Transformers knows no such model: {error}") from error
    named = next(iter(values.get("architectures") or ()), "")
    architecture: Callable[[Any], nn.Module] | None = getattr(transformers, named, None)
    if architecture is not None:
        return architecture(config)
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return made


ExampleBatch = Callable[..., Any]
"""`example_batch(batch, sequence)`: the inputs of `batch` samples, a mapping of keywords, a tuple or one tensor."""

_LONGEST = 4096  # tokens, where a model may take more
_SIDE = 224  # of images, where a config does not say


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
    vocabulary, side = getattr(_text(config), "vocab_size", None), getattr(config, "image_size", None)
    dtype = next((param.dtype for param in model.parameters()), None)
    if kind == "pixel_values" and config is not None:
        sides = (side or _SIDE,) * 2 if side is None or isinstance(side, int) else tuple(side)
        images = torch.zeros(batch, getattr(config, "num_channels", 3), *sides, dtype=dtype)
        assumed = () if side else (f"images of {_SIDE} x {_SIDE}",)
        return Example({"pixel_values": images, "labels": torch.zeros(batch).long()}, None, assumed)
    bins = getattr(config, "num_mel_bins", None) if kind == "input_features" else None
    if isinstance(vocabulary, int) and (kind == "input_ids" or bins):
        longest = (
            getattr(_text(config), "max_target_positions" if bins else "max_position_embeddings", None) or _LONGEST
        )
        tokens = sequence or min(longest, _LONGEST)
        assumed = () if sequence else (f"samples of {tokens} tokens; --sequence says otherwise",)
        ids = torch.randint(vocabulary, (batch, tokens))
        first = {kind: torch.zeros(batch, bins, 2 * config.max_source_positions, dtype=dtype) if bins else ids}
        return Example({**first, **_labels(type(model).__name__, ids)}, tokens, assumed)
    raise UsageError(
        f"what {type(model).__name__} takes is not known: it is no model of Transformers for text or images. Define "
        "example_batch(batch, sequence) next to the function that returns the model; it returns the inputs of so many "
        "samples: keywords, a tuple, or a tensor; for a PipelineModule the pair (inputs, labels)"
    )


def _labels(name: str, ids: Tensor) -> dict[str, Tensor]:
    """What a model of Transformers with this name of its class computes its loss from."""
    if "QuestionAnswering" in name:
        return dict.fromkeys(("start_positions", "end_positions"), torch.zeros_like(ids[:, 0]))
    if "Classification" in name:
        return {"labels": torch.zeros_like(ids if "Token" in name else ids[:, 0])}
    return {"labels": ids}


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
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if loss is None:
        loss = out[0] if isinstance(out, (tuple, list)) else out
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"the model returned a {type(out).__name__}, in which there is no loss. Let it return the loss, an output "
            "with .loss, or a tuple that begins with it"
        )
    return loss if loss.dim() == 0 else loss.float().mean()
