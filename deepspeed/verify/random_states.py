"""Whether a random generator is where drawing numbers can have brought it.

Scripts may seed ranks alike or not, and draw as often as they like. What they cannot do is to reach a state that the
generator does not pass through. So a state is judged by drawing on from the one that was seen before, or from its seed.
"""

from __future__ import annotations

import torch
from torch import Tensor

_KEY = slice(24, 24 + 624 * 8)
"""Bytes of torch's state of a Mersenne twister that hold its 624 words; seed and place in them come before."""
_WORDS = 624
_MOST_DRAWS = 1 << 23


def flaw(before: Tensor, now: Tensor) -> tuple[int, int, int, int] | None:
    """None if a generator in the state `before` comes to the state `now`, within some million numbers or by its seed.

    Else what is wrong: a byte of the state, what it is, what it is in the nearest state that is passed, and how many
    bytes differ.
    """
    if torch.equal(before, now):
        return None
    if before.shape != now.shape or before.numel() < _KEY.stop:
        return _flaw_of_count(before, now)
    seeded = torch.Generator().manual_seed(int(now[:8].view(torch.int64)) & (2**63 - 1)).get_state()
    starts = [before, seeded] if torch.equal(before[:8], now[:8]) else [seeded]
    place = int(now[16:24].view(torch.int64))
    nearest = min((_nearest(start, now) for start in starts), key=lambda each: each[0])
    if nearest[0] == 0:
        return None if 0 <= place <= _WORDS else (16, place, _WORDS, 1)
    count, expected = nearest
    at = int((expected != now[_KEY]).to(torch.uint8).argmax())
    return _KEY.start + at, int(now[_KEY][at]), int(expected[at]), count


def _nearest(start: Tensor, now: Tensor) -> tuple[int, Tensor]:
    """How many bytes of the words differ from the nearest words that drawing on from `start` passes, and those."""
    walker = torch.Generator()
    walker.set_state(start.clone())
    block, best = torch.empty(_WORDS, dtype=torch.int32), (1 << 30, start[_KEY])
    for _ in range(_MOST_DRAWS // _WORDS):
        words = walker.get_state()[_KEY]
        count = int((words != now[_KEY]).sum())
        if count < best[0]:
            best = count, words
        if count == 0:
            break
        block.random_(generator=walker)
    return best


def _flaw_of_count(before: Tensor, now: Tensor) -> tuple[int, int, int, int] | None:
    """Of a generator of a device: a seed and how much was drawn."""
    if before.numel() != 16 or now.numel() != 16:
        return None
    (seed, drawn), (seed_now, drawn_now) = before.view(torch.int64).tolist(), now.view(torch.int64).tolist()
    if seed != seed_now:
        return 0, seed_now, seed, 1
    return None if drawn_now >= drawn else (8, drawn_now, drawn, 1)


def random_states() -> dict[str, Tensor]:
    """The states of torch's generators on this rank, by the device."""
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found
