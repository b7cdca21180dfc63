"""Did you mean: which known key an unknown one was meant to be, if any."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

__all__ = ["nearest"]

# Keys that clients put in the config for themselves and that only look like ours.
NOT_MISSPELLED = frozenset({"msamp"})
_ALIKE = 0.85


def nearest(key: str, known: Iterable[str]) -> str | None:
    """The known name that `key` is a misspelling of, or None if it looks like none of them.

    A misspelling is: the same letters in another case or with other separators, the same words in another order,
    an abbreviation of at least eight letters, or a few wrong, missing or swapped letters for its length.
    """
    if key in NOT_MISSPELLED:
        return None
    candidates = sorted(set(known))
    plain = _letters(key)
    for name in candidates:
        if plain == _letters(name) or _words(key) == _words(name):
            return name
    scored = [(score, name) for name in candidates if (score := _likeness(plain, _letters(name))) is not None]
    return min(scored)[1] if scored else None


def _letters(key: str) -> str:
    return re.sub(r"[^a-z0-9]", "", key.lower())


def _words(key: str) -> list[str]:
    return sorted(word.rstrip("s") for word in re.split(r"[^a-z0-9]+", key.lower()) if word)


def _likeness(given: str, known: str) -> float | None:
    """A penalty between 0 (alike) and 1, or None if the two are different words."""
    if not given or not known:
        return None
    longest = max(len(given), len(known))
    if len(given) >= 8 and known.startswith(given):
        return 0.5
    slips = _slips(given, known, limit=max(1, longest // 4))
    if slips is not None:
        # One slip turns a word of two letters into any other word; from three letters on it is a slip.
        return slips / longest if longest >= 3 else None
    match = difflib.SequenceMatcher(None, given, known, autojunk=False)
    if match.real_quick_ratio() < _ALIKE or match.quick_ratio() < _ALIKE:  # upper bounds, much cheaper than ratio()
        return None
    ratio = match.ratio()
    return 1 - ratio if ratio >= _ALIKE else None


def _slips(left: str, right: str, *, limit: int) -> int | None:
    """Insertions, deletions, replacements and swaps of neighbours between two words; None if above `limit`."""
    if abs(len(left) - len(right)) > limit:
        return None
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        now = [i]
        for j, b in enumerate(right, 1):
            cost = min(row[j] + 1, now[j - 1] + 1, row[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                cost = min(cost, before[j - 2] + 1)
            now.append(cost)
        before, row = row, now
        if min(row) > limit:
            return None
    return row[-1] if row[-1] <= limit else None
