"""Whether torch.compile may look into a function, decided where the function is defined."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch

from deepspeed.accelerator.torch_version import required_torch_version

__all__ = [
    "compiled_autograd",
    "disable",
    "dummy_decorator",
    "enable",
    "is_compile_supported",
    "is_compiling",
    "lazy_disable",
]

F = TypeVar("F", bound=Callable[..., Any])


def is_compile_supported() -> bool:
    """True: every supported torch compiles."""
    return required_torch_version(min_version="2.1")


def is_compiling() -> bool:
    """True while torch.compile traces this call."""
    return torch.compiler.is_compiling()


def disable(func: F) -> F:
    """The function, which torch.compile calls as it is instead of looking into it."""
    return cast(F, torch.compiler.disable(func))


def enable(min_version: str | None = None) -> Callable[[F], F]:
    """A decorator: torch.compile may look into the function if torch is at least of this version."""
    allowed = min_version is None or required_torch_version(min_version=min_version)
    return dummy_decorator if allowed else disable


def lazy_disable(func: F) -> F:
    """As `disable`, but the compiler is only loaded when the function is called while one is at work."""

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        return disable(func)(*args, **kwargs) if is_compiling() else func(*args, **kwargs)

    return cast(F, call)


def dummy_decorator(func: F) -> F:
    """The function itself."""
    return func


@contextlib.contextmanager
def compiled_autograd(enabled: bool, kwargs: dict[str, Any]) -> Iterator[None]:
    """A context in which backward passes are compiled, too; `kwargs` are those of torch.compile."""
    if not enabled:
        yield
        return
    from torch._dynamo.compiled_autograd import _enable  # loads the compiler

    with _enable(torch.compile(**kwargs)):
        yield
