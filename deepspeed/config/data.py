"""The sections `data_efficiency`, `curriculum_learning` and `progressive_layer_drop`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import model_validator

from .model import (
    Count,
    Folder,
    Lower,
    Names,
    NoEffect,
    Number,
    PositiveCount,
    Section,
    key,
    no_effect,
    raise_together,
)

ScheduleType = Annotated[Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"], Lower]
_NEEDED: dict[str, tuple[str, ...]] = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


class CurriculumScheduleConfig(Section):
    """How fast a difficulty rises."""

    total_curriculum_step: PositiveCount | None = key(None, "Steps until the difficulty is max_difficulty.")
    difficulty_step: PositiveCount | None = key(
        None, "The difficulty is rounded down to a multiple of it; 8 or a multiple suits sequence lengths on GPUs."
    )
    root_degree: PositiveCount | None = key(None, "Degree of the root of fixed_root: 2 is the square root.")
    difficulty: list[Count] | None = key(None, "The difficulties of fixed_discrete, one after the other.")
    max_step: list[Count] | None = key(None, "The last step of each of them but the last, ascending.")


class CurriculumSchedule(Section):
    """A difficulty that rises with the steps."""

    min_difficulty: PositiveCount | None = key(None, "Difficulty at the start; must be given where it is enabled.")
    max_difficulty: PositiveCount | None = key(None, "Difficulty at the end; must be given where it is enabled.")
    schedule_type: ScheduleType | None = key(None, "Curve from one to the other; must be given where it is enabled.")
    schedule_config: CurriculumScheduleConfig = key(CurriculumScheduleConfig, "Keys of the curve.")

    def schedule_problems(self, path: str = "") -> Iterator[str]:
        """What is missing or contradicts itself, each text with its key."""
        for name in ("min_difficulty", "max_difficulty", "schedule_type"):
            if getattr(self, name) is None:
                yield f"{path}{name} is missing; give it, or set enabled to false"
        if self.min_difficulty and self.max_difficulty and self.min_difficulty > self.max_difficulty:
            yield f"{path}min_difficulty ({self.min_difficulty}) exceeds max_difficulty ({self.max_difficulty})"
        section, at = self.schedule_config, f"{path}schedule_config."
        for name in _NEEDED.get(self.schedule_type or "", ()):
            if getattr(section, name) is None:
                yield f"{at}{name} is missing; schedule_type {self.schedule_type} needs it"
        values, ends = section.difficulty, section.max_step
        if self.schedule_type == "fixed_discrete" and values is not None and ends is not None:
            if not values or len(values) != len(ends) + 1:
                yield (
                    f"{at}difficulty has {len(values)} values and max_step has {len(ends)}; expected one more "
                    "difficulty than steps: the last one has no end"
                )
            if any(one >= other for one, other in pairwise(ends)):
                yield f"{at}max_step is {ends}; its steps must ascend"


class LegacyScheduleConfig(CurriculumScheduleConfig):
    """How fast sequences get longer."""


class LegacyCurriculumConfig(CurriculumSchedule):
    """Sequences that get longer with the steps, by the engine alone; `data_efficiency` chooses samples, too."""

    schedule_config: LegacyScheduleConfig = key(LegacyScheduleConfig, "Keys of the curve.")
    enabled: bool = key(False, "Whether the engine tells the model how long sequences are at each step.")
    curriculum_type: str = key(
        "seqlen", "What gets harder: seqlen hands curriculum_seqlen to the forward; others are read by the script."
    )
    cut_batches: bool = key(
        False,
        "Whether the engine cuts the tensors of a batch to the length itself, for models that do not take the argument "
        "curriculum_seqlen, and for pipelines.",
    )

    @model_validator(mode="after")
    def _rules(self) -> LegacyCurriculumConfig:
        if self.enabled:
            raise_together(list(self.schedule_problems()))
        return self


class CurriculumMetricConfig(CurriculumSchedule):
    """One metric of a curriculum: where the analyzer's files are, and how its difficulty rises."""

    index_to_sample_path: Folder = key(None, "Path of <metric>_index_to_sample, without its ending.")
    index_to_metric_path: Folder = key(None, "Path of <metric>_index_to_metric, without its ending.")
    difficulty_type: Annotated[Literal["value", "percentile"], Lower] | None = key(
        None, "Whether a difficulty is a value of the metric, or a percentage of the samples in its order."
    )
    clustering_type: Annotated[Literal["schedule_based", "single_cluster"], Lower] = key(
        "schedule_based", "single_cluster leaves all samples in one; the metric then only has a schedule."
    )
    cut_batches: bool = key(
        False, "Whether the engine cuts the tensors of a batch to this difficulty, which is a sequence length."
    )

    def problems(self, path: str) -> Iterator[str]:
        """What is missing or contradicts itself."""
        yield from self.schedule_problems(path)
        if self.difficulty_type is None:
            yield f'{path}difficulty_type is missing; it must be "value" or "percentile"'
        if self.difficulty_type == "percentile" and (self.max_difficulty or 0) > 100:
            yield f"{path}max_difficulty is {self.max_difficulty}; a percentile is at most 100"
        if self.clustering_type == "single_cluster":
            return
        if self.index_to_sample_path is None:
            yield f"{path}index_to_sample_path is missing; deepspeed.data's analyzer writes the file"
        if self.index_to_metric_path is None and self.difficulty_type == "value":
            yield f'{path}index_to_metric_path is missing; difficulty_type "value" needs it'


class SampledCurriculumConfig(Section):
    """Samples chosen by difficulty."""

    enabled: bool = key(False, "Whether training_data is sampled by difficulty.")
    data_cluster_path: Folder = key(None, "Folder for the files of clusters; must be given where it is enabled.")
    curriculum_metrics: dict[str, CurriculumMetricConfig] = key({}, "Name of a metric → its difficulty.")

    @model_validator(mode="after")
    def _rules(self) -> SampledCurriculumConfig:
        if not self.enabled:
            return self
        problems = [text for name, each in self.curriculum_metrics.items() for text in each.problems(f"{name}: ")]
        if not self.curriculum_metrics:
            problems.append("curriculum_metrics is empty; name at least one metric")
        if self.data_cluster_path is None:
            problems.append("data_cluster_path is missing; give a folder that all ranks see")
        raise_together(problems)
        return self


class DynamicBatchingConfig(Section):
    """Batches of about equally many tokens instead of equally many samples."""

    enabled: bool = key(False, "Whether batches are packed by tokens.")
    max_tokens: PositiveCount | None = key(None, "Most tokens of a micro-batch; must be given where it is enabled.")
    metrics_path: Folder = key(None, "Folder of the analyzer's metric seqlen, unless the script gives lengths.")
    lr_scaling_method: Annotated[Literal["linear", "sqrt", "none"], Lower] = key(
        "linear", "How the learning rate follows the samples of a batch."
    )
    min_batch_size: PositiveCount = key(1, "Fewest samples of a micro-batch; smaller ones are dropped.")
    max_batch_size: PositiveCount | None = key(None, "Most samples of a micro-batch; null is no limit.")
    sequence_picking_order: Annotated[Literal["dataloader", "random", "seqlen"], Lower] = key(
        "dataloader", "Order in which samples are packed: as they are, shuffled, or by length."
    )
    verbose: bool = key(False, "Whether each batch is logged.")

    @model_validator(mode="after")
    def _rules(self) -> DynamicBatchingConfig:
        problems = []
        if self.enabled and self.max_tokens is None:
            problems.append("max_tokens is missing; give the most tokens of a micro-batch")
        if self.max_batch_size is not None and self.max_batch_size < self.min_batch_size:
            problems.append(f"min_batch_size ({self.min_batch_size}) exceeds max_batch_size ({self.max_batch_size})")
        raise_together(problems)
        return self


def _not_sampled(switch: str) -> NoEffect:
    why = "no technique of data_efficiency.data_sampling is on"
    return NoEffect(why, lambda schema: not schema.data_efficiency.sampling, unless=switch)


_NOT_SAMPLED = _not_sampled("data_efficiency.data_sampling.enabled")


class DataSamplingConfig(Section):
    """Which samples a batch has."""

    enabled: bool | None = key(None, "False turns off all techniques of data_sampling; null leaves it to their own.")
    num_epochs: PositiveCount = key(1000, "Epochs that a sampler by difficulty lasts.", _NOT_SAMPLED)
    num_workers: Count = key(0, "Worker processes of the data loader.", _NOT_SAMPLED)
    pin_memory: bool = key(False, "Whether batches of dynamic batching lie in pinned memory.", _NOT_SAMPLED)
    curriculum_learning: SampledCurriculumConfig = key(SampledCurriculumConfig, "Samples by difficulty.")
    dynamic_batching: DynamicBatchingConfig = key(DynamicBatchingConfig, "Batches by tokens.")


class TokenScheduleConfig(Section):
    """How fast the number of kept tokens rises."""

    require_steps: PositiveCount | None = key(None, "Steps until layers keep all tokens.")
    seq_per_step: PositiveCount | None = key(None, "The number of tokens is rounded down to a multiple of it.")


class RandomLTDScheduleConfig(Section):
    """How many tokens a layer keeps."""

    min_value: PositiveCount | None = key(None, "Tokens that layers keep at the start.")
    max_value: PositiveCount | None = key(None, "Tokens that they keep at the end: the length of a sequence.")
    schedule_type: Annotated[Literal["fixed_linear"], Lower] | None = key(None, "Curve from one to the other.")
    schedule_config: TokenScheduleConfig = key(TokenScheduleConfig, "Keys of the curve.")


class LayerTokenLRConfig(Section):
    """A learning rate by the tokens that layers have seen, in place of steps."""

    enabled: bool = key(False, "Whether the learning rate follows the layer tokens that were consumed.")
    total_layer_tokens: PositiveCount | None = key(
        None, "Layer tokens after which the learning rate is 0; it falls linearly after the warmup."
    )
    warmup_type: Annotated[Literal["linear", "log"], Lower] = key("linear", "Curve of the warmup.")
    warmup_layer_tokens: Count = key(0, "Layer tokens of the warmup.")

    @model_validator(mode="after")
    def _rules(self) -> LayerTokenLRConfig:
        total = self.total_layer_tokens
        if self.enabled and total is None:
            raise_together(["total_layer_tokens is missing; give the layer tokens of the whole training"])
        if total is not None and self.warmup_layer_tokens >= total:
            raise_together([f"warmup_layer_tokens ({self.warmup_layer_tokens}) is not below {total}, the total"])
        return self


class RandomLTDConfig(Section):
    """Random layer token drop: middle layers see a random part of the tokens."""

    enabled: bool = key(False, "Whether layers that convert_to_random_ltd made drop tokens.")
    total_layer_num: PositiveCount | None = key(None, "Layers of the model; must be given where it is enabled.")
    random_ltd_layer_num: PositiveCount | None = key(None, "Layers that drop tokens: the length of the next list.")
    random_ltd_layer_id: list[Count] = key([], "Numbers of these layers, as they stand in the names of modules.")
    model_mask_name: str | None = key("attention_mask", "Keyword of the attention mask in the layers' forward.")
    model_type: Annotated[Literal["encoder", "decoder"], Lower] | None = key(
        None, "encoder: masks are gathered by token. decoder: masks are causal, their leading corner is used."
    )
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] = key(
        "batch_seq_dim", "Order of the dims of hidden states."
    )
    random_ltd_schedule: RandomLTDScheduleConfig = key(RandomLTDScheduleConfig, "How many tokens are kept.")
    layer_token_lr_schedule: LayerTokenLRConfig = key(LayerTokenLRConfig, "A learning rate by layer tokens.")
    global_batch_size: Any = no_effect(None, "the engine knows its batch sizes")
    micro_batch_size: Any = no_effect(None, "the engine knows its batch sizes")

    @model_validator(mode="after")
    def _rules(self) -> RandomLTDConfig:
        if self.enabled:
            raise_together(list(self._problems()))
        return self

    def _problems(self) -> Iterator[str]:
        schedule, curve = self.random_ltd_schedule, self.random_ltd_schedule.schedule_config
        needed = {
            **{name: getattr(self, name) for name in ("total_layer_num", "random_ltd_layer_num", "model_type")},
            **{f"random_ltd_schedule.{name}": getattr(schedule, name) for name in type(schedule).model_fields},
            "random_ltd_schedule.schedule_config.require_steps": curve.require_steps,
            "random_ltd_schedule.schedule_config.seq_per_step": curve.seq_per_step,
        }
        yield from (f"{name} is missing" for name, value in needed.items() if value is None)
        count, listed = self.random_ltd_layer_num, self.random_ltd_layer_id
        if count is not None and (len(set(listed)) != count or len(listed) != count):
            yield f"random_ltd_layer_id is {listed}, expected {count} different layers (random_ltd_layer_num)"
        if count is not None and self.total_layer_num is not None and count > self.total_layer_num:
            yield f"random_ltd_layer_num ({count}) exceeds total_layer_num ({self.total_layer_num})"
        if self.total_layer_num is not None and listed and max(listed) >= self.total_layer_num:
            yield f"random_ltd_layer_id has {max(listed)}; numbers are below total_layer_num ({self.total_layer_num})"
        if schedule.min_value and schedule.max_value and schedule.min_value > schedule.max_value:
            yield f"random_ltd_schedule.min_value ({schedule.min_value}) exceeds max_value ({schedule.max_value})"
        if self.model_type == "encoder" and not self.model_mask_name:
            yield "model_mask_name is empty; an encoder's mask must be gathered with its tokens, name its keyword"


class DataRoutingConfig(Section):
    """Which tokens a layer sees."""

    enabled: bool | None = key(None, "False turns off all techniques of data_routing; null leaves it to their own.")
    random_ltd: RandomLTDConfig = key(RandomLTDConfig, "Random layer token drop.")


def _is_off(section: str) -> NoEffect:
    def off(schema: Any) -> bool:
        data = schema.data_efficiency
        return data.enabled is False or getattr(data, section).enabled is False

    why = f"data_efficiency.enabled or data_efficiency.{section}.enabled is false"
    return NoEffect(why, off, unless=f"data_efficiency.{section}.enabled")


class DataEfficiencyConfig(Section):
    """Fewer or better chosen samples and tokens."""

    enabled: bool | None = key(None, "False turns off all techniques of this section; null leaves it to their own.")
    seed: Count = key(1234, "Seed of the order of samples.", _not_sampled("data_efficiency.enabled"))
    data_sampling: DataSamplingConfig = key(DataSamplingConfig, "Which samples a batch has.", _is_off("data_sampling"))
    data_routing: DataRoutingConfig = key(DataRoutingConfig, "Which tokens a layer sees.", _is_off("data_routing"))

    @property
    def curriculum(self) -> SampledCurriculumConfig | None:
        """The curriculum, if its own and all outer switches are on."""
        on = self._samples and self.data_sampling.curriculum_learning.enabled
        return self.data_sampling.curriculum_learning if on else None

    @property
    def dynamic_batching(self) -> DynamicBatchingConfig | None:
        """Batches by tokens, if its own and all outer switches are on."""
        on = self._samples and self.data_sampling.dynamic_batching.enabled
        return self.data_sampling.dynamic_batching if on else None

    @property
    def random_ltd(self) -> RandomLTDConfig | None:
        """Random layer token drop, if its own and all outer switches are on."""
        on = self.enabled is not False and self.data_routing.enabled is not False
        return self.data_routing.random_ltd if on and self.data_routing.random_ltd.enabled else None

    @property
    def _samples(self) -> bool:
        return self.enabled is not False and self.data_sampling.enabled is not False

    @property
    def techniques(self) -> list[Section]:
        return [*self.sampling, *([self.random_ltd] if self.random_ltd is not None else [])]

    @property
    def sampling(self) -> list[Section]:
        """Those of data_sampling that are on."""
        return [each for each in (self.curriculum, self.dynamic_batching) if each is not None]


class ProgressiveLayerDropConfig(Section):
    """Layers skipped at random, more of them as training goes on."""

    enabled: bool = key(False, "Whether the engine hands theta to the forward, or drops blocks itself.")
    theta: Annotated[Number, Gt(0), Le(1)] = key(0.5, "Share of the layers that are kept in the long run.")
    gamma: Annotated[Number, Ge(0)] = key(0.001, "How fast theta falls: (1 - theta) exp(-gamma step) + theta.")
    drop_blocks: bool = key(
        False,
        "Whether the engine drops blocks of an unmodified model itself, deeper ones more often, in place of the "
        "arguments progressive_layer_drop and pld_theta of its forward.",
    )
    blocks: Names = key(
        [],
        "Module paths of the lists of these blocks; empty finds them.",
        NoEffect("progressive_layer_drop.drop_blocks is false", lambda c: not c.progressive_layer_drop.drop_blocks),
    )
    seed: Count = key(
        1234,
        "Seed of the choice of blocks.",
        NoEffect("progressive_layer_drop.drop_blocks is false", lambda c: not c.progressive_layer_drop.drop_blocks),
    )
