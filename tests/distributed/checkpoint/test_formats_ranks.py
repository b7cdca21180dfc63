"""Every rank writes its own files and reads what another topology wants, at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepspeed.checkpoint.formats.detect import open_checkpoint
from deepspeed.fragments import ContiguousLayout, StripedLayout
from tests.checkpoint_states import SMALL, WRITERS
from tests.harness import shared_ranks


@pytest.mark.parametrize("form", ["deepspeed", "native"])
@shared_ranks(2, 4)
def test_ranks_write_and_read_their_parts(tmp_path: Path, form: str):
    rank, world = dist.get_rank(), dist.get_world_size()
    for stage in (0, 2, 3):
        path = tmp_path / f"stage{stage}"
        WRITERS[form](SMALL.state(stage, rank, world)).write(path)
        dist.barrier()
        source = open_checkpoint(path)
        SMALL.check(source)
        for names, _ in source.groups:
            numels = tuple(source.shapes[name].numel() for name in names)
            for layout in (ContiguousLayout(numels, world + 1), StripedLayout(numels, world + 1)):
                for index, name in enumerate(names):
                    start, stop = layout.interval(index, rank)
                    wanted = SMALL.tensor(name, "exp_avg_sq")[start:stop]
                    assert torch.equal(source.read(name, "exp_avg_sq", start, stop), wanted)
        assert source.rank_state(rank)["data"] == {"samples": 12 * rank}
