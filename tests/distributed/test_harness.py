"""The rank harness itself: results, failures, deaths and hangs are told apart and named."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests import harness
from tests.harness import ranks, shared_ranks


@ranks(2, 3)
def test_ranks_form_one_group():
    value = torch.ones(3) * (dist.get_rank() + 1)
    dist.all_reduce(value)
    world = dist.get_world_size()
    assert value.tolist() == [world * (world + 1) / 2] * 3
    assert os.environ["RANK"] == str(dist.get_rank())


@pytest.mark.parametrize("number", [1, 2])
@ranks(2)
def test_parameters_and_fixtures_reach_the_ranks(number, tmp_path):
    (tmp_path / f"rank{dist.get_rank()}").write_text(str(number))
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank1"]


@ranks(2, init=False)
def test_without_a_process_group():
    assert not dist.is_initialized()
    dist.init_process_group(
        "gloo", init_method=f"file://{harness.store_path()}", rank=int(os.environ["RANK"]), world_size=2
    )
    dist.barrier()


SEEN = []


@shared_ranks(2)
def _one_of_several(number, tmp_path, monkeypatch):
    """It finds the environment, the folder, the numbers and no store, as the first did."""
    assert list(range(number)) == SEEN
    SEEN.append(number)
    assert os.environ.get("LEFT") is None
    os.environ["LEFT"] = "behind"
    assert os.environ["RANK"] == str(dist.get_rank())
    monkeypatch.setattr(dist, "get_rank", lambda: 77)
    assert not os.path.exists(harness.store_path())
    dist.barrier()
    os.makedirs(harness.store_path(), exist_ok=True)
    assert os.getcwd() == str(harness.ROOT)
    os.chdir(tmp_path)
    assert torch.rand(1).item() == torch.rand(1, generator=torch.Generator().manual_seed(0)).item()


@shared_ranks(2)
def _one_fails_of_several():
    SEEN.append("failed")
    if dist.get_rank() == 1:
        raise ValueError(f"tests before this one: {len(SEEN) - 1}")


@ranks(2)
def _one_fails():
    wanted = "a local that explains"
    if dist.get_rank() == 1:
        raise ValueError(f"rank one is unhappy with {len(wanted)}")
    dist.barrier()


@ranks(2)
def _one_dies():
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)


@ranks(2, timeout=5)
def _one_never_comes():
    os.write(1, b"about to wait\n")
    if dist.get_rank() == 0:
        time.sleep(1000)
    dist.barrier()


def test_shared_ranks_run_one_test_after_the_other(tmp_path):
    for number in range(3):
        _one_of_several(number=number, tmp_path=tmp_path, monkeypatch=pytest.MonkeyPatch())


def test_ranks_of_which_one_failed_are_not_used_again():
    for _ in range(2):
        with pytest.raises(pytest.fail.Exception) as caught:
            _one_fails_of_several()
    assert "tests before this one: 0" in str(caught.value)


def test_a_failure_shows_rank_traceback_and_locals():
    with pytest.raises(pytest.fail.Exception, match="=== rank 1 failed") as caught:
        _one_fails()
    text = str(caught.value)
    assert "rank one is unhappy" in text
    assert "a local that explains" in text
    assert text.index("rank 1 failed") < text.index("rank 0")


def test_a_killed_rank_is_named_with_its_signal():
    with pytest.raises(pytest.fail.Exception, match="rank 0 died\nkilled by SIGKILL"):
        _one_dies()


def test_a_hang_ends_with_the_stacks_and_output_of_all_ranks():
    with pytest.raises(pytest.fail.Exception) as caught:
        _one_never_comes()
    text = str(caught.value)
    assert "rank 0 hung" in text
    assert "rank 1 hung" in text
    assert text.count("_one_never_comes") >= 2
    assert "about to wait" in text
