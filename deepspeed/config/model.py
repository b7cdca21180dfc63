"""The base of every config section, and the value types that sections share."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from deepspeed.config.renamed import current

__all__ = [
    "Count",
    "DeepSpeedConfigModel",
    "Elements",
    "Foreign",
    "ForeignOptions",
    "PositiveCount",
    "PositiveElements",
    "Section",
    "Share",
]


class DeepSpeedConfigModel(BaseModel):
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

    @model_validator(mode="before")
    @classmethod
    def _one_spelling(cls, data: Any) -> Any:
        """A field given by its name and by its alias at once is a contradiction, even with equal values."""
        if isinstance(data, dict):
            for name, field in cls.model_fields.items():
                if field.alias is not None and field.alias != name and name in data and field.alias in data:
                    raise ValueError(f"both {name!r} and {field.alias!r} are given; they are one key, keep one")
        return data


class Section(DeepSpeedConfigModel):
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


class Foreign(Section):
    """A section of something that is no part of the library: only its switch is known."""

    model_config = ConfigDict(extra="allow")

    enabled: bool = Field(False, description="Whether it is wanted.")


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


def _off_is_none(value: Any) -> Any:
    """`false` and `null` are off, `true` is on without options."""
    if isinstance(value, bool):
        return {} if value else None
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"expected true, false or an object with options, found {value!r}")
    return value


ForeignOptions = Annotated[dict[str, Any] | None, BeforeValidator(_off_is_none)]
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
