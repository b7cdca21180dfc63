"""Value types that several config sections share: numbers, dtype names, lists of names, patterns."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AllowInfNan, BeforeValidator

__all__ = [
    "CountOrAuto",
    "DtypeName",
    "Folder",
    "Lower",
    "Names",
    "Number",
    "NumberOrAuto",
    "OneOrMoreNames",
    "Pattern",
    "Patterns",
    "PlainName",
    "Upper",
    "Whole",
    "absent",
    "from_text",
    "not_boolean",
    "raise_together",
]

_DTYPES: dict[str, str] = {
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
}


def not_boolean(value: Any) -> Any:
    """Booleans are numbers to Python, but not to whoever wrote the config."""
    if isinstance(value, bool):
        raise ValueError(f"expected a number, found {str(value).lower()}")
    return value


def _positive_or_auto(value: Any) -> Any:
    if value == "auto":
        return value
    number = from_text(value)
    if number is None or number != math.floor(number) or number < 1:
        raise ValueError(f'expected a whole number above zero or "auto", found {value!r}')
    return int(number)


def _number_or_auto(value: Any) -> Any:
    if value == "auto":
        return value
    number = from_text(value)
    if number is None:
        raise ValueError(f'expected a number or "auto", found {value!r}')
    return number


def from_text(value: Any) -> float | None:
    """The finite number that `value` is or spells, otherwise None."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


def _dtype_name(value: Any) -> str:
    # A dict built in Python may hold torch.float16 itself; its text is its name, so torch need not be imported.
    text = str(value) if type(value).__module__ == "torch" else value
    short = _DTYPES.get(text.lower().removeprefix("torch.")) if isinstance(text, str) else None
    if short is None:
        raise ValueError(
            f"{value!r} is not a supported dtype; use fp16 (float16, half), bf16 (bfloat16) or fp32 (float32, float)"
        )
    return short


def _empty_is_none(value: Any) -> Any:
    return None if isinstance(value, str) and not value.strip() else value


def _not_a_bare_string(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError(f'expected a list of names, found the string {value!r}; write ["{value}"]')
    return value


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _without_repeats(names: list[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _regex(pattern: str) -> str:
    # "*" alone is how configs say "everything"; it is no regular expression, whoever matches treats it apart.
    if pattern != "*":
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    return pattern


def _regexes(patterns: list[str]) -> list[str]:
    return [_regex(pattern) for pattern in patterns]


def _no_dots(name: str) -> str:
    if "." in name:
        raise ValueError(f"expected the name of a direct child or attribute, without dots, found {name!r}")
    return name


def absent(value: object, keys: Sequence[str]) -> list[str]:
    """Those of `keys` that are None on `value`."""
    return [key for key in keys if getattr(value, key) is None]


def raise_together(problems: Sequence[str]) -> None:
    """One ValueError that lists every problem, one per line; nothing if there is none."""
    if problems:
        raise ValueError("\n".join(problems))


Whole = Annotated[int, BeforeValidator(not_boolean)]
"""A whole number of any sign."""
Number = Annotated[float, BeforeValidator(not_boolean), AllowInfNan(False)]
"""A finite number."""
CountOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_positive_or_auto)]
"""A whole number above zero, or the word "auto"."""
NumberOrAuto = Annotated[float | Literal["auto"], BeforeValidator(_number_or_auto)]
"""A finite number, or the word "auto"."""
Lower = BeforeValidator(_lower)
"""Makes a choice independent of case; the stored value is lower case."""
Upper = BeforeValidator(_upper)
"""Makes a choice independent of case; the stored value is upper case."""
DtypeName = Annotated[Literal["fp16", "bf16", "fp32"], BeforeValidator(_dtype_name)]
"""A floating dtype by any of its usual names, stored as the short one."""
Folder = Annotated[Path | None, BeforeValidator(_empty_is_none)]
"""The path of a folder; empty text is none, not the current folder."""
Names = Annotated[list[str], BeforeValidator(_not_a_bare_string)]
"""A list of names; a bare string is refused, since it would be read letter by letter."""
OneOrMoreNames = Annotated[list[str], BeforeValidator(_one_or_more), AfterValidator(_without_repeats)]
"""A list of names without repeats; a bare string is a list of one."""
Pattern = Annotated[str, AfterValidator(_regex)]
"""A regular expression, or "*" for everything."""
Patterns = Annotated[list[str], BeforeValidator(_one_or_more), AfterValidator(_regexes)]
"""A list of regular expressions; a bare string is a list of one."""
PlainName = Annotated[str, AfterValidator(_no_dots)]
"""A name without dots."""
