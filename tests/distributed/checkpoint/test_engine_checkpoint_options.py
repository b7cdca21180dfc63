"""What the arguments and the config say about saving and loading; crashes, absent ranks, background saves."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed import comm
from deepspeed.checkpoint.formats.bulk_read import BulkRead
from deepspeed.checkpoint.formats.universal.convert import convert
from deepspeed.checkpoint.storage import manifest, rank_meeting
from deepspeed.errors import CheckpointError, UsageError
from deepspeed.log import logger
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.distributed.checkpoint.test_engine_checkpoints import (
    STAGES,
    Mixed,
    assert_equal,
    build,
    everything,
    train,
)
from tests.harness import ranks, shared_ranks
from tests.models import make


def params_of(engine):
    return {name: value.clone() for name, value in engine.module_state_dict().items() if torch.is_tensor(value)}


def moved(stage, folder, precision="bf16", **options):
    """An engine after three steps that has saved, and what it held then."""
    engine = build(stage, precision, **options)
    train(engine, 0, 3)
    engine.save_checkpoint(folder)
    held = everything(engine)
    engine.destroy()
    return held


def weights_only(stage, folder, held):
    engine = build(stage, "bf16", make(Mixed, seed=3))
    train(engine, 0, 1)
    before = everything(engine)
    _, client = engine.load_checkpoint(folder, load_module_only=True)
    now = everything(engine)
    assert client["lr_scheduler"] == {"last_batch_iteration": 2}
    for name in engine.module.state_dict():
        if name != "_extra_state":
            assert torch.equal(now[name], held[name]), name
    for name in ("counters", "lr", "exp_avg:up.weight", "step:up.weight"):
        assert torch.equal(torch.as_tensor(now[name]), torch.as_tensor(before[name])), name
    master = now["master:up.weight"]
    rounded = held["up.weight"].float()  # what stage 3 stores are the masters themselves
    assert torch.equal(master, held["master:up.weight"] if stage == 3 else rounded)


def without_optimizer_or_schedule(stage, folder, held):
    engine = build(stage, "bf16", make(Mixed, seed=3))
    engine.load_checkpoint(folder, load_optimizer_states=False, load_lr_scheduler_states=False)
    now = everything(engine)
    assert torch.equal(now["up.weight"], held["up.weight"])
    assert now["step:up.weight"] is None
    assert engine.global_steps == 3
    assert engine.lr_scheduler.last_batch_iteration == -1
    engine.load_checkpoint(folder)
    assert engine.lr_scheduler.last_batch_iteration == 2
    assert_equal(everything(engine), held)


def masters_from_the_narrow_weights(stage, folder, held):
    engine = build(stage, "bf16", make(Mixed, seed=3), zero={"load_from_fp32_weights": False})
    engine.load_checkpoint(folder)
    master = safe_get_full_fp32_param(engine.module.up.weight)
    narrow = held["up.weight"].float()
    assert torch.equal(master, held["master:up.weight"] if stage == 3 else narrow)
    assert torch.equal(everything(engine)["exp_avg:up.weight"], held["exp_avg:up.weight"])


def the_users_own_function(stage, folder, held):
    engine = build(stage, "bf16", make(Mixed, seed=3))
    seen = []

    def halve(src, dst):
        seen.append(sorted(src))
        dst.load_state_dict({name: value / 2 if name == "up.weight" else value for name, value in src.items()})

    engine.load_checkpoint(folder, custom_load_fn=halve)
    now = everything(engine)
    assert "head.weight" in seen[0]
    assert torch.equal(now["up.weight"], held["up.weight"] / 2)
    assert torch.equal(now["master:up.weight"].bfloat16(), held["up.weight"] / 2)
    assert torch.equal(now["down.weight"], held["down.weight"])
    assert torch.equal(now["exp_avg:up.weight"], held["exp_avg:up.weight"])


@pytest.mark.parametrize("stage", STAGES)
@shared_ranks(2)
def test_what_a_load_is_told_to_take(stage, tmp_path):
    """Of one checkpoint, each into an engine of its own."""
    held = moved(stage, tmp_path)
    for load in (weights_only, without_optimizer_or_schedule, masters_from_the_narrow_weights, the_users_own_function):
        load(stage, tmp_path, held)


class Grown(Mixed):
    def __init__(self):
        super().__init__()
        self.added = nn.Linear(8, 2)


@pytest.mark.parametrize("stage", STAGES)
@shared_ranks(2)
def test_strictness(stage, tmp_path):
    held = moved(stage, tmp_path)
    engine = build(stage, "bf16", make(Grown, seed=3))
    before = params_of(engine)
    with pytest.raises(CheckpointError, match=r"not in the checkpoint: added.weight, added.bias.*load_module_strict"):
        engine.load_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path, load_module_strict=False)
    now = params_of(engine)
    assert torch.equal(now["added.weight"], before["added.weight"])
    assert torch.equal(now["up.weight"], held["up.weight"])
    train(engine, 0, 1)

    other = build(stage, "bf16", make(Mixed, seed=3))
    other.save_checkpoint(tmp_path / "other")
    engine.save_checkpoint(tmp_path / "grown")
    with pytest.raises(CheckpointError, match=r"not in the model: added\.bias, added\.weight"):
        other.load_checkpoint(tmp_path / "grown")


@pytest.mark.parametrize("stage", STAGES)
@shared_ranks(2)
def test_frozen_parameters_left_out(stage, tmp_path):
    engine = build(stage, "bf16")
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    held = everything(engine)
    engine.destroy()
    engine = build(stage, "bf16", make(Mixed, seed=3))
    before = params_of(engine)
    with pytest.raises(CheckpointError, match=r"not in the checkpoint: extra.weight, extra.bias"):
        engine.load_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path, load_module_strict=False)
    now = everything(engine)
    assert torch.equal(now["extra.weight"], before["extra.weight"])
    assert torch.equal(now["master:up.weight"], held["master:up.weight"])


@pytest.mark.parametrize("form", ["deepspeed", "safetensors"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@shared_ranks(2)
def test_states_that_are_not_shaped_as_the_parameter(precision, form, tmp_path):
    def begin(seed):
        model = make(Mixed, seed=seed)
        section = {} if precision == "fp32" else {"bf16": {"enabled": True}}
        return deepspeed.initialize(
            model=model,
            optimizer=torch.optim.Adafactor(model.parameters(), lr=1e-2),
            config={"train_micro_batch_size_per_gpu": 6, "checkpoint": {"format": form}, **section},
        )[0]

    engine = begin(0)
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path)
    wanted = train(engine, 2, 4)
    engine.destroy()
    engine = begin(1)
    engine.load_checkpoint(tmp_path)
    assert train(engine, 2, 4) == wanted


@shared_ranks(2)
def test_into_a_model_made_in_shards(tmp_path):
    held = moved(2, tmp_path)
    with deepspeed.zero.Init():
        model = make(Mixed, seed=3)
    engine = build(3, "bf16", model)
    engine.load_checkpoint(tmp_path)
    assert_equal(everything(engine), held)


@shared_ranks(1, 2)
def test_what_is_not_there(tmp_path):
    engine = build(1)
    assert engine.load_checkpoint(tmp_path / "nowhere") == (None, None)
    engine.save_checkpoint(tmp_path, save_latest=False, tag=7)
    assert engine.load_checkpoint(tmp_path) == (None, None)
    assert engine.load_checkpoint(tmp_path, 7)[0] is not None
    with pytest.raises(CheckpointError, match=r"absent.*no such checkpoint.*7"):
        engine.load_checkpoint(tmp_path, "absent")
    with pytest.raises(UsageError, match="save_dir is empty"):
        engine.save_checkpoint("")


@pytest.mark.parametrize("stage", STAGES)
@shared_ranks(1)
def test_the_files_of_one_rank(stage, tmp_path):
    engine = build(stage, "bf16", comet={"enabled": False, "api_key": "xyzzy"})
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    held = everything(engine)
    optimizer = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    model = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    wanted = {model, optimizer} if stage else {model, "dp_rank_0_mp_rank_00_rank_states.pt"}
    assert {path.name for path in (tmp_path / "global_step1").iterdir()} == {*wanted, manifest.NAME}
    assert (tmp_path / "latest").read_text() == "global_step1"
    assert (tmp_path / "zero_to_fp32.py").exists() == bool(stage)
    assert (tmp_path / "zero_to_torch.py").exists() == bool(stage)
    assert not any(b"xyzzy" in path.read_bytes() for path in (tmp_path / "global_step1").iterdir())
    for name in wanted:
        torch.load(tmp_path / "global_step1" / name, weights_only=True)
    if stage:
        state = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
        assert torch.equal(state["up.weight"], held["master:up.weight"])
        assert torch.equal(state["extra.weight"], held["extra.weight"].float())


@pytest.mark.parametrize("stage", [1, 3])
@shared_ranks(2)
def test_universal(stage, tmp_path):
    held = moved(stage, tmp_path, precision="fp32")
    if dist.get_rank() == 0:
        convert(tmp_path / "global_step3", tmp_path / "universal")
    dist.barrier()
    for other in STAGES:
        engine = build(other, "fp32", make(Mixed, seed=3), checkpoint={"load_universal": True})
        path, _ = engine.load_checkpoint(tmp_path)
        assert "universal" in path
        now = everything(engine)
        for name in ("master:up.weight", "exp_avg:up.weight", "exp_avg_sq:norm.bias", "extra.weight", "counters"):
            assert torch.equal(torch.as_tensor(now[name]), torch.as_tensor(held[name])), name
        assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.1, 0.0]
        engine.destroy()
    engine = build(stage, checkpoint={"load_universal": True})
    with pytest.raises(UsageError, match=r"no file latest_universal.*ds_to_universal"):
        engine.load_checkpoint(tmp_path / "global_step3")


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, place):
        generator = torch.Generator().manual_seed(place)
        return torch.randint(17, (5,), generator=generator), torch.tensor([place] * 5) % 17


@shared_ranks(2)
def test_the_place_in_the_data(tmp_path):
    def steps(engine, batches, count):
        seen = []
        for _ in range(count):
            tokens, labels = next(batches)
            engine.backward(engine(tokens, labels))
            engine.step()
            seen.append(labels[:, 0].tolist())
        return seen

    engine = build(1, data=Numbers(), samples=8)
    batches = iter(deepspeed.utils.RepeatingLoader(engine.training_dataloader))
    steps(engine, batches, 3)
    engine.save_checkpoint(tmp_path)
    wanted = steps(engine, batches, 4)
    engine.destroy()
    engine = build(1, data=Numbers(), samples=8)
    engine.load_checkpoint(tmp_path)
    assert steps(engine, iter(deepspeed.utils.RepeatingLoader(engine.training_dataloader)), 4) == wanted


# ---- how it is written


@pytest.mark.parametrize("stage", [0, 2, 3])
@shared_ranks(2)
def test_in_the_background(stage, tmp_path):
    engine = build(stage, "bf16", checkpoint={"writer": {"decoupled": True}, "keep_last": 2})
    kept = {}
    for step in range(4):
        train(engine, step, step + 1)
        engine.save_checkpoint(tmp_path)
        kept[step + 1] = everything(engine)  # training goes on while it is written
    engine.load_checkpoint(tmp_path, "global_step3")
    assert_equal(everything(engine), kept[3])
    engine.destroy()
    assert sorted(os.listdir(tmp_path))[:3] == ["global_step3", "global_step4", "latest"]
    engine = build(stage, "bf16", make(Mixed, seed=3))
    engine.load_checkpoint(tmp_path)
    assert_equal(everything(engine), kept[4])


@shared_ranks(2)
def test_an_error_in_the_background_comes_with_the_next_call(tmp_path):
    engine = build(1, checkpoint={"writer": {"decoupled": True}})
    engine.save_checkpoint(tmp_path / "ok")
    engine._checkpoints.manager.wait()
    blocked = tmp_path / "ok" / "global_step0" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    assert blocked.exists()
    if dist.get_rank() == 0:
        (tmp_path / "ok" / "other").write_text("a file where a directory is to be")
    dist.barrier()
    with pytest.raises(CheckpointError, match="other"):
        engine.save_checkpoint(tmp_path / "ok", "other")
        engine.save_checkpoint(tmp_path / "ok", "more")
    assert engine.load_checkpoint(tmp_path / "ok")[0] is not None
    engine.destroy()


@pytest.mark.parametrize("kind", ["PYTHON", "MOCK"])
@shared_ranks(2)
def test_other_writers(kind, tmp_path):
    writer = {"type": kind.lower(), "io_buffer_size": 1 << 20, "show_statistics": True}
    engine = build(1, checkpoint={"writer": writer})
    engine.save_checkpoint(tmp_path)
    assert (tmp_path / "global_step0").exists() == (kind == "PYTHON")


@shared_ranks(2)
def test_what_cannot_be_saved_fails_on_all_ranks(tmp_path):
    engine = build(1)
    state = {"model": object()} if dist.get_rank() == 0 else {}  # only the first rank's is written
    kind = UsageError if dist.get_rank() == 0 else CheckpointError
    with pytest.raises(kind, match=r"client_state\['model'\] is a builtins.object"):
        engine.save_checkpoint(tmp_path, client_state=state)
    assert engine.save_checkpoint(tmp_path)


BAD_ARGUMENTS = {
    "save_dir is NoneType": (None,),
    "save_dir is bytes": (b"out",),
    "save_dir is empty": ("",),
    "save_dir has a NUL": ("o\0ut",),
    "tag '' cannot be used: it names no file": ("out", ""),
    "has '..' in it": ("out", ".."),
    "tag '/abs' cannot be used: it is an absolute": ("out", "/abs"),
    "has a NUL character in it. It has": ("out", "a\0b"),
    "begins with a dot": ("out", "a/.b"),
    "a file of that name lies beside": ("out", "latest"),
    "client_state is int": ("out", "a", 5),
}


@shared_ranks(2)
def test_arguments_that_cannot_be_fail_on_all_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = build(1)
    for text, arguments in BAD_ARGUMENTS.items():
        with pytest.raises(UsageError, match=text):
            engine.save_checkpoint(*arguments)
        mine = arguments if dist.get_rank() == 1 else ("out",)  # one rank's mistake is told to the other
        with pytest.raises(UsageError if dist.get_rank() == 1 else CheckpointError, match=text):
            engine.save_checkpoint(*mine)
    for wrong in (None, b"out", "", 5):
        with pytest.raises(UsageError, match="load_dir is"):
            engine.load_checkpoint(wrong)
    assert not (tmp_path / "out").exists()
    assert engine.save_checkpoint("out")


@pytest.mark.parametrize("stage", STAGES)
@shared_ranks(2)
def test_a_load_that_fails_half_way_is_not_trained_on(stage, tmp_path, monkeypatch):
    engine = build(stage)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path, tag="good")
    engine.save_checkpoint(tmp_path, tag="bad")

    def run(self):
        if dist.get_rank() == 1:
            raise CheckpointError("the disk is broken")

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="rank 1: the disk is broken"):
        patch.setattr(BulkRead, "run", run)
        engine.load_checkpoint(tmp_path, "bad")
    with pytest.raises(CheckpointError, match=r"engine.step\(\): .*bad was loaded half-way.*Load a checkpoint"):
        train(engine, 1, 2)
    with pytest.raises((CheckpointError, UsageError), match="half-way"):
        engine.save_checkpoint(tmp_path, tag="mixture")
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        engine.load_checkpoint(tmp_path, "absent")
    with pytest.raises(CheckpointError, match="half-way"):
        engine.step()
    engine.load_checkpoint(tmp_path, "good")
    train(engine, 1, 2)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["bad", "good"]


@shared_ranks(2)
def test_damage_fails_on_all_ranks(tmp_path):
    engine = build(1)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    file = tmp_path / "global_step1" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    if dist.get_rank() == 0:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"rank 1: .*zero_pp_rank_1_mp_rank_00_optim_states.pt"):
        engine.load_checkpoint(tmp_path)


@shared_ranks(3)
def test_one_rank_alone(tmp_path):
    """The others go on, to a collective in which they wait; afterwards all can save."""
    rank_meeting.PATIENCE = math.inf  # ranks that are busy would be waited for without end
    engine = build(2, checkpoint={"rank_wait": 1.5})
    engine.save_checkpoint(tmp_path, "good")
    group = dist.new_group([0, 1, 2])
    if dist.get_rank() == 1:
        with pytest.raises(CheckpointError, match=r"ranks 0, 2 of 3 did not take part within 1.5 s.*rank_wait"):
            engine.save_checkpoint(tmp_path, "bad")
    dist.barrier(group)
    assert sorted(os.listdir(tmp_path))[0] == "good"
    engine.save_checkpoint(tmp_path, "better")
    assert engine.load_checkpoint(tmp_path)[0].startswith(str(tmp_path / "better"))


class Touch(logging.Handler):
    """Makes a file once a certain message is logged."""

    def __init__(self, path, text):
        super().__init__()
        self.path, self.text = path, text

    def emit(self, record):
        if self.text in record.getMessage():
            self.path.touch()


@pytest.mark.parametrize("hangs", [True, False])
@shared_ranks(2)
def test_a_rank_that_is_busy_is_waited_for(tmp_path, hangs):
    """The thread that answers for it also runs where hangs are not watched, and there is no other one between saves."""
    engine = build(2, checkpoint={"rank_wait": 2.0}, hangs={"enabled": hangs})
    assert comm.dispatcher.watch.running == hangs
    names = {thread.name for thread in threading.enumerate()}
    assert {name for name in names if name.startswith(("checkpoint", "deepspeed-hangs"))} == {"deepspeed-hangs"}
    waiting = tmp_path / "waiting"
    if dist.get_rank() == 0:
        while not waiting.exists():  # such as writing a model for export
            torch.ones(200, 200) @ torch.ones(200, 200)
    else:  # which says for whom it waits once that takes longer than rank_wait
        logger.addHandler(Touch(waiting, "waiting for ranks [0]"))
    assert engine.save_checkpoint(tmp_path)


@ranks(2)
def test_nodes_with_storage_of_their_own(tmp_path):
    """Two nodes of one rank each: every node writes what it needs, and loads it."""
    rank = dist.get_rank()
    os.environ["LOCAL_RANK"] = "0"
    socket.gethostname = lambda: f"node{rank}"
    for stage in STAGES:
        folder = tmp_path / f"node{rank}" / str(stage)
        options = {"checkpoint": {"use_node_local_storage": True}}
        engine = build(stage, "bf16", **options)
        train(engine, 0, 2)
        engine.save_checkpoint(folder)
        held = everything(engine)
        engine.destroy()
        engine = build(stage, "bf16", make(Mixed, seed=3), **options)
        assert engine.load_checkpoint(folder)[0] is not None
        assert_equal(everything(engine), held)
        engine.destroy()
