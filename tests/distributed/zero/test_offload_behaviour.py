"""States in other tiers behind the engine's API: checkpoints, access, edits, optimizers, what a killed job leaves."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import deepspeed
from deepspeed.errors import DeepSpeedConfigError, FileError
from deepspeed.memory.tier import SwapFile
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)
from deepspeed.zero.states.late_parameters import is_late
from tests.distributed.zero.test_offload_parity import late_updates
from tests.harness import shared_ranks
from tests.models import batches, make
from tests.user_models import whole

ROOT = Path(__file__).resolve().parents[3]


def homes(folder):
    disk = {"device": "nvme", "nvme_path": str(folder)}
    yield {"stage": 2}
    yield {"stage": 0, "offload_optimizer": {"device": "cpu"}}
    yield {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    yield {"stage": 1, "offload_optimizer": disk}
    yield {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    yield {"stage": 3, "offload_optimizer": disk, "offload_param": {**disk, "max_in_cpu": 0}}


def build(zero, client=None, **config):
    if client is None:
        config.setdefault("optimizer", {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}})
    given = {} if client is None else {"optimizer": client}
    return deepspeed.initialize(
        model=make(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage3_param_persistence_threshold": 0, **zero},
            **config,
        },
        **given,
    )[0]


def step(engine, data):
    for batch in data:
        engine.backward(engine(*batch))
        engine.step()


@shared_ranks(1, 2)
def test_a_checkpoint_of_any_home_loads_in_any_other(tmp_path):
    data = batches(6, 2)
    plain = build({"stage": 2})
    step(plain, data)
    wanted = whole(plain)
    plain.destroy()
    kinds = list(homes(tmp_path))
    for place, zero in enumerate(kinds):
        first = build(zero)
        step(first, data[:3])
        folder = tmp_path / f"checkpoint-{place}"
        first.save_checkpoint(folder)
        first.destroy()
        second = build(kinds[(place + 1) % len(kinds)])
        step(second, data[3:5])  # to be forgotten
        second.load_checkpoint(folder)
        step(second, data[3:])
        found = whole(second)
        second.destroy()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name].float(), value.float(), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("late", [False, True])
@shared_ranks(1, 2)
def test_states_are_read_and_written_wherever_they_live(late, tmp_path):
    for zero in list(homes(tmp_path))[1:]:
        with late_updates() if late else nullcontext():
            engine = build(zero)
        name, param = next(iter(engine.module.named_parameters()))
        step(engine, batches(2, 2))
        assert safe_get_full_optimizer_state(param, "exp_avg").abs().sum() > 0
        master = safe_get_full_fp32_param(param)
        safe_set_full_fp32_param(param, master + 1)
        torch.testing.assert_close(safe_get_full_fp32_param(param), master + 1)
        assert (whole(engine)[name].float() - (master + 1)).abs().max() < 0.05
        engine.backward(engine(*batches(1, 2)[0]))
        grad = safe_get_full_grad(param)
        safe_set_full_grad(param, torch.zeros_like(grad))
        assert not safe_get_full_grad(param).any()
        engine.step()
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0), torch.no_grad():
            param.fill_(2.0)
        engine.backward(engine(*batches(1, 2)[0]))
        engine.step()
        assert (safe_get_full_fp32_param(param) - 2).abs().max() < 0.1
        engine.destroy()


@shared_ranks(1)
def test_several_backwards_in_a_step_that_was_planned_with_one():
    data = batches(2, 2)
    found = []
    for zero in ({"stage": 2}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}):
        engine = build(zero, managed_gradient_accumulation=False)
        for batch in data:
            engine.backward(engine(*batch))
        engine.step()
        found.append(whole(engine))
        engine.destroy()
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name].float(), value.float(), rtol=2e-2, atol=2e-3)


@shared_ranks(1, 2)
def test_optimizers_of_others_in_host_memory(tmp_path):
    def sgd(params):
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    with pytest.raises(DeepSpeedConfigError, match="zero_force_ds_cpu_optimizer"):
        build({"stage": 2, "offload_optimizer": {"device": "cpu"}}, sgd, zero_allow_untested_optimizer=True)
    allowed = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    results = []
    for zero in homes(tmp_path):
        engine = build(zero, sgd, **allowed)
        step(engine, batches(3, 2))
        results.append(whole(engine))
        engine.destroy()
    for found in results[1:]:
        for name, value in results[0].items():
            torch.testing.assert_close(found[name].float(), value.float(), rtol=2e-2, atol=2e-3)


@shared_ranks(1, 2)
def test_adafactor_rests_on_the_disk_as_in_memory(tmp_path):
    allowed = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    results = []
    for place in ({"device": "cpu"}, {"device": "nvme", "nvme_path": str(tmp_path)}):
        engine = build({"stage": 2, "offload_optimizer": place, "sub_group_size": 50}, torch.optim.Adafactor, **allowed)
        step(engine, batches(3, 2))
        results.append(whole(engine))
        engine.destroy()
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    disk = {"stage": 2, "offload_optimizer": place}
    with pytest.raises(DeepSpeedConfigError, match=r"a step of LBFGS needs .*except LBFGS"):
        build(disk, torch.optim.LBFGS, **allowed)


@shared_ranks(1)
def test_moments_in_eight_bits_on_every_tier(tmp_path):
    losses = []
    for zero in list(homes(tmp_path))[1:]:
        optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "moment_bits": 8}}
        engine = build(zero, optimizer=optimizer)
        data = batches(1, 2) * 12
        first = engine(*data[0]).item()
        step(engine, data)
        losses.append((first, engine(*data[0]).item()))
        engine.destroy()
    assert all(last < first for first, last in losses), losses


def test_a_disk_that_is_full_is_named(tmp_path):
    swap = SwapFile(tmp_path, "zero_optimization.offload_optimizer.nvme_path")
    with pytest.raises(FileError, match=r"offload_optimizer\.nvme_path: 4\.50 PB more were needed beside 0 B of"):
        swap.take(1 << 50, torch.float32)
    full = OSError(errno.ENOSPC, "No space left on device")
    room = SimpleNamespace(free=100)
    with (
        mock.patch("os.posix_fallocate", side_effect=full),
        mock.patch("shutil.disk_usage", return_value=room),
        pytest.raises(FileError, match=r"4\.10 KB more were needed beside 0 B of this rank, and 100 B are free"),
    ):
        swap.take(1024, torch.float32)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"nvme_path: no file can be made in this folder"):
        SwapFile(tmp_path / "file", "zero_optimization.offload_param.nvme_path")


@pytest.mark.parametrize("what", ["open", "states", "parameters"])
@shared_ranks(2)
def test_a_disk_that_is_full_on_one_rank_is_an_error_on_all(what, tmp_path):
    mine, rank = tmp_path / "mine", deepspeed.comm.get_rank()
    disk = {"device": "nvme", "nvme_path": str(mine)}
    zero = {"stage": 2, "offload_optimizer": disk}
    if what == "parameters":
        zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {**disk, "max_in_cpu": 0}}
    deepspeed.comm.barrier()
    if rank == 1 and what == "open":
        disk["nvme_path"] = str(tmp_path / "file")
        (tmp_path / "file").write_text("")
    full = mock.patch("os.posix_fallocate", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with full if rank == 1 and what != "open" else nullcontext(), pytest.raises(FileError) as caught:
        build(zero)
    text = str(caught.value)
    if rank == 1:
        assert ("no file can be made" if what == "open" else "KB more were needed") in text
    else:
        assert "failed on rank 1, whose own error says why" in text
    build({"stage": 2, "offload_optimizer": {**disk, "nvme_path": str(mine)}})  # and nothing hangs afterwards


KILLED = """
import os, sys, torch, deepspeed
from tests.models import batches, make
disk = {"device": "nvme", "nvme_path": sys.argv[1]}
engine, *_ = deepspeed.initialize(model=make(), config={
    "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3, "offload_optimizer": disk, "offload_param": {**disk, "max_in_cpu": 0}}})
while True:
    engine.backward(engine(*batches(1, 2)[0])); engine.step()
    print("stepped", flush=True)
"""


def test_a_killed_job_leaves_no_swap_file(tmp_path):
    swap = tmp_path / "swap"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "MASTER_PORT": "0"}
    job = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(swap)], env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert any(line.startswith("stepped") for line in job.stdout)
        assert list(swap.iterdir()) == []  # no name to begin with
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait()
    assert list(swap.iterdir()) == []


class Half(torch.nn.Module):
    """Only one of its layers is used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.used(x).square().mean()


@pytest.mark.parametrize("late", [False, True])
@shared_ranks(1, 2)
def test_two_groups_and_a_layer_that_nobody_uses(late, tmp_path):
    torch.manual_seed(1)
    data, found = torch.randn(3, 4, 8), []
    for zero in homes(tmp_path):
        model = Half()
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.5},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ]
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage3_param_persistence_threshold": 0, "sub_group_size": 30, **zero},
        }
        with late_updates() if late else nullcontext():
            engine = deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]
        engine.eval()(data[0])  # a forward without gradients, before and between steps
        engine.train()
        for batch in data:
            engine.backward(engine(batch))
            engine.step()
            engine.eval()(batch)
            engine.train()
        found.append(whole(engine))
        engine.destroy()
    fresh = dict(Half().named_parameters())
    for each in found:
        for name, value in found[0].items():
            torch.testing.assert_close(each[name], value, rtol=1e-5, atol=1e-6)
        assert torch.equal(each["unused.weight"], fresh["unused.weight"])  # not even decayed


@pytest.mark.parametrize("own", [False, True])
@shared_ranks(1)
def test_a_compiled_model_does_not_run_ahead_of_the_step(own):
    found = []
    for compiled in (False, True):
        model = make()
        if compiled and own:
            model.up.compile(backend="eager")  # one layer of it, before the engine knows
        with late_updates():
            engine = deepspeed.initialize(
                model=model,
                config={
                    "train_micro_batch_size_per_gpu": 2,
                    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
                    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
                },
            )[0]
        if compiled and not own:
            engine.compile(backend="eager")
        late = []
        for batch in batches(3, 2):
            engine.backward(engine(*batch))
            engine.step()
            late.append(any(is_late(param) for param in engine.module.parameters()))
        assert any(late) != compiled
        found.append(whole(engine))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value)


@shared_ranks(1, 2)
def test_loaded_states_lie_where_they_live(tmp_path):
    first = build({"stage": 2})
    step(first, batches(1, 2))
    first.save_checkpoint(tmp_path)
    for zero in homes(tmp_path / "swap"):
        engine = build(zero)
        engine.load_checkpoint(tmp_path)
        for piece in engine._parts.states.away.values():
            state = engine.basic_optimizer.state[piece.master]
            for kind in ("exp_avg", "exp_avg_sq"):
                assert piece.arena.lies_in(state[kind], kind), (zero, kind)
        engine.destroy()
