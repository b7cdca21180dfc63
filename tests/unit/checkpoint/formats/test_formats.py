"""What is written by any topology in any format is read back whole, and by any other."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepspeed.checkpoint.formats.adapters import state_of
from deepspeed.checkpoint.formats.detect import open_checkpoint
from deepspeed.checkpoint.formats.universal.convert import convert
from deepspeed.errors import CheckpointError, UsageError
from tests.checkpoint_states import SMALL, WRITERS, Whole

STAGES = [(stage, world) for stage in range(4) for world in (1, 2, 3)]


@pytest.mark.parametrize("form", ["deepspeed", "native"])
@pytest.mark.parametrize(("stage", "world"), STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_round_trip(tmp_path, form, stage, world, precision):
    whole = Whole(SMALL.shapes, precision=precision)
    source = open_checkpoint(whole.save(tmp_path / "tag", stage, world, form))
    whole.check(source)
    assert (source.stage, source.world) == (stage, world)
    small = source.small
    assert (small.counters.global_steps, small.counters.micro_steps) == (5, 10)
    assert small.client_state == {"epoch": 2, "global_steps": 99, "best": (1.0, "x")}
    assert small.lr_scheduler == {"last_batch_iteration": 4}
    assert (small.loss_scale or {}).get("cur_scale") == (512.0 if precision == "fp16" else None)
    assert source.rank_state(world - 1)["rng"]["cpu"].tolist() == [world - 1, world, world + 1]
    assert source.rank_state(world - 1)["data"] == {"samples": 12 * (world - 1)}


@pytest.mark.parametrize("form", ["deepspeed", "native"])
@pytest.mark.parametrize("stage", range(4))
def test_parameters_that_were_never_used_stay_without_state(tmp_path, form, stage):
    whole = Whole(SMALL.shapes, untouched=("b.weight", "b.bias"), steps=(("c.weight", 3),))
    whole.check(open_checkpoint(whole.save(tmp_path / "tag", stage, 2, form)))


@pytest.mark.parametrize("flat", [True, False])
def test_stage_0_in_16_bit_has_both_of_deepspeeds_shapes(tmp_path, flat):
    whole = Whole(SMALL.shapes, precision="bf16", steps=(("c.weight", 3),))
    whole.check(open_checkpoint(whole.save(tmp_path / "tag", 0, 2, flat_masters=flat)))


def test_every_file_loads_without_any_allow_list(tmp_path):
    for stage, precision in itertools.product(range(4), ("fp32", "fp16")):
        path = Whole(SMALL.shapes, precision=precision).save(tmp_path / f"{stage}{precision}", stage, 2)
        native = Whole(SMALL.shapes, precision=precision).save(tmp_path / f"n{stage}{precision}", stage, 2, "native")
        for file in (*path.glob("*.pt"), *native.glob("*.pt")):
            torch.load(file, weights_only=True)


@pytest.mark.parametrize(("form", "other"), list(itertools.product(["deepspeed", "native"], repeat=2)))
def test_any_topology_becomes_any_other(tmp_path, form, other):
    for number, ((stage, world), (new_stage, new_world)) in enumerate(
        zip(STAGES, STAGES[5:] + STAGES[:5], strict=True)
    ):
        source = open_checkpoint(SMALL.save(tmp_path / f"{number}", stage, world, form))
        for rank in range(new_world):
            state = state_of(source, stage=new_stage, rank=rank, world=new_world)
            WRITERS[other](state).write(tmp_path / f"{number}_new")
        SMALL.check(open_checkpoint(tmp_path / f"{number}_new"))


@pytest.mark.parametrize("form", ["deepspeed", "native"])
@pytest.mark.parametrize("stage", range(4))
def test_universal_from_everything(tmp_path, form, stage):
    done = []
    path = SMALL.save(tmp_path / "tag", stage, 3, form)
    convert(path, tmp_path / "uni", progress=lambda now, total: done.append((now, total)))
    source = open_checkpoint(tmp_path / "uni")
    SMALL.check(source)
    assert (tmp_path / "latest_universal").read_text() == "uni"
    assert done[-1] == (9, 9)
    assert source.small.client_state["epoch"] == 2
    for file in (tmp_path / "uni").rglob("*.pt"):
        torch.load(file, weights_only=True)
    whole = torch.load(tmp_path / "uni" / "zero" / "a.weight" / "fp32.pt")
    assert whole["param"].shape == (7, 5)
    assert (tmp_path / "uni" / "zero" / "tied.weight" / "fp32.pt").exists()


shape = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)
groups = st.lists(st.lists(shape, min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(groups, st.sampled_from(range(4)), st.integers(1, 6), st.integers(1, 60), st.data())
def test_any_shapes_and_any_interval(tmp_path_factory, sizes, stage, world, sub_group_size, data):
    shapes = [{f"p{g}.{i}": size for i, size in enumerate(group)} for g, group in enumerate(sizes)]
    whole = Whole(shapes, precision="fp32")
    form = data.draw(st.sampled_from(["deepspeed", "native"]))
    path = whole.save(tmp_path_factory.mktemp("any") / "tag", stage, world, form, sub_group_size=sub_group_size)
    source = open_checkpoint(path)
    whole.check(source)
    name = data.draw(st.sampled_from([name for group in shapes for name in group]))
    numel = source.shapes[name].numel()
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    assert torch.equal(source.read(name, "exp_avg", start, stop), whole.tensor(name, "exp_avg")[start:stop])


def test_the_client_cannot_replace_an_entry(tmp_path):
    path = SMALL.save(tmp_path / "tag", 2, 2)
    entries = torch.load(path / "mp_rank_00_model_states.pt", weights_only=True)
    assert (entries["global_steps"], entries["epoch"]) == (5, 2)
    assert open_checkpoint(path).small.client_state["global_steps"] == 99


def test_an_object_in_the_client_state_is_refused_when_saving():
    class Thing:
        pass

    state = SMALL.state(2, 0, 1)
    bad = type(state)(**{**{f: getattr(state, f) for f in state.__slots__}, "client_state": {"a": [1, Thing()]}})
    with pytest.raises(UsageError, match=r"client_state\['a'\]\[1\] is a .*Thing"):
        WRITERS["deepspeed"](bad)


def test_damage_to_fragments_is_named(tmp_path):
    path = SMALL.save(tmp_path / "tag", 3, 2, "native")
    file = path / "fragments_00001_00.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-10])
    with pytest.raises(CheckpointError, match=r"fragments_00001_00.safetensors: .* cut off"):
        open_checkpoint(path).read("a.weight", "master")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"fragments_00001_00.safetensors is missing"):
        open_checkpoint(path).read("a.weight", "master")
    with pytest.raises(CheckpointError, match="no parameter 'z'"):
        open_checkpoint(path).read("z", "master")
    with pytest.raises(CheckpointError, match=r"a.weight has no 'momentum'"):
        open_checkpoint(path).read("a.weight", "momentum")


def test_a_snapshot_shares_nothing_with_training(tmp_path):
    taken = []

    def allocate(numel, dtype):
        taken.append(torch.empty(numel, dtype=dtype))
        return taken[-1]

    for form in ("deepspeed", "native"):
        state = SMALL.state(2, 0, 1)
        files = WRITERS[form](state, allocate=allocate)
        for group in state.groups:
            for column in group.tensors.values():
                for tensor in column:
                    tensor.fill_(0)
        for tensor in state.module.values():
            tensor.fill_(0)
        files.write(tmp_path / form)
        SMALL.check(open_checkpoint(tmp_path / form))
    assert taken


def test_views_of_one_flat_tensor_are_written_without_a_copy():
    state = SMALL.state(1, 0, 1)
    group = state.groups[0]
    flat = torch.cat([*group.tensors["master"], torch.zeros(1)])
    at, views = 0, []
    for shape in group.shapes:
        views.append(flat[at : at + shape.numel()])
        at += shape.numel()
    group.tensors["master"][:] = views
    files = WRITERS["deepspeed"](state)
    optimizer = files.objects["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"]["optimizer_state_dict"]
    assert optimizer["single_partition_of_fp32_groups"][0].data_ptr() == flat.data_ptr()
