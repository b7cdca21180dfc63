"""What sections of the config are made of: their base, `key` with its marks, and the value types that they share."""

from __future__ import annotations

import functools
import math
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, AllowInfNan, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from deepspeed.config.renamed import current


@dataclass(frozen=True)
class NotBuilt:
    """Marks a key of a feature that this version does not have: a value that asks for it is an error."""

    feature: str
    asked: Callable[[Any], bool] | None = None
    """Whether a value asks for it; None is any value but the default, in a section that is not off."""
    instead: str = "remove the key or turn it off"
    package: str = ""
    """The package of others that the feature is part of, by the name that is imported."""
    plugins: str = ""
    """The group of entry points in which a package may bring it, under the name of the key."""


@dataclass(frozen=True)
class NoEffect:
    """Marks a key, or every key of a section, that changes nothing while `when` holds for the config; a warning says "
    "so."""

    why: str
    when: Callable[[Any], bool] = lambda schema: True
    switch: str = ""
    """The key that would turn the section on; off, it has the effect that is meant."""
    unless: str = ""
    """A key that says the same where it is given: a section that is switched off needs no word."""
    path: str = ""
    """The key, once the mark is found at it."""

    def covers(self, path: str) -> bool:
        """True for the key itself and for what lies in it."""
        return path != self.switch and (path == self.path or path.startswith(f"{self.path}."))


def key(default: Any, meaning: str, *marks: NotBuilt | NoEffect, **options: Any) -> Any:
    """A key of the config: its default, or the class of its section; what it means to a user; what is special of it."""
    made: FieldInfo
    if isinstance(default, type):
        made = Field(default_factory=default, description=meaning, **options)
    else:
        made = Field(default, description=meaning, **options)
    made.metadata.extend(marks)
    return made


def no_effect(default: Any, why: str, **options: Any) -> Any:
    """A key that is accepted and never changes anything."""
    return key(default, f"No effect: {why}.", NoEffect(why), **options)


class ConfigModel(BaseModel):
    """A part of the config: immutable, every key declared, each field by its name or its JSON alias.

    Models only say what is valid. Spelling help, `"auto"` and `null` sections are the loader's work
    (`config/load.py`); a model built directly knows older names of its fields and raises pydantic's ValidationError.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        validate_default=True,
        arbitrary_types_allowed=True,
        allow_inf_nan=True,
        protected_namespaces=(),
    )

    usual_by_name: ClassVar[bool] = False
    """Aliases are older spellings: messages and pages show the names of fields."""

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """A generic section with its argument is described as the generic one."""
        super().__pydantic_init_subclass__(**options)
        generic = cls.__pydantic_generic_metadata__["origin"]
        if generic is not None:
            cls.__doc__ = generic.__doc__

    @model_validator(mode="before")
    @classmethod
    def _one_spelling(cls, data: Any) -> Any:
        """A field given by its name and by its alias at once is a contradiction, even with equal values."""
        if isinstance(data, dict):
            for name, field in cls.model_fields.items():
                if field.alias is not None and field.alias != name and name in data and field.alias in data:
                    raise ValueError(f"both {name!r} and {field.alias!r} are given; they are one key, keep one")
        return data


class Section(ConfigModel):
    """A JSON object under a top-level key; absent and `null` mean its defaults."""

    renamed_under: ClassVar[str | None] = None
    """The top-level key, of a section that has fields with older names."""

    @model_validator(mode="before")
    @classmethod
    def _older_names(cls, data: Any) -> Any:
        """Scripts that build a section themselves may still use them."""
        if cls.renamed_under is None or not isinstance(data, dict):
            return data
        return current(cls.renamed_under, data)


class Unbuilt(Section):
    """The section of a feature that this version does not have: a switch, and keys that nothing reads."""

    model_config = ConfigDict(extra="allow")

    enabled: bool = key(False, "Whether the feature is wanted.")

    @property
    def given(self) -> dict[str, Any]:
        """The keys that are given, with their values."""
        return {name: value for name, value in self if name in self.model_fields_set}


def switches(section: Mapping[str, Any]) -> Iterator[bool]:
    """Every `enabled` in a section that nothing else is known of; what is neither true nor false counts as true."""
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from switches(value)
        elif name == "enabled" and value is not None:
            yield str(value).lower() not in ("false", "0", "no", "off", "f", "n")


def _whole(value: Any) -> Any:
    """JSON writes 5e8 as a float; a float without a fraction is that integer. Booleans are not numbers."""
    if isinstance(value, bool):
        raise ValueError(f"expected a whole number, found {value}")
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    return value


def _floor(value: Any) -> Any:
    """Element counts come from formulas such as 0.9 × hidden²; the fraction of an element is dropped."""
    if isinstance(value, float) and math.isfinite(value):
        return math.floor(value)
    return _whole(value)


def off_is_none(value: Any) -> Any:
    """`false` and `null` are off, `true` is on without options."""
    if isinstance(value, bool):
        return {} if value else None
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"expected true, false or an object with options, found {value!r}")
    return value


ForeignOptions = Annotated[dict[str, Any] | None, BeforeValidator(off_is_none)]
"""Options of something that is no part of the library, unread; None is off."""

Count = Annotated[int, BeforeValidator(_whole), Ge(0)]
"""A whole number, zero allowed."""
PositiveCount = Annotated[int, BeforeValidator(_whole), Gt(0)]
"""A whole number above zero."""
Elements = Annotated[int, BeforeValidator(_floor), Ge(0)]
"""A number of tensor elements; clients compute these with floats."""
PositiveElements = Annotated[int, BeforeValidator(_floor), Gt(0)]
"""A number of tensor elements above zero."""
Share = Annotated[float, Ge(0.0), Le(1.0)]
"""A fraction between 0 and 1, both included."""

_DTYPES: dict[str, str] = {
    **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp32", "float32", "float"), "fp32"),
}


def not_boolean(value: Any) -> Any:
    """Booleans are numbers to Python, but not to the author of a config."""
    if isinstance(value, bool):
        raise ValueError(f"expected a number, found {str(value).lower()}")
    return value


def _positive_or_auto(value: Any) -> Any:
    number = from_text(value)
    if value != "auto" and (number is None or number != math.floor(number) or number < 1):
        raise ValueError(f'expected a whole number above zero or "auto", found {value!r}')
    return value if number is None else int(number)


def _number_or_auto(value: Any) -> Any:
    number = from_text(value)
    if value != "auto" and number is None:
        raise ValueError(f'expected a number or "auto", found {value!r}')
    return value if number is None else number


def from_text(value: Any) -> float | None:
    """The finite number that `value` is or spells, otherwise None."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _dtype_name(value: Any) -> str:
    # A dict built in Python may hold torch.float16 itself; its text is its name, so torch need not be imported.
    text = str(value) if type(value).__module__ == "torch" else value
    short = _DTYPES.get(text.lower().removeprefix("torch.")) if isinstance(text, str) else None
    if short is None:
        raise ValueError(
            f"{value!r} is not a supported dtype; use fp16 (float16, half), bf16 (bfloat16) or fp32 (float32, float)"
        )
    return short


def _not_a_bare_string(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError(f'expected a list of names, found the string {value!r}; write ["{value}"]')
    return value


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _regex(pattern: str) -> str:
    # "*" alone is how configs say "everything"; it is no regular expression, so that its readers treat it apart.
    if pattern != "*":
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    return pattern


def _no_dots(name: str) -> str:
    if "." in name:
        raise ValueError(f"expected the name of a direct child or attribute, without dots, found {name!r}")
    return name


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
Lower = BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
"""Makes a choice independent of case; the stored value is lower case."""
Upper = BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value)
"""Makes a choice independent of case; the stored value is upper case."""
DtypeName = Annotated[Literal["fp16", "bf16", "fp32"], BeforeValidator(_dtype_name)]
"""A floating dtype by any of its usual names, stored as the short one."""
Folder = Annotated[
    Path | None, BeforeValidator(lambda value: None if isinstance(value, str) and not value.strip() else value)
]
"""The path of a folder; empty text is none, not the current folder."""
Names = Annotated[list[str], BeforeValidator(_not_a_bare_string)]
"""A list of names; a bare string is refused, since it would be read letter by letter."""
OneOrMoreNames = Annotated[
    list[str], BeforeValidator(_one_or_more), AfterValidator(lambda names: list(dict.fromkeys(names)))
]
"""A list of names without repeats; a bare string is a list of one."""
Pattern = Annotated[str, AfterValidator(_regex)]
"""A regular expression, or "*" for everything."""
Patterns = Annotated[list[Pattern], BeforeValidator(_one_or_more)]
"""A list of regular expressions; a bare string is a list of one."""
PlainName = Annotated[str, AfterValidator(_no_dots)]
"""A name without dots."""


Model = type[ConfigModel]


@dataclass(frozen=True)
class Key:
    """One JSON key of a model."""

    name: str
    """The model's field."""
    json: str
    """The usual spelling in JSON: the alias where there is one, unless `usual_by_name`."""
    info: FieldInfo
    section: Model | None
    """The nested model, if the value is an object."""
    container: Literal["one", "dict", "list"]
    """Whether the value is that object itself, or names or a list of such objects."""
    optional: bool
    """`null` is a value of its own here."""
    owns_auto: bool
    """The word "auto" is a value of its own here."""
    free: bool
    """An object whose keys the schema does not name."""


@functools.cache
def keys_of(model: Model) -> dict[str, Key]:
    """Every accepted spelling of every key of a model."""
    table: dict[str, Key] = {}
    for name, info in model.model_fields.items():
        section, container = _nested(info.annotation)
        key = Key(
            name=name,
            json=name if model.usual_by_name else info.alias or name,
            info=info,
            section=section,
            container=container,
            optional=type(None) in members_of(info.annotation),
            owns_auto=any(get_origin(m) is Literal and "auto" in get_args(m) for m in members_of(info.annotation)),
            free=section is None and any(m is dict or get_origin(m) is dict for m in members_of(info.annotation)),
        )
        table[name] = key
        table[info.alias or name] = key
    return table


def walk(model: Model, prefix: str = "") -> Iterator[tuple[str, Key]]:
    """Every key of a model and of the sections in it, with its dotted path, in the order of declaration."""
    for name in model.model_fields:
        key = keys_of(model)[name]
        path = f"{prefix}{key.json}"
        yield path, key
        if key.section is not None:
            inner = {"one": ".", "dict": ".<name>.", "list": "[]."}[key.container]
            yield from walk(key.section, path + inner)


@functools.cache
def places_of(model: Model) -> dict[str, tuple[str, ...]]:
    """Where each spelling of a key occurs: name → dotted paths of the sections that have it."""
    places: dict[str, list[str]] = {}
    for path, key in walk(model):
        parent = path[: -len(key.json)].rstrip(".")
        for spelling in {key.name, key.json}:
            places.setdefault(spelling, []).append(parent)
    return {name: tuple(found) for name, found in places.items()}


def members_of(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a type: `A | None` → (A, NoneType), everything else is its own only one."""
    if get_origin(annotation) is Annotated:
        return members_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(inner for member in get_args(annotation) for inner in members_of(member))
    return (annotation,)


def _nested(annotation: Any) -> tuple[Model | None, Literal["one", "dict", "list"]]:
    for member in members_of(annotation):
        if isinstance(member, type) and issubclass(member, ConfigModel):
            return member, "one"
        origin, arguments = get_origin(member), get_args(member)
        if origin is dict and len(arguments) == 2:
            inner, _ = _nested(arguments[1])
            if inner is not None:
                return inner, "dict"
        if origin in (list, tuple) and arguments:
            inner, _ = _nested(arguments[0])
            if inner is not None:
                return inner, "list"
    return None, "one"
