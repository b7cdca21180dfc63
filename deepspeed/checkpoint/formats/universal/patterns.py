"""Regular expressions out of files, matched in a time that grows with their length and with nothing else.

[Note: linear matching] Python's `re` tries one way after the other, and there are patterns of twenty characters for
which it needs longer than anybody lives. Here all ways are followed at once, one character of the name at a time
(Thompson's construction): states × characters is all it can take. What cannot be matched so (references back, looking
around) does not occur in rules for names, and is refused.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from deepspeed.errors import CheckpointError

_LONGEST = 1000  # characters of a pattern, and of a name
_MOST_STATES = 20_000
_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")


def matches(pattern: object, name: str) -> bool:
    """As `bool(re.match(pattern, name))`; a CheckpointError for a pattern that cannot be matched in bounded time."""
    if not isinstance(pattern, str) or len(pattern) > _LONGEST or len(name) > _LONGEST:
        raise CheckpointError(
            f"the rule {pattern!r:.100} for {name!r:.100} is no pattern of at most {_LONGEST} letters"
        )
    machine, start, end = _machine(pattern)
    here = machine.reach({start}, name, 0)
    for place, character in enumerate(name):
        if end in here or not here:
            break
        here = machine.reach(
            {target for state in here for test, target in machine.steps[state] if test(character)}, name, place + 1
        )
    return end in here


@dataclass
class _Machine:
    """States by number: where each leads without a character, and with which."""

    free: list[list[tuple[str, int]]] = field(default_factory=list)
    """(condition on the place, state); the empty condition always holds."""
    steps: list[list[tuple[Callable[[str], bool], int]]] = field(default_factory=list)

    def state(self) -> int:
        """One more."""
        if len(self.free) >= _MOST_STATES:
            raise CheckpointError(f"a rule for names needs more than {_MOST_STATES} states")
        self.free.append([])
        self.steps.append([])
        return len(self.free) - 1

    def reach(self, states: set[int], name: str, place: int) -> set[int]:
        """Those and all that are reached from them at a place of the name without a character."""
        found, waiting = set(states), list(states)
        while waiting:
            for condition, target in self.free[waiting.pop()]:
                if target not in found and (not condition or _holds(condition, name, place)):
                    found.add(target)
                    waiting.append(target)
        return found


def _holds(condition: str, name: str, place: int) -> bool:
    if condition in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
        return place == 0
    if condition == "AT_END":
        return place == len(name) or name[place:] == "\n"
    if condition == "AT_END_STRING":
        return place == len(name)
    before, after = place > 0 and _is_word(name[place - 1]), place < len(name) and _is_word(name[place])
    return (before != after) == (condition == "AT_BOUNDARY")


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


@functools.lru_cache(maxsize=256)
def _machine(pattern: str) -> tuple[_Machine, int, int]:
    try:
        parsed = _parser.parse(pattern)
        if parsed.state.flags & ~(re.UNICODE | re.IGNORECASE | re.ASCII | re.DOTALL):
            raise CheckpointError(f"the rule {pattern!r:.100} has flags that are not known here")
        machine = _Machine()
        start = machine.state()
        return machine, start, _Builder(machine, parsed.state.flags, pattern).sequence(parsed, start)
    except (re.error, RecursionError, OverflowError, ValueError) as error:
        raise CheckpointError(f"the rule {pattern!r:.100} is no pattern that can be used ({error})") from error


class _Builder:
    """Puts states of a machine behind each other; every method goes on from `state` and gives where it ends."""

    def __init__(self, machine: _Machine, flags: int, pattern: str) -> None:
        self._machine, self._flags, self._pattern = machine, flags, pattern

    def sequence(self, items: Iterable[tuple[Any, Any]], state: int) -> int:
        for op, argument in items:
            state = self._item(str(op), argument, state)
        return state

    def _item(self, op: str, argument: Any, state: int) -> int:
        if op in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            after = self._machine.state()
            self._machine.steps[state].append((self._test(op, argument), after))
            return after
        if op == "SUBPATTERN":
            _, added, removed, inner = argument
            if added or removed:
                raise self._unknown("flags of a group")
            return self.sequence(inner, state)
        if op == "BRANCH":
            return self._branch(argument[1], state)
        if op in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, inner = argument
            return self._repeat(least, most, inner, state)
        if op == "AT":
            after = self._machine.state()
            self._machine.free[state].append((str(argument), after))
            return after
        raise self._unknown(op)

    def _branch(self, ways: Iterable[Any], state: int) -> int:
        after = self._machine.state()
        for way in ways:
            begin = self._machine.state()
            self._machine.free[state].append(("", begin))
            self._machine.free[self.sequence(way, begin)].append(("", after))
        return after

    def _repeat(self, least: int, most: Any, inner: Any, state: int) -> int:
        if int(least) > _LONGEST:
            raise self._unknown(f"a repetition of {least}")
        for _ in range(int(least)):
            state = self.sequence(inner, state)
        after = self._machine.state()
        if str(most) == "MAXREPEAT":
            begin = self._machine.state()
            self._machine.free[state] += [("", begin), ("", after)]
            self._machine.free[self.sequence(inner, begin)].append(("", state))
            return after
        for _ in range(min(int(most), least + _LONGEST) - int(least)):
            self._machine.free[state].append(("", after))
            state = self.sequence(inner, state)
        self._machine.free[state].append(("", after))
        return after

    def _test(self, op: str, argument: Any) -> Callable[[str], bool]:
        """One character, by a pattern of one character: `re` has nothing to try there."""
        escaped = {"LITERAL": "{}", "NOT_LITERAL": "[^{}]", "ANY": ".", "IN": "[{}]"}[op]
        inner = "".join(_spelled(item) for item in argument) if op == "IN" else ""
        if op in ("LITERAL", "NOT_LITERAL"):
            inner = re.escape(chr(argument))
        found = re.compile(escaped.format(inner), self._flags & ~re.UNICODE if self._flags & re.ASCII else self._flags)
        return lambda character: found.fullmatch(character) is not None

    def _unknown(self, what: str) -> CheckpointError:
        return CheckpointError(f"the rule {self._pattern!r:.100} uses {what}, which rules for names may not")


def _spelled(item: tuple[Any, Any]) -> str:
    """An item of a set of characters as it is written."""
    op, argument = str(item[0]), item[1]
    if op == "NEGATE":
        return "^"
    if op == "LITERAL":
        return re.escape(chr(argument))
    if op == "RANGE":
        return f"{re.escape(chr(argument[0]))}-{re.escape(chr(argument[1]))}"
    kinds = {"DIGIT": "d", "NOT_DIGIT": "D", "SPACE": "s", "NOT_SPACE": "S", "WORD": "w", "NOT_WORD": "W"}
    return "\\" + kinds[str(argument).removeprefix("CATEGORY_")]
