"""Where a model comes from: a script, `module:function`, or the config file of a model of Transformers."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.errors import UsageError
from deepspeed.planning.examples import ExampleBatch

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
        file, _, name = target.partition(":") if not _is_windows(target) else (target, "", "")
        self._file, self._name = file, name
        if file.endswith((".py", ".json")) and not Path(file).is_file():
            raise UsageError(f"{file} is no file; expected a script, module:function, or a Transformers config.json")
        if not file.endswith((".py", ".json")) and not name:
            raise UsageError(
                f"{target!r} names no function; expected a script (train.py), module:function, or the config.json of a "
                "model of Transformers"
            )

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
            sys.path.insert(0, str(Path(self._file).resolve().parent))
            try:
                return runpy.run_path(self._file, run_name="__plan__")
            finally:
                sys.path.pop(0)
        sys.path.insert(0, "")
        try:
            return vars(importlib.import_module(self._file))
        except ModuleNotFoundError as error:
            raise UsageError(f"{self._target}: there is no module {error.name}") from error
        finally:
            sys.path.pop(0)

    def _built(self, names: Mapping[str, Any]) -> nn.Module:
        wanted = (self._name,) if self._name else NAMES
        found = next((names[name] for name in wanted if name in names), None)
        if found is None:
            raise UsageError(
                f"{self._file} has no {self._name or ' or '.join(NAMES)}; define a function that returns the model, or "
                f"name yours: {self._file}:FUNCTION"
            )
        made = found() if callable(found) and not isinstance(found, nn.Module) else found
        if not isinstance(made, nn.Module):
            raise UsageError(f"{self._target} returned a {type(made).__name__}; expected a torch module")
        return made


def _is_windows(target: str) -> bool:
    return len(target) > 2 and target[1] == ":" and target[2] in "\\/"


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
    finally:
        sys.argv = words


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
