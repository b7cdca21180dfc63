"""Reading launcher variables: numbers, and errors that show every variable involved with its value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from deepspeed.errors import RendezvousError

__all__ = ["Found", "as_count", "number", "problem", "show"]


@dataclass(frozen=True, slots=True)
class Found:
    """What one source says about this process, as far as it says it; `names` are the variables it was read from."""

    source: str
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    def filled(self, other: Found | None) -> Found:
        """This, with what it leaves open taken from `other`; the source is whoever says the rank."""
        if other is None:
            return self
        gaps = {
            key: getattr(other, key)
            for key in ("rank", "world_size", "local_rank", "local_size")
            if getattr(self, key) is None and getattr(other, key) is not None
        }
        names = {**self.names, **{key: other.names[key] for key in gaps if key in other.names}}
        return replace(self, **gaps, names=names, source=other.source if "rank" in gaps else self.source)


def number(env: Mapping[str, str], name: str) -> int | None:
    """A variable as a count, None if it is unset or blank."""
    text = env.get(name, "").strip()
    if not text:
        return None
    if (count := as_count(text)) is None:
        raise problem(env, (name,), "a whole number from 0 on is needed", f"Correct or unset {name}.")
    return count


def as_count(text: str) -> int | None:
    """A whole number from 0 on, None if the text is none, or one that counts nothing in this world."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def show(env: Mapping[str, str], *names: str) -> str:
    """`RANK='0', WORLD_SIZE not set`."""
    return ", ".join(f"{name}={env[name]!r}" if name in env else f"{name} not set" for name in names if name)


def problem(env: Mapping[str, str], names: tuple[str, ...], what: str, advice: str) -> RendezvousError:
    """The error about these variables: their values, what is wrong, what to do."""
    return RendezvousError(f"{show(env, *names)}: {what}. {advice}")
