"""Configs of inference: `RaggedInferenceEngineConfig` of paged generation, `DeepSpeedInferenceConfig` of any module.

Unlike the sections of a training's config, these can be assigned to: other libraries embed them in configs of their
own, build them in parts and set fields afterwards. Every assignment is validated.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch
from annotated_types import MultipleOf
from pydantic import BeforeValidator, ConfigDict, ValidationError, field_validator, model_validator

from deepspeed.config.clean import ConfigProblem, clean
from deepspeed.config.memory import Bytes, MemoryConfig
from deepspeed.config.model import (
    ConfigModel,
    Count,
    Lower,
    NoEffect,
    Patterns,
    PositiveCount,
    Section,
    key,
    keys_of,
    no_effect,
    walk,
)
from deepspeed.config.read import ConfigSource, read
from deepspeed.config.zero import DeepSpeedZeroConfig, OffloadDeviceEnum
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.log import warn_once

__all__ = [
    "ActivationQuantConfig",
    "AllocationMode",
    "BaseQuantConfig",
    "CacheMemoryConfig",
    "DSStateManagerConfig",
    "DeepSpeedInferenceConfig",
    "DeepSpeedMoEConfig",
    "DeepSpeedTPConfig",
    "DtypeEnum",
    "InferenceCheckpointConfig",
    "LayerQuantConfig",
    "MoETypeEnum",
    "QKVQuantConfig",
    "QuantTypeEnum",
    "QuantizationConfig",
    "RaggedInferenceEngineConfig",
    "RaggedQuantizationConfig",
    "RaggedTensorParallelConfig",
    "SpeculationConfig",
    "WeightQuantConfig",
    "idle_keys",
    "read_inference_config",
]


class InferenceSection(Section):
    """A section of an inference config: its fields can be assigned, and are validated again then."""

    model_config = ConfigDict(frozen=False, validate_assignment=True, loc_by_alias=False)
    usual_by_name = True

    moved: ClassVar[Mapping[str, str]] = {}
    """Older keys → the dotted keys that take their place."""

    @model_validator(mode="before")
    @classmethod
    def _without_older_keys(cls, data: Any) -> Any:
        return cls.at_new_places(data) if isinstance(data, dict) else data

    @classmethod
    def at_new_places(cls, data: dict[str, Any]) -> dict[str, Any]:
        """The data without older keys."""
        kept = {name: value for name, value in data.items() if name not in cls.moved}
        for old in cls.moved.keys() & data.keys():
            _move(kept, old, cls.moved[old], data[old], cls)
        return kept

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.moved:
            section, _, new = self.moved[name].partition(".")
            setattr(getattr(self, section), new, value)
            self.__dict__[name] = value
            return
        # pydantic assigns before the rules between fields are checked; a refused value must not stay.
        before = dict(self.__dict__)
        try:
            super().__setattr__(name, value)
        except ValidationError:
            self.__dict__.update(before)
            raise


def _move(data: dict[str, Any], old: str, new: str, value: Any, model: type[ConfigModel]) -> None:
    """Set the nested key `new`, whose section may be there under any of its names."""
    warn_once(f"config key {old!r} is deprecated; use {new!r}")
    head, _, last = new.partition(".")
    known = keys_of(model)[head]
    name = next((each for each in (known.json, known.name) if data.get(each) is not None), head)
    section = data.get(name)
    if isinstance(section, ConfigModel):
        section = {field: getattr(section, field) for field in section.model_fields_set}
    section = dict(section or {})
    if section.get(last) is not None and section[last] != value:
        raise ValueError(f"both {old!r} and {new!r} are given; keep {new!r}")
    data[name] = {**section, last: value}


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
    kernels: bool = key(True, "Whether modules compute by fused kernels, where the device has them.")
    deterministic: bool = key(
        False, "Whether the bits of a sequence's results do not depend on the other sequences of a step; costs speed."
    )
    speculative: SpeculationConfig | None = key(None, "Guessed tokens; null guesses none.")
    memory: MemoryConfig = key(
        MemoryConfig, "Budgets for weights: the device is filled first, other layers stream from host or disk."
    )


class DtypeEnum(Enum):
    """Dtypes by any of their usual names."""

    fp16 = torch.float16
    fp32 = torch.float32
    bf16 = torch.bfloat16
    int8 = torch.int8

    @classmethod
    def from_str(cls, value: str) -> DtypeEnum:
        """The dtype of a name."""
        return cls(value)

    @classmethod
    def _missing_(cls, value: object) -> DtypeEnum | None:
        return next((member for member in cls if str(value).removeprefix("torch.") in _DTYPES[member.name]), None)


_DTYPES: dict[str, tuple[str, ...]] = {
    "fp16": ("fp16", "float16", "half"),
    "fp32": ("fp32", "float32", "float"),
    "bf16": ("bf16", "bfloat16", "bfloat"),
    "int8": ("int8",),
}


def _dtype(value: Any) -> Any:
    try:
        return DtypeEnum(value).value
    except ValueError:
        names = ", ".join(name for names in _DTYPES.values() for name in names)
        raise ValueError(f"{value!r} is not a supported dtype; use a torch.dtype or one of {names}") from None


class MoETypeEnum(str, Enum):
    """Kinds of blocks of experts."""

    residual = "residual"
    standard = "standard"


class QuantTypeEnum(str, Enum):
    """Whether a group of integers has a scale alone, or a zero point too."""

    asym = "asymmetric"
    sym = "symmetric"


_OF_THE_MODEL = "it is read from the model's own layers"
_OWN_GROUPS = "groups of experts follow from ep_size"
_WITHOUT_FILES = NoEffect(
    "no checkpoint is given",
    lambda config: config.checkpoint is None and config.checkpoint_config.checkpoint_dir is None,
)


class DeepSpeedTPConfig(InferenceSection):
    """Ranks that share every layer (AutoTP)."""

    enabled: bool = key(True, "Whether tp_size counts; false is a tp_size of 1.")
    tp_size: PositiveCount = key(1, "Number of ranks that share every layer.")
    tp_grain_size: PositiveCount = no_effect(64, "layers are cut between heads, and feed-forward layers evenly")
    mpu: Any = key(None, "An object with get_model_parallel_group(), as Megatron has; it says the ranks.")
    tp_group: Any = key(None, "The process group of the ranks; it says their number, where tp_size does not.")

    @field_validator("mpu", mode="after")
    @classmethod
    def _says_its_ranks(cls, value: Any) -> Any:
        if value is not None and not callable(getattr(value, "get_model_parallel_group", None)):
            raise ValueError(f"expected an object with get_model_parallel_group(), found {value!r}")
        return value

    @field_validator("tp_group", mode="after")
    @classmethod
    def _has_ranks(cls, value: Any) -> Any:
        if value is not None and not callable(getattr(value, "size", None)):
            raise ValueError(f"expected a process group, found {value!r}")
        return value


class DeepSpeedMoEConfig(InferenceSection):
    """Experts that are dealt to ranks."""

    enabled: bool = key(True, "Whether ep_size counts; false is an ep_size of 1.")
    ep_size: PositiveCount = key(1, "Number of ranks that experts are dealt to.")
    moe_experts: list[PositiveCount] = no_effect([1], _OF_THE_MODEL, alias="num_experts")
    type: MoETypeEnum = no_effect(MoETypeEnum.standard, _OF_THE_MODEL)
    ep_mp_group: Any = no_effect(None, _OWN_GROUPS, alias="expert_mp_group")
    ep_group: Any = no_effect(None, _OWN_GROUPS, alias="expert_group")

    @field_validator("moe_experts", mode="before")
    @classmethod
    def _one_number(cls, value: Any) -> Any:
        return [value] if isinstance(value, int) else value


class BaseQuantConfig(InferenceSection):
    """How numbers are rounded to integers."""

    enabled: bool = key(True, "Whether they are rounded, where the section is given or dtype is int8.")
    num_bits: Literal[4, 8] = key(8, "Width of the integers.")
    q_type: QuantTypeEnum = key(QuantTypeEnum.sym, "Whether a group has a scale alone, or a zero point too.")
    q_groups: PositiveCount = key(1, "Number of groups of a row; those of weights have a multiple of 128 numbers.")


class LayerQuantConfig(InferenceSection):
    """How the weights of some layers are held."""

    num_bits: Literal[4, 8] = key(8, "Width of the integers.")
    group_size: Annotated[Count, MultipleOf(128)] = key(0, "Values of a row that share a scale; 0: all of them.")
    group_dim: Literal[1] = key(1, "The dim along which they are neighbours.")
    symmetric: bool = key(False, "Whether a group has a scale alone, or a zero point too.")


class WeightQuantConfig(BaseQuantConfig):
    """How weights are held."""

    quantized_initialization: dict[str, Any] = no_effect({}, "weight_quantization of a training's config has it")
    post_init_quant: dict[str, LayerQuantConfig] = key(
        {}, "Parts of module names → how the weights of these modules are held."
    )


class ActivationQuantConfig(BaseQuantConfig):
    """How inputs of linear layers are rounded; only where this section is given."""


class QKVQuantConfig(InferenceSection):
    """Whether projections of queries, keys and values are quantised with the others."""

    enabled: bool = key(True, "Whether they are.")


class QuantizationConfig(InferenceSection):
    """Integers instead of weights and activations: with dtype int8, or where a section is given."""

    enabled: bool = key(True, "Whether anything is quantised.")
    activation: ActivationQuantConfig = key(ActivationQuantConfig, "Inputs of linear layers.")
    weight: WeightQuantConfig = key(WeightQuantConfig, "Weights of linear layers.")
    qkv: QKVQuantConfig = key(QKVQuantConfig, "Projections of queries, keys and values.")


class InferenceCheckpointConfig(InferenceSection):
    """What the keys of the top level say, in a section of its own; those go before."""

    checkpoint_dir: str | None = key(None, "As checkpoint.")
    save_mp_checkpoint_path: str | None = key(None, "As save_mp_checkpoint_path.")
    base_dir: str | None = key(None, "As base_dir.", _WITHOUT_FILES)


def _switch(value: Any) -> Any:
    return {"enabled": value} if isinstance(value, bool) else value


class DeepSpeedInferenceConfig(InferenceSection):
    """The config of `deepspeed.init_inference`."""

    moved: ClassVar[Mapping[str, str]] = {
        "mp_size": "tensor_parallel.tp_size",
        "mpu": "tensor_parallel.mpu",
        "ep_size": "moe.ep_size",
        "ep_group": "moe.ep_group",
        "expert_group": "moe.ep_group",
        "ep_mp_group": "moe.ep_mp_group",
        "expert_mp_group": "moe.ep_mp_group",
        "moe_experts": "moe.moe_experts",
        "moe_type": "moe.type",
    }

    replace_with_kernel_inject: bool = key(
        False, "Whether modules that fused kernels compute are replaced; a table lists them.", alias="kernel_inject"
    )
    dtype: Annotated[Any, BeforeValidator(_dtype)] = key(
        torch.float16, "Dtype of weights and computation; int8 holds weights of linear layers in 8 bits."
    )
    tensor_parallel: DeepSpeedTPConfig = key(DeepSpeedTPConfig, "Ranks that share every layer.", alias="tp")
    enable_cuda_graph: bool = key(
        False, "Whether forward passes are captured as graphs of the device, by shapes of inputs, and replayed."
    )
    use_triton: bool = key(False, "As replace_with_kernel_inject, whose kernels are Triton's.")
    triton_autotune: bool = no_effect(False, "kernels choose the sizes of their blocks by the shapes they get")
    zero: DeepSpeedZeroConfig = key(
        DeepSpeedZeroConfig, "Stage 3 with offload_param lets layers stream from host or disk (ZeRO-Inference)."
    )
    triangular_masking: bool = no_effect(True, "the model makes its own masks", alias="tm")
    moe: Annotated[DeepSpeedMoEConfig, BeforeValidator(_switch)] = key(DeepSpeedMoEConfig, "Experts over ranks.")
    keep_module_on_host: bool = key(False, "Whether weights stay in host memory, from where layers stream.")
    quant: QuantizationConfig = key(QuantizationConfig, "Integers instead of weights and activations.")
    checkpoint: str | dict[str, Any] | None = key(
        None, "Where weights lie: a folder of safetensors, or a description as a dict or a JSON file."
    )
    base_dir: str = key("", "The folder that relative paths of a checkpoint's description start from.", _WITHOUT_FILES)
    set_empty_params: bool = key(
        False, "Whether parameters lose the values they have, and their memory, before a checkpoint is read."
    )
    save_mp_checkpoint_path: str | None = key(
        None, "A folder to which every rank writes its part of the weights, with a description to load them by."
    )
    checkpoint_config: InferenceCheckpointConfig = key(
        InferenceCheckpointConfig, "The three keys above in a section.", alias="ckpt_config"
    )
    return_tuple: bool = no_effect(True, "a layer returns what the model's own layer returns")
    training_mp_size: PositiveCount = key(
        1, "Number of ranks that shared the layers of the checkpoint's training.", _WITHOUT_FILES
    )
    replace_method: str = no_effect("auto", "modules are recognised by what they compute")
    injection_policy: Any = key(
        None,
        "Class of a block → names of its linear layers whose outputs are summed over ranks; the others of the block "
        "are cut by outputs.",
        alias="injection_dict",
    )
    injection_policy_tuple: tuple[Any, ...] | None = no_effect(None, "the library sets it by itself")
    config: Any = no_effect(None, _OF_THE_MODEL, alias="args")
    max_out_tokens: PositiveCount = key(
        1024,
        "Number of tokens of a sequence, its prompt included, for which generate() keeps a cache.",
        alias="max_tokens",
    )
    min_out_tokens: PositiveCount = key(
        1, "Number of tokens of a sequence that the cache must have room for at least.", alias="min_tokens"
    )
    transposed_mode: bool = no_effect(False, "kernels read weights as the model stores them")
    ragged: RaggedInferenceEngineConfig | None = key(
        None, "Paged generation: limits, cache, quantisation and speculation of generate()."
    )
    mp_size: Any = key(1, "Older name of tensor_parallel.tp_size.")
    mpu: Any = key(None, "Older name of tensor_parallel.mpu.")
    ep_size: Any = key(1, "Older name of moe.ep_size.")
    ep_group: Any = key(None, "Older name of moe.ep_group.", alias="expert_group")
    ep_mp_group: Any = key(None, "Older name of moe.ep_mp_group.", alias="expert_mp_group")
    moe_experts: Any = key([1], "Older name of moe.moe_experts.")
    moe_type: Any = key(MoETypeEnum.standard, "Older name of moe.type.")

    @field_validator("injection_policy", mode="after")
    @classmethod
    def _layers_of_classes(cls, value: Any) -> dict[Any, Any] | None:
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"expected a dict of classes and names of layers, found {value!r}")
        for block, names in (value or {}).items():
            if not (isinstance(block, type) and issubclass(block, torch.nn.Module)):
                raise ValueError(
                    f"injection_policy maps classes of layers to names; {block!r} is no class of nn.Module"
                )
            if not isinstance(names, (str, list, tuple, set, type)):
                raise ValueError(f"{block.__name__}: expected names of linear layers, found {names!r}")
            if isinstance(names, type) and not isinstance(getattr(names, "rows", None), tuple):
                raise ValueError(
                    f"injection_policy: {names.__name__} is a policy class of DeepSpeed; give the names of the "
                    f"linear layers of {block.__name__} whose outputs are summed, such as ('mlp.down_proj',)"
                )
        return value

    @model_validator(mode="after")
    def _one_way(self) -> DeepSpeedInferenceConfig:
        if self.injection_policy is not None and self.replace_with_kernel_inject:
            raise ValueError(
                "injection_policy says by names how layers are split, replace_with_kernel_inject finds modules by "
                "itself; give one of them"
            )
        if self.ragged is not None and self.ragged.tensor_parallel.tp_size > 1:
            raise ValueError(
                f"ragged.tensor_parallel.tp_size is {self.ragged.tensor_parallel.tp_size}; of this config, "
                "tensor_parallel.tp_size says how many ranks share every layer"
            )
        if self.min_out_tokens > self.max_out_tokens:
            raise ValueError(f"min_out_tokens ({self.min_out_tokens}) is above max_out_tokens ({self.max_out_tokens})")
        for old, new in self.moved.items():  # older names can be read
            if old in type(self).model_fields:
                section, _, name = new.partition(".")
                self.__dict__[old] = getattr(getattr(self, section), name)
        return self

    @property
    def ranks(self) -> int:
        """The tensor-parallel ranks that the config asks for by number."""
        return self.tensor_parallel.tp_size if self.tensor_parallel.enabled else 1


def idle_keys(config: ConfigModel) -> list[str]:
    """A line for each key that is given with a value other than its default, and has no effect."""
    found = []
    for path, known in walk(type(config)):
        owners: list[Any] = [config]
        *parents, _ = path.split(".")
        for parent in parents:
            last = owners[-1]
            owners.append(getattr(last, keys_of(type(last))[parent].name) if isinstance(last, ConfigModel) else None)
        owner = owners[-1]
        if owner is None or known.name not in owner.model_fields_set:
            continue
        if getattr(owner, known.name) == known.info.get_default(call_default_factory=True):
            continue
        marks = [mark for mark in known.info.metadata if isinstance(mark, NoEffect)]
        if isinstance(config, DeepSpeedInferenceConfig) and path.startswith("zero."):
            why = _idle_of_zero(path, config.zero)
        else:
            why = next((mark.why for mark in marks if mark.when(owners[-2] if parents else config)), None)
        if why is not None:
            found.append(f"{path}: no effect: {why}")
    return found


_OF_WEIGHTS = ("stage", "offload_param", *(f"offload_param.{name}" for name in ("device", "pin_memory")))
_ON_DISK = tuple(f"offload_param.{name}" for name in ("nvme_path", "max_in_cpu"))


def _idle_of_zero(path: str, zero: DeepSpeedZeroConfig) -> str | None:
    """Why a key of a training does nothing in inference; None if it says where weights live."""
    name = path.removeprefix("zero.")
    if not zero.offloads_parameters:
        return "weights leave the device by stage 3 with offload_param"
    on_disk = zero.offload_param is not None and zero.offload_param.device is OffloadDeviceEnum.nvme
    if name in _ON_DISK and not on_disk:
        return "zero.offload_param.device is not nvme"
    return None if name in (*_OF_WEIGHTS, *_ON_DISK) else "inference has no gradients and optimizer states"


Config = TypeVar("Config", bound=ConfigModel)


def read_inference_config(
    model: type[Config], source: ConfigSource | Config | None = None, keys: Mapping[str, Any] | None = None
) -> Config:
    """A config from a dict, a path or a ready one, with `keys` laid over it; one error lists all that is wrong.

    A key that is given in both with different values is an error. `"auto"` is a key's default.
    """
    if isinstance(source, model) and not keys:
        return source
    if isinstance(source, ConfigModel):
        source = {name: getattr(source, name) for name in source.model_fields_set}
    raw, name = (source or {}, "the given dict") if source is None or isinstance(source, Mapping) else read(source)
    names = {spelling: known.json for spelling, known in keys_of(model).items()}
    merged = {names.get(given, given): value for given, value in raw.items()}
    for given, value in (keys or {}).items():
        usual = names.get(given, given)
        if usual in merged and merged[usual] is not value and merged[usual] != value:
            raise DeepSpeedConfigError(
                f"Conflicting argument {given!r}: the config says {merged[usual]!r}, the keyword {value!r}; keep one",
                path=given,
            )
        merged[usual] = value
    if issubclass(model, InferenceSection):
        try:
            merged = model.at_new_places(merged)
        except ValueError as error:
            raise DeepSpeedConfigError(str(error)) from None
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
