"""Every key of the config works, is refused, or is told to have no effect; none is silent.

A key works if something outside `deepspeed/config` reads it while engines are built, trained, saved and loaded, which
is recorded here. That a key is refused or told is found out by setting it, with the switches of the sections around it
on. A few keys are for the loader itself; of those it is shown that a valid value is refused beside others.

A key that only some engines read (those of a pipeline, of a section that is on) is set alone as well, for a plain
model: there, too, it is read, refused or told.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections import Counter
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args, get_origin
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch.testing._internal.distributed.fake_pg import FakeStore

import deepspeed
from deepspeed.compression.compress import init_compression
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.features import IDLE, keys_without_effect, unbuilt, unused_by_model
from deepspeed.config.model import ConfigModel, Key, Model, NoEffect, keys_of, members_of
from deepspeed.config.schema import Schema
from deepspeed.data.analyzer import DataAnalyzer
from deepspeed.data.dynamic_batching import get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed
from deepspeed.data.random_ltd import convert_to_random_ltd
from deepspeed.errors import CheckpointError, DeepSpeedConfigError
from deepspeed.log import logger
from deepspeed.pipe import PipelineModule
from tests.clients import tiny
from tests.distributed.moe.models import StackedModel
from tests.harness import ranks
from tests.models import Tiny, batches
from tests.unit.data.oracle import Lengths, analyse

# What hands values on to users without acting on them.
MERE_ANSWERS = ("deepspeed.config", "deepspeed.runtime.getters", "deepspeed.published.finder")
PLANS_BATCHES = "deepspeed.config.elasticity"
FOR_THE_LOADER = {
    *("strict", "train_batch_size", "train_micro_batch_size_per_gpu"),
    *("data_types.param_dtype", "zero_optimization.legacy_stage1", "tensor_parallel.tp.tp_size"),
}
FOR_A_CALL = {"compile.deepcompile", "compile.region"}  # of engine.compile(), which a script may call at any time
PLAIN = unused_by_model(staged=False, experts=False, shared_sequences=False)
BATCH = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}


class Leaf(NamedTuple):
    """A key that is no section: how to get there, and the model that has it."""

    chain: tuple[Key, ...]
    owner: Model

    @property
    def path(self) -> str:
        """As a config's own values are named, the one in a container is called x or has the number 0."""
        text = ""
        for key in self.chain[:-1]:
            text += key.json + {"one": ".", "dict": ".x.", "list": "[0]."}[key.container]
        return text + self.chain[-1].json


def leaves(model=Schema, chain=()):
    for name in model.model_fields:
        key = keys_of(model)[name]
        if key.section is None:
            yield Leaf((*chain, key), model)
        else:
            yield from leaves(key.section, (*chain, key))


def sample(leaf):
    """A value that is valid for the key by itself, and not its default."""
    info = leaf.chain[-1].info
    default = info.get_default(call_default_factory=True)
    choices = [7, 1 << 20, 0.5, 0.1, "x", "2x2", "info", Path("x"), ["x"], [7], [7, 7], {"x": 7}, (7,), [], True, False]
    choices.append({"x": "x"})
    for member in members_of(info.annotation):
        if get_origin(member) is Literal:
            choices += get_args(member)
        elif isinstance(member, type) and issubclass(member, Enum):
            choices += member
    adapter = TypeAdapter(Annotated[(info.annotation, None, *info.metadata)])
    for choice in choices:
        with contextlib.suppress(ValidationError):
            if adapter.validate_python(choice) == choice != default:
                return choice
    raise AssertionError(f"{leaf.path}: no value but its default is known; add one to `sample`")


def switched_on(section):
    """The section with the switches that its own keys depend upon."""
    on = {"enabled": True, "device": "cpu", "autotp_size": 2}
    values = {name: value for name, value in on.items() if name in type(section).model_fields}
    if "shared_parameters" in type(section).model_fields:
        values["shared_parameters"] = switched_on(section.shared_parameters)
    return section.model_copy(update=values)


def with_value(model, chain, value):
    """A copy of a model in which the key at the end of the chain has the value; nothing is validated."""
    key, *rest = chain
    if rest:
        inner = getattr(model, key.name)
        if not isinstance(inner, ConfigModel):
            needed = {name: 1 for name, info in key.section.model_fields.items() if info.is_required()}
            inner = key.section.model_construct(**needed)
        made = with_value(switched_on(inner), rest, value)
        value = {"one": made, "dict": {"x": made}, "list": [made]}[key.container]
    return model.model_copy(update={key.name: value})


class Everything:
    """As if every key had been given."""

    def __contains__(self, path):
        return True


def has_a_word(leaf):
    """Whether the key is refused or told once it and what it depends on are set."""
    schema = with_value(Schema(), leaf.chain, sample(leaf))
    refused = any(leaf.path == found.path or leaf.path.startswith(f"{found.path}.") for found in unbuilt(schema))
    return refused or any(leaf.path in note.path.split(", ") for note in keys_without_effect(schema, Everything()))


def nested(leaf):
    """The key with a value, as it stands in a config that has no other."""
    value = sample(leaf)
    for key in reversed(leaf.chain):
        value = {key.json: {"one": value, "dict": {"x": value}, "list": [value]}[key.container]}
    return value


def is_checked(leaf):
    """Whether a valid value of the key is refused together with other keys."""
    try:
        DeepSpeedConfig({**BATCH, "somebody's key": 1, **nested(leaf)}, world_size=1)
    except DeepSpeedConfigError as error:
        return leaf.chain[-1].json in str(error)
    return False


def has_a_word_alone(leaf):
    """Whether the key is refused or told where nothing else is set, and the model is a plain one."""
    try:
        config = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 2, **nested(leaf)}, world_size=2)
    except DeepSpeedConfigError:
        return True
    told = {
        path
        for note in keys_without_effect(config.schema, config.loaded.given, (*IDLE, *PLAIN))
        for path in note.path.split(", ")
    }
    return leaf.path in told or any(path.startswith(f"{leaf.path}.") for path in told)


def record():
    """The (model, field) pairs that are read from now on by code that acts on them."""
    seen = set()

    def read(self, name):
        if name in type(self).model_fields:
            reader = sys._getframe(1).f_globals["__name__"]
            acts = reader == PLANS_BATCHES or not reader.startswith(MERE_ANSWERS)
            if reader.startswith("deepspeed") and acts:
                seen.add((type(self), name))
        return object.__getattribute__(self, name)

    ConfigModel.__getattribute__ = read
    return seen


def run(sections, folder, **arguments):
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, **sections}
    sharded = config.get("zero_optimization", {}).get("stage") == 3
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=sharded):
        model = Tiny()
    engine = deepspeed.initialize(model=model, config=config, training_data=torch.arange(4), **arguments)[0]
    engine.backward(engine(*batches(1, 2)[0]))
    engine.step()
    engine.save_16bit_model(folder)
    engine.save_checkpoint(folder)
    try:
        engine.load_checkpoint(folder)
    except CheckpointError:  # the files of ranks that do not exist
        assert engine.zero_optimization_stage()
    engine.destroy()


WATCHED = {
    **{name: {"enabled": True} for name in ("tensorboard", "csv_monitor", "wandb", "comet", "comms_logger")},
    "steps_per_print": 1,
}
ELASTIC = {
    "enabled": True,
    "max_train_batch_size": 8,
    "micro_batch_sizes": [2],
    "ignore_non_elastic_batch_info": True,
}
KEPT = {
    "partition_activations": True,
    "cpu_checkpointing": True,
    "contiguous_memory_optimization": True,
    "number_checkpoints": 2,
    "synchronize_checkpoint_boundary": True,
    "profile": True,
}


def among(seen):
    """The keys that stand for (model, field) pairs."""
    return {leaf.path for leaf in leaves() if (leaf.owner, leaf.chain[-1].name) in seen}


def plain_readers(seen, folder):
    """Build, train, save and load engines of plain models; returns the keys that were read."""
    for stage in range(4):
        run({"zero_optimization": {"stage": stage, "reduce_bucket_size": 100}, "bf16": {"enabled": True}}, folder)
    return among(seen)


def silent_alone(read, seen, folder):
    """The keys that a plain engine does not read, without a word, where they are all that is set."""
    silent = []
    for leaf in leaves():
        if leaf.path in read | FOR_THE_LOADER | FOR_A_CALL or has_a_word_alone(leaf):
            continue
        seen.clear()
        with contextlib.suppress(DeepSpeedConfigError):
            run(nested(leaf), folder)
            silent += [] if leaf.path in among(seen) else [leaf.path]
    return silent


class Paced(torch.nn.Sequential):
    """Takes what the engine tells a model of the step."""

    def forward(self, inputs, progressive_layer_drop=False, pld_theta=1.0, curriculum_seqlen=None):
        return super().forward(inputs).sum()


def curriculum(kind):
    curves = {
        "fixed_root": {"total_curriculum_step": 2, "difficulty_step": 2, "root_degree": 2},
        "fixed_discrete": {"difficulty": [30, 60], "max_step": [1]},
    }
    ends = {"min_difficulty": 30, "max_difficulty": 60, "cut_batches": True}
    return {"schedule_type": kind, "schedule_config": curves[kind], **ends}


def paced_readers(folder):
    """Build engines of which something changes with the step."""
    kept = {"min_value": 2, "max_value": 4, "schedule_type": "fixed_linear"}
    kept["schedule_config"] = {"require_steps": 2, "seq_per_step": 2}
    routing = {"enabled": True, "total_layer_num": 3, "random_ltd_layer_num": 1, "random_ltd_layer_id": [1]}
    routing |= {"model_mask_name": "mask", "model_type": "decoder", "hidden_state_order": "batch_seq_dim"}
    routing |= {"random_ltd_schedule": kept, "layer_token_lr_schedule": {"enabled": True, "total_layer_tokens": 99}}
    metrics = folder / "metrics"
    analyse(DataAnalyzer, metrics)
    files = {f"index_to_{what}_path": str(metrics / f"seqlen/seqlen_index_to_{what}") for what in ("sample", "metric")}
    metric = files | {"difficulty_type": "value", **curriculum("fixed_root")}
    metrics_of = {"x": metric, "y": metric | curriculum("fixed_discrete")}
    by_value = {"enabled": True, "data_cluster_path": str(folder / "clusters"), "curriculum_metrics": metrics_of}
    packed = {"enabled": True, "max_tokens": 600, "metrics_path": str(metrics)}
    for sections in (
        {"curriculum_learning": {"enabled": True, **curriculum("fixed_root")}},
        {"curriculum_learning": {"enabled": True, **curriculum("fixed_discrete"), "cut_batches": False}},
        {"progressive_layer_drop": {"enabled": True}},
        {"data_efficiency": {"data_routing": {"random_ltd": routing}}},
        {"data_efficiency": {"data_sampling": {"curriculum_learning": by_value}}},
        {"data_efficiency": {"data_sampling": {"dynamic_batching": packed}}},
    ):
        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, **sections}
        model = convert_to_random_ltd(Paced(*(torch.nn.Linear(4, 4) for _ in range(3))), torch.nn.Linear)
        engine = deepspeed.initialize(model=model, config=config, training_data=Lengths())[0]
        if "dynamic_batching" in str(sections):
            get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(Lengths(), engine)
        engine(torch.zeros(2, 4, 4))
        engine.destroy()


def compressed_readers(folder):
    """Build engines that compress, and a student."""

    def on(modules, params, **shared):
        groups = {"x": {"params": params, "modules": modules, "related_modules": [[]]}}
        return {"shared_parameters": {"enabled": True, "schedule_offset": 0, **shared}, "different_groups": groups}

    half = {"dense_ratio": 0.5}
    techniques = {
        "weight_quantization": on(["up"], {"start_bits": 8, "target_bits": 7}, fp16_mixed_quantize={"enabled": True}),
        "activation_quantization": on(["up"], {"bits": 8}),
        **{name: on(["up"], half) for name in ("sparse_pruning", "row_pruning")},
        "head_pruning": on(["up"], half, num_heads=2),
        "channel_pruning": on(["c"], half),
        "layer_reduction": {"enabled": True, "module_name_prefix": "row", "teacher_layer": [0], "keep_number_layer": 1},
    }
    config = {"train_micro_batch_size_per_gpu": 2, "compression_training": techniques}

    def model():
        row = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
        return torch.nn.ModuleDict({"up": torch.nn.Linear(4, 4), "row": row, "c": torch.nn.Conv2d(2, 2, 1)})

    init_compression(model(), config, model())
    shared = {"enabled": True, "method": "snip_momentum", "block_pattern": "2x1", "dense_ratio": 0.5}
    init_compression(model(), {**config, "compression_training": {"sparse_pruning": {"shared_parameters": shared}}})
    moq = {"enabled": True, "fp16_mixed_quantize": {"enabled": True}, "quantize_bits": {"target_bits": 15}}
    run({"quantize_training": moq | {"quantize_schedule": {"quantize_period": 1}}}, folder)
    blocks = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    curved = {"quantize_training": moq, "eigenvalue": {"enabled": True, "layer_name": "0"}}
    deepspeed.initialize(model=blocks, config={"train_batch_size": 4, **curved})[0].destroy()


def coded_readers():
    """Build models whose frozen weights rest as codes."""
    coded = {"num_bits": 8, "group_size": 2}
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    config = {"train_batch_size": 4, "weight_quantization": {"post_init_quant": {"0": coded}}}
    deepspeed.initialize(model=layers, config=config)[0].destroy()
    born = {"zero_optimization": {"stage": 3}, "weight_quantization": {"quantized_initialization": coded}}
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 4, **born}):
        torch.nn.Linear(4, 4)


def read_elsewhere():
    """Keys of a program that starts scripts, by its source; and those that an attention pattern is made of."""
    root = Path(deepspeed.__file__).parent
    files = [*(root / "autotuning").glob("*.py"), root / "profiling/autotuning.py", *(root / "launcher").glob("*.py")]
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    tuned = [leaf.path for leaf in leaves() if leaf.path.startswith("autotuning.")]
    found = {path for path in tuned if re.search(rf"\.{path.rpartition('.')[2]}\b", source)}
    for mode in ("dense", "fixed", "variable", "bigbird", "bslongformer"):
        section = DeepSpeedConfig({"train_batch_size": 2, "sparse_attention": {"mode": mode}}).sparse_attention
        found |= {f"sparse_attention.{name}" for name in section}
    return found


def readers(seen, folder):
    """Build, train, save and load engines of every other kind; returns the keys that were read."""
    paced_readers(folder)
    compressed_readers(folder)
    coded_readers()
    config = {"train_micro_batch_size_per_gpu": 2, "hybrid_engine": {"enabled": True, "max_out_tokens": 32}}
    engine = deepspeed.initialize(model=tiny.llama(), config={**config, "optimizer": {"type": "AdamW"}})[0]
    engine.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2)
    engine.destroy()
    loco = {"stage": 2, "zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.5, "reset_T": 4}}
    run({"zero_optimization": loco}, folder)
    run({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": True}}}, folder)
    disk = {"device": "nvme", "nvme_path": str(folder / "swap")}
    run({"zero_optimization": {"stage": 3, "offload_optimizer": disk, "offload_param": disk}}, folder)
    flow = {"stage": 1, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}, "zenflow": {"offload": True}}
    run({"zero_optimization": flow}, folder)
    flow["zenflow"] = {"select_strategy": "step", "select_interval": 4, "update_interval": 2}
    run({"zero_optimization": flow}, folder)
    budgets = {"device": 100, "host": "1GB", "disk": "1GB", "path": str(folder / "swap")}
    run({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, "memory": budgets}, folder)
    run({"hangs": {"patience": 2.5}, "verify": {"every": 1, "replay": str(folder / "steps")}}, folder)
    for stage in (0, 3):
        early = {"enabled": True, "clip_by_last_norm": True}
        run({"optimizer_in_backward": early, "zero_optimization": {"stage": stage}}, folder)
    run({"flops_profiler": {"enabled": True, "profile_step": 0, "output_file": str(folder / "profile.txt")}}, folder)
    run({"memory_profiler": {"enabled": True, "profile_step": 0, "output_file": str(folder / "peak.txt")}}, folder)
    run({"events": {"file": str(folder / "events")}, "trace": {"steps": [0, 0], "folder": str(folder / "t")}}, folder)
    for version in (0.1, 0.2):
        run({"elasticity": {**ELASTIC, "version": version}}, folder)
    run(WATCHED, folder)
    run({"fp16": {"enabled": True, "loss_scale": 8}, "scheduler": {"type": "WarmupLR"}}, folder)
    run({"fp16": {"enabled": True}, "checkpoint": {"writer": {}}}, folder)
    run({"torch_autocast": {"enabled": True}, "activation_checkpointing": KEPT}, folder)
    run({}, folder, mesh_param=(1, 2))
    spread = {"train_batch_size": 4, "expert_parallel": {"enabled": True, "autoep_size": 2}}
    deepspeed.initialize(model=StackedModel(), config=spread)[0].destroy()
    kinds = {"0": {"shape": [2, -1]}, "1": {"partition_type": "row"}, "2": {"partition_type": "skip"}}
    specs = [{"patterns": [rf"{name}\."], **spec} for name, spec in kinds.items()]
    split = {"autotp_size": 2, "dtype": "fp32", "preset_model": "llama", "partition_config": {"layer_specs": specs}}
    layers = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in kinds))
    deepspeed.tp_model_init(layers, 2, torch.float32)
    deepspeed.initialize(model=layers, config={"train_batch_size": 4, "tensor_parallel": split})[0].destroy()
    blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(16, 16)) for _ in range(2))
    fast = {"train_batch_size": 4, "fused_kernels": {"enabled": True}, "fp8": {"enabled": True}}
    deepspeed.initialize(model=torch.nn.Sequential(*blocks), config=fast)[0].destroy()
    engine = deepspeed.initialize(model=torch.nn.Sequential(*blocks), config={"train_batch_size": 4})[0]
    engine.compile(backend="eager")
    engine.destroy()
    row = PipelineModule([torch.nn.Linear(2, 2)], num_stages=1)
    deepspeed.initialize(model=row, config={"train_batch_size": 4, "pipeline": {"schedule": "gpipe"}})[0].destroy()
    return among(seen)


@ranks(1, init=False)
def test_no_key_is_silent(tmp_path):
    os.chdir(tmp_path)
    told = {leaf.path for leaf in leaves() if has_a_word(leaf)}
    checked = {leaf.path for leaf in leaves() if leaf.path in FOR_THE_LOADER and is_checked(leaf)}
    with pytest.raises(DeepSpeedConfigError, match=r"elasticity\.ignore_non_elastic_batch_info to true"):
        DeepSpeedConfig({**BATCH, "elasticity": {**ELASTIC, "ignore_non_elastic_batch_info": False}}, world_size=1)
    checked |= {"elasticity.enabled", "elasticity.ignore_non_elastic_batch_info"}
    born = {"zero_optimization": {"stage": 3}, "weight_quantization": {"quantized_initialization": {"group_dim": 0}}}
    with pytest.raises(DeepSpeedConfigError, match=r"quantized_initialization\.group_dim: shards are cut along rows"):
        DeepSpeedConfig({**BATCH, **born})
    checked |= {"weight_quantization.quantized_initialization.group_dim"}
    data = "data_efficiency.data_"  # a section that is off is None to its readers; one key has a single value
    checked |= {f"{data}sampling.{name}.enabled" for name in ("curriculum_learning", "dynamic_batching")}
    checked |= {f"{data}routing.random_ltd.{name}" for name in ("enabled", "random_ltd_schedule.schedule_type")}
    importlib.import_module("accelerate")  # which looks for wandb then
    sys.modules.update({"wandb": MagicMock(), "comet_ml": MagicMock()})
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    seen = record()
    plain = plain_readers(seen, tmp_path)
    read = plain | readers(seen, tmp_path) | read_elsewhere()
    silent = [leaf.path for leaf in leaves() if leaf.path not in told | checked | read]
    assert silent == [], "each of these needs a reader, or a mark (NotBuilt, NoEffect)"
    assert FOR_THE_LOADER.isdisjoint(read | told), "a key that has a reader needs no exception"
    always = [row for row in IDLE if row.when is NoEffect.when]
    contradicted = [path for path in read for row in always if row.covers(path)]
    assert contradicted == [], "these are said to have no effect, and yet they are read"
    assert silent_alone(plain, seen, tmp_path) == [], "a plain model has no use for these, and that is not told"


def test_a_model_that_is_read_stands_in_one_place():
    """Or a read could be of another key than it seems."""
    places = Counter((leaf.owner, leaf.chain[-1].name) for leaf in leaves() if not has_a_word(leaf))
    assert [where for where, count in places.items() if count > 1] == []


@ranks(1)
def test_what_has_no_effect_is_told_once():
    said = []
    logger.warning = logger.log = lambda *args: said.append(str(args[-1]))
    for _ in range(2):
        config = {"train_batch_size": 2, "pipeline": {"stages": 4}, "scheduler": {"type": "WarmupLR"}}
        config["use_data_before_expert_parallelism"] = True
        deepspeed.initialize(model=Tiny(), config=config)[0].destroy()
    notes = [line for line in said if "no effect" in line]
    assert sum("pipeline.stages: no effect: PipelineModule decides" in line for line in notes) == 1
    assert any("scheduler: no effect, since there is no optimizer" in line for line in notes)
    assert sum("pipeline.stages: no effect: the model is not a PipelineModule" in line for line in notes) == 1
    assert sum("use_data_before_expert_parallelism: no effect: the model has no experts" in line for line in notes) == 1
    strict = {"train_batch_size": 2, "pipeline": {"activation_checkpoint_interval": 2}, "strict": True}
    with pytest.raises(
        DeepSpeedConfigError, match=r"pipeline\.activation_checkpoint_interval: no effect: .* PipelineM"
    ):
        deepspeed.initialize(model=Tiny(), config=strict)
    row = PipelineModule([torch.nn.Linear(2, 2)], num_stages=1)
    deepspeed.initialize(model=row, config=strict)[0].destroy()
    assert row.activation_checkpoint_interval == 2
