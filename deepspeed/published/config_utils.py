"""What scripts use of `deepspeed.runtime.config_utils` to write configs of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.log import warn_once


class DeepSpeedConfigModel(BaseModel):
    """Base of configs that scripts and libraries declare: fields can be assigned, and are validated again then.

    A field with `json_schema_extra={"deprecated": True, "new_param": "other"}` moves a given value to `other`, which
    may be dotted, after `new_param_fn`, unless `set_new_param` is false. `strict=False` drops values that are "auto".
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        given = data if strict else {name: value for name, value in data.items() if value != "auto"}
        super().__init__(**given)
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("deprecated") and name in self.model_fields_set:
                self._move(name, extra)

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, data: Any) -> Any:
        return dict(data) if isinstance(data, Mapping) else data

    def _move(self, name: str, extra: Mapping[str, Any]) -> None:
        """Warn of a deprecated field that is given, and hand its value to the field that takes its place."""
        new = str(extra.get("new_param") or "")
        advice = str(extra.get("deprecated_msg") or "")
        warn_once(f"config key {name!r} is deprecated" + (f", use {new!r}" if new else "") + f" {advice}".rstrip())
        if not new or not extra.get("set_new_param", True):
            return
        convert: Any = extra.get("new_param_fn", lambda value: value)
        *path, last = new.split(".")
        home = reduce(getattr, path, self)
        if last in home.model_fields_set:
            raise DeepSpeedConfigError(f"both {name!r} and {new!r} are given; keep {new!r}", path=name)
        setattr(home, last, convert(getattr(self, name)))


class DeepSpeedNebulaConfig:
    """The section `nebula` of a config dict, for scripts that read it."""

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        section: Mapping[str, Any] = param_dict.get("nebula") or {}
        self.enabled = section.get("enabled", False)
        self.persistent_storage_path = section.get("persistent_storage_path")
        self.persistent_time_interval = section.get("persistent_time_interval", 100)
        self.num_of_version_in_retention = section.get("num_of_version_in_retention", 2)
        self.enable_nebula_load = section.get("enable_nebula_load", True)
        self.load_path = section.get("nebula_load_path")


def dict_raise_error_on_duplicate_keys(ordered_pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.load(object_pairs_hook=)`: the dict, or a ValueError that names keys which occur twice."""
    found = dict(ordered_pairs)
    if len(found) != len(ordered_pairs):
        counts = Counter(name for name, _ in ordered_pairs)
        twice = [name for name, count in counts.items() if count > 1]
        raise ValueError(f"duplicate keys in the config: {', '.join(map(repr, twice))}")
    return found
