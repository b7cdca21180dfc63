"""Configs of the inference engines: `RaggedInferenceEngineConfig` of paged generation, `DeepSpeedInferenceConfig` of
`deepspeed.init_inference`.

Unlike the sections of a training's config, these can be assigned to: other libraries embed them in configs of their
own, build them in parts and set fields afterwards. Every assignment is validated.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, ConfigDict, ValidationError, model_validator

from deepspeed.config.clean import ConfigProblem, clean
from deepspeed.config.memory import Bytes, MemoryConfig
from deepspeed.config.model import ConfigModel, Lower, Patterns, PositiveCount, Section, key
from deepspeed.config.read import ConfigSource, read
from deepspeed.errors import DeepSpeedConfigError

__all__ = [
    "AllocationMode",
    "CacheMemoryConfig",
    "DSStateManagerConfig",
    "RaggedInferenceEngineConfig",
    "RaggedQuantizationConfig",
    "RaggedTensorParallelConfig",
    "SpeculationConfig",
    "read_inference_config",
]


class InferenceSection(Section):
    """A section of an inference config: its fields can be assigned, and are validated again then."""

    model_config = ConfigDict(frozen=False, validate_assignment=True)

    def __setattr__(self, name: str, value: Any) -> None:
        # pydantic assigns before the rules between fields are checked; a refused value must not stay.
        before = dict(self.__dict__)
        try:
            super().__setattr__(name, value)
        except ValidationError:
            self.__dict__.update(before)
            raise


class AllocationMode(Enum):
    """What the size of the cache's memory says."""

    RESERVE = "reserve"
    ALLOCATE = "allocate"


class CacheMemoryConfig(InferenceSection):
    """How much memory of the device the cache takes."""

    mode: AllocationMode = key(
        AllocationMode.RESERVE,
        "reserve: size is the number of bytes that stay free on the device. allocate: size is a number of blocks.",
    )
    size: PositiveCount = key(1_000_000_000, "Bytes or blocks, as mode says.")


class DSStateManagerConfig(InferenceSection):
    """Limits of a step, and where the keys and values of sequences lie."""

    max_tracked_sequences: PositiveCount = key(2048, "Number of sequences that have a place in the cache at a time.")
    max_ragged_batch_size: PositiveCount = key(768, "Number of tokens of one forward pass.")
    max_ragged_sequence_count: PositiveCount = key(512, "Number of sequences of one forward pass.")
    max_context: PositiveCount = key(8192, "Number of tokens of one sequence, its prompt included.")
    memory_config: CacheMemoryConfig = key(CacheMemoryConfig, "Memory of the device for the cache.")
    block_size: PositiveCount = key(32, "Number of tokens of a block; prefixes are shared by whole blocks.")
    kv_dtype: Literal["auto", "fp8"] = key(
        "auto", "Width of cached keys and values: auto is the model's dtype, fp8 is 8 bits with a scale for each head."
    )
    prefix_cache: bool = key(True, "Whether sequences share the blocks of equal prefixes.")
    host_cache: Bytes = key(
        0, "Bytes of host memory for blocks of preempted sequences and of old prefixes; 0 computes them again."
    )
    offload: bool = key(
        False, "Whether host_cache, where it is not given, has the size of the device's cache instead of 0."
    )

    @model_validator(mode="after")
    def _sequences_fit(self) -> DSStateManagerConfig:
        for name in ("max_tracked_sequences", "max_ragged_batch_size"):
            limit = getattr(self, name)
            if self.max_ragged_sequence_count > limit:
                raise ValueError(
                    f"max_ragged_sequence_count is {self.max_ragged_sequence_count}, above {name} ({limit}); a forward "
                    f"pass has at most {limit} sequences. Lower the first or raise the second"
                )
        return self

    def host_bytes(self, device_bytes: int) -> int:
        """Bytes of host memory for blocks, beside a cache of `device_bytes`."""
        return device_bytes if self.offload and "host_cache" not in self.model_fields_set else self.host_cache


class RaggedTensorParallelConfig(InferenceSection):
    """Ranks that share every layer."""

    tp_size: PositiveCount = key(1, "Number of ranks that share every layer.")


class RaggedQuantizationConfig(InferenceSection):
    """Which weights are held in fewer bits."""

    quantization_mode: Annotated[Literal["wf6af16", "w8a16", "w4a16", "fp8"], Lower] | None = key(
        None, "Width of weights: 6 bits (floating point), 8, 4, or 8 bits floating point; null keeps the model's dtype."
    )
    group_size: PositiveCount = key(128, "Number of values of a weight's row that share a scale, for w4a16.")
    symmetric: bool = key(True, "Whether groups of integers have a scale alone, or a zero point too.")
    exclude: Patterns = key(
        ["lm_head", ".*embed"], "Regular expressions, matched from the start of module names to leave."
    )


class SpeculationConfig(InferenceSection):
    """Tokens that are guessed, and verified by one forward pass."""

    method: Literal["ngram", "draft"] = key(
        "ngram", "Where guesses come from: tokens that followed the same words before, or a smaller model."
    )
    model: Any = key(None, "The smaller model (draft): a path, or a module; it needs the vocabulary of the large one.")
    tokens: PositiveCount = key(4, "Number of tokens guessed at a time.")

    @model_validator(mode="after")
    def _draft_has_a_model(self) -> SpeculationConfig:
        if (self.method == "draft") != (self.model is not None):
            found = "no model is given" if self.model is None else "a model is given"
            raise ValueError(f"method is {self.method!r} and {found}; 'draft' needs model, 'ngram' has none")
        return self


class RaggedInferenceEngineConfig(InferenceSection):
    """Paged generation: `InferenceEngineV2`, `LLM`, and `ragged` of `init_inference`."""

    tensor_parallel: RaggedTensorParallelConfig = key(
        RaggedTensorParallelConfig,
        "Ranks that share every layer.",
        alias="tp",
    )
    state_manager: DSStateManagerConfig = key(DSStateManagerConfig, "Limits of a step, and the cache.", alias="manager")
    quantization: RaggedQuantizationConfig = key(RaggedQuantizationConfig, "Weights in fewer bits.")
    cuda_graphs: bool = key(True, "Whether steps are captured as graphs of the device and replayed.")
    deterministic: bool = key(
        False, "Whether the bits of a sequence's results do not depend on the other sequences of a step; costs speed."
    )
    speculative: SpeculationConfig | None = key(None, "Guessed tokens; null guesses none.")
    memory: MemoryConfig = key(
        MemoryConfig, "Budgets for weights: the device is filled first, other layers stream from host or disk."
    )


Config = TypeVar("Config", bound=ConfigModel)


def read_inference_config(
    model: type[Config], source: ConfigSource | Config | None = None, keys: Mapping[str, Any] | None = None
) -> Config:
    """A config from a dict, a path or a ready one, with `keys` laid over it; one error lists all that is wrong.

    A key that is given in both with different values is an error. `"auto"` is a key's default.
    """
    if isinstance(source, model) and not keys:
        return source
    if isinstance(source, model):
        source = {name: getattr(source, name) for name in source.model_fields_set}
    raw, name = read({} if source is None else source)  # type: ignore[arg-type]
    names = _usual_names(model)
    merged = {names.get(given, given): value for given, value in raw.items()}
    for given, value in (keys or {}).items():
        usual = names.get(given, given)
        if usual in merged and merged[usual] is not value and merged[usual] != value:
            raise DeepSpeedConfigError(
                f"Conflicting argument {given!r}: the config says {merged[usual]!r}, the keyword {value!r}; keep one",
                path=given,
            )
        merged[usual] = value
    found = clean(merged, model)
    problems = [*found.problems, *(ConfigProblem(path, "unknown key") for path in found.unknown)]
    try:
        made = model.model_validate(found.data)
    except ValidationError as error:
        for item in error.errors():
            path = ".".join(str(part) for part in item["loc"])
            problems.append(ConfigProblem(path, str(item["msg"]).removeprefix("Value error, ")))
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        text = str(problems[0]) if len(problems) == 1 else f"{len(problems)} problems in the config ({name}):\n{listed}"
        raise DeepSpeedConfigError(text, path=problems[0].path)
    return made


def _usual_names(model: type[ConfigModel]) -> dict[str, str]:
    """Every spelling of a key at the top → its usual one."""
    table: dict[str, str] = {}
    for name, info in model.model_fields.items():
        usual = info.alias or name
        table[name] = table[usual] = usual
        choices = info.validation_alias.choices if isinstance(info.validation_alias, AliasChoices) else ()
        table.update((str(choice), usual) for choice in choices)
    return table
