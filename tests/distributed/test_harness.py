"""The rank harness itself: results, failures, deaths and hangs are told apart and named."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests import harness
from tests.harness import ranks


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
