"""`library(name)`: the compiled `csrc/<name>.cpp`, built at its first use on this machine."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

from deepspeed.errors import OpUnavailable
from deepspeed.ops.native import cache
from deepspeed.ops.native.recipe import Recipe, recipes

__all__ = ["library"]

_TIMEOUT_S = 300.0
_LAST_LINES = 6


def library(name: str) -> ctypes.CDLL:
    """The loaded library; a build that failed is not tried again by this process."""
    found = _outcome(name)
    if isinstance(found, str):
        raise OpUnavailable(found)
    return found


@functools.lru_cache(None)
def _outcome(name: str) -> ctypes.CDLL | str:
    """The library, or why there is none."""
    try:
        return _loaded(name)
    except (OpUnavailable, OSError, subprocess.SubprocessError) as error:
        return str(error)


def _loaded(name: str) -> ctypes.CDLL:
    tried = recipes(name)
    for place, recipe in enumerate(tried):
        try:
            return _made(recipe)
        except OpUnavailable:
            if place + 1 == len(tried):  # the plainest way: a compiler that does not know the processor has it too
                raise
    raise AssertionError("there is always a recipe")


def _made(recipe: Recipe) -> ctypes.CDLL:
    try:
        place = cache.folder()
    except OSError:  # no home, or one that is read-only: compiled for this process alone
        with tempfile.TemporaryDirectory(prefix="deepspeed-native-") as once:
            return _opened(recipe, Path(once))
    return _opened(recipe, place)


def _opened(recipe: Recipe, folder: Path) -> ctypes.CDLL:
    place = folder / f"{recipe.key}.so"
    cache.keep(place, lambda output: _compile(recipe, output))
    try:
        return ctypes.CDLL(str(place))
    except OSError:  # damaged since: a disk that lost what it had promised
        place.unlink(missing_ok=True)
        cache.keep(place, lambda output: _compile(recipe, output))
        return ctypes.CDLL(str(place))


def _compile(recipe: Recipe, output: Path) -> None:
    command = recipe.command(output)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S, errors="replace"
        )
    except subprocess.TimeoutExpired as error:
        raise OpUnavailable(
            f"{recipe.compiler[0]} took more than {_TIMEOUT_S:.0f} s for {recipe.source.name}"
        ) from error
    if done.returncode:
        told = "\n".join((done.stderr or done.stdout).strip().splitlines()[-_LAST_LINES:])
        raise OpUnavailable(f"{' '.join(command)} failed with exit code {done.returncode}:\n{told}")
