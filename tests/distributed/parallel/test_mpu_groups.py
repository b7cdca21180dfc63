"""An mpu as a layout and a layout as an mpu, with the groups of whoever made them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from deepspeed.errors import LayoutError
from deepspeed.parallel import LayoutMpu, ParallelLayout, layout_from_mpu
from deepspeed.parallel.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from tests.harness import ranks


class Mpu:
    """An mpu with exactly the given methods: `Mpu(data=(rank, size, group))`."""

    def __init__(self, **kinds):
        for kind, (rank, size, group) in kinds.items():
            setattr(self, f"get_{kind}_parallel_rank", lambda rank=rank: rank)
            setattr(self, f"get_{kind}_parallel_world_size", lambda size=size: size)
            setattr(self, f"get_{kind}_parallel_group", lambda group=group: group)


def made(lists):
    """(rank, size, group) of this process in groups made from the rank lists."""
    answer = None
    for members in lists:
        group = dist.new_group(members)
        if dist.get_rank() in members:
            answer = (members.index(dist.get_rank()), len(members), group)
    return answer


@ranks(4)
@pytest.mark.parametrize("kind", ["tensor_model", "slice", "model"])
def test_megatron_mpu_is_adopted(kind):
    data, tensor = made([[0, 2], [1, 3]]), made([[0, 1], [2, 3]])
    kinds = {"model": tensor, kind: tensor}
    layout = layout_from_mpu(Mpu(data=data, **kinds))
    assert layout.sizes == {"pp": 1, "dp": 2, "sp": 1, "tp": 2}
    assert layout["dp"].group is data[2]
    assert layout["tp"].group is layout["pp", "tp"].group is tensor[2]
    assert layout["dp", "sp"].group is data[2]
    layout.close()
    dist.barrier(group=data[2])
    dist.barrier(group=tensor[2])


@ranks(4)
@pytest.mark.parametrize("kind", ["pipeline_model", "pipe", "pipeline"])
def test_pipeline_sizes_under_every_name(kind):
    pipe, data, model = made([[0, 2], [1, 3]]), made([[0, 1], [2, 3]]), made([[0, 2], [1, 3]])
    layout = layout_from_mpu(Mpu(**{kind: pipe, "data": data, "model": model}))
    assert layout.sizes == {"pp": 2, "dp": 2, "sp": 1, "tp": 1}
    assert layout["pp"].group is pipe[2]
    assert layout["dp"].group is data[2]


@ranks(4)
def test_ulysses_mpu_has_no_data_parallel_size():
    rank = dist.get_rank()
    sequence = made([[0, 1], [2, 3]])
    mpu = Mpu(sequence=sequence, sequence_data=(rank, 4, dist.group.WORLD), model=(0, 1, None))
    layout = layout_from_mpu(mpu)
    assert layout.sizes == {"pp": 1, "dp": 2, "sp": 2, "tp": 1}
    assert layout["sp"].group is sequence[2]
    assert layout["dp", "sp"].group is dist.group.WORLD
    assert layout["dp"].ranks == (rank % 2, rank % 2 + 2)
    value = torch.tensor(10**rank)
    dist.all_reduce(value, group=layout["dp"].group)
    assert value == (1010 if rank % 2 else 101)
    layout.close()


@ranks(4)
def test_an_mpu_with_the_axes_the_other_way_round_keeps_its_ranks():
    data, tensor = made([[0, 1], [2, 3]]), made([[0, 2], [1, 3]])
    layout = layout_from_mpu(Mpu(data=data, model=tensor))
    assert layout["dp"].ranks == tuple(dist.get_process_group_ranks(data[2]))
    assert layout["tp"].ranks == tuple(dist.get_process_group_ranks(tensor[2]))
    assert layout["dp"].group is data[2]
    assert layout["tp"].group is tensor[2]


@ranks(4)
def test_an_mpu_that_knows_data_only():
    data = made([[0, 1], [2, 3]])
    layout = layout_from_mpu(Mpu(data=data))
    assert layout.sizes == {"pp": 1, "dp": 2, "sp": 1, "tp": 2}
    assert layout["dp"].group is data[2]
    assert layout["tp"].ranks == (dist.get_rank() % 2, dist.get_rank() % 2 + 2)


@ranks(4)
def test_a_pipeline_grid_is_an_mpu():
    grid = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1))
    layout = layout_from_mpu(grid)
    assert layout.sizes == {"pp": 2, "dp": 1, "sp": 1, "tp": 2}
    assert layout["pp"].group is grid.get_pipe_parallel_group()
    assert layout["tp"].group is grid.get_slice_parallel_group()
    assert layout["pp", "tp"].group is grid.get_model_parallel_group()
    grid.close()


@ranks(2)
def test_a_grid_is_not_asked_for_groups_of_one_rank():
    """Of gloo each would have a thread that never sleeps for long."""
    grid = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=1))
    with layout_from_mpu(grid) as layout:
        assert layout.sizes == {"pp": 2, "dp": 1, "sp": 1, "tp": 1}
        sizes = [len(dist.get_process_group_ranks(group)) for group in dist.distributed_c10d._world.pg_map]
        assert sizes == [2] * len(sizes)
        assert layout["dp"].group.size() == 1, "made when it is asked for"
    grid.close()


@ranks(4)
def test_round_trip_of_a_layout():
    with ParallelLayout.build(pp=2, tp=2) as layout:
        mpu = LayoutMpu(layout)
        again = layout_from_mpu(mpu)
        assert again.sizes == layout.sizes
        for names in ("pp", "dp", "tp", ("pp", "tp")):
            assert again[names].ranks == layout[names].ranks
            if layout[names].size > 1:
                assert again[names].group is layout[names].group


@ranks(4)
def test_every_method_of_the_mpu_shape():
    with ParallelLayout.build(sp=2, tp=2) as layout:
        mpu = LayoutMpu(layout)
        shape = {
            "model": ("pp", "tp"),
            "data": "dp",
            "tensor_model": "tp",
            "slice": "tp",
            "pipe": "pp",
            "pipeline": "pp",
            "pipeline_model": "pp",
            "sequence": "sp",
            "sequence_data": ("dp", "sp"),
        }
        for kind, names in shape.items():
            axis = layout[names]
            assert getattr(mpu, f"get_{kind}_parallel_rank")() == axis.rank
            assert getattr(mpu, f"get_{kind}_parallel_world_size")() == axis.size
            assert getattr(mpu, f"get_{kind}_parallel_group")() is axis.group
        assert mpu.get_tensor_model_parallel_src_rank() == layout["tp"].ranks[0]


@ranks(4)
def test_an_mpu_that_contradicts_itself_is_refused_with_numbers():
    rank = dist.get_rank()
    data, tensor = made([[0, 2], [1, 3]]), made([[0, 1], [2, 3]])
    crossed = made([[0, 3], [1, 2]])
    with pytest.raises(LayoutError, match=r"pp 1 × dp 2 × sp 1 × tp 4 = 8 do not make up the world size 4"):
        layout_from_mpu(Mpu(data=data, model=(0, 4, None)))
    with pytest.raises(LayoutError, match="has 2 ranks, but its size is given as 4"):
        layout_from_mpu(Mpu(data=(rank, 4, data[2]), model=(0, 1, None)))
    with pytest.raises(LayoutError, match="holds the ranks"):
        layout_from_mpu(Mpu(data=crossed, model=tensor))
    with pytest.raises(LayoutError, match="model parallel rank is 7"):
        layout_from_mpu(Mpu(data=data, model=(7, 2, tensor[2])))
    with pytest.raises(LayoutError, match="is a str"):
        layout_from_mpu(Mpu(data=(rank // 2, 2, "group"), model=tensor))
    with pytest.raises(LayoutError, match="sequence_data parallel size is 4"):
        layout_from_mpu(Mpu(data=data, model=tensor, sequence_data=(0, 4, None)))
    with pytest.raises(LayoutError, match="size 3 is not divisible by its pipeline size 2"):
        layout_from_mpu(Mpu(data=data, model=(0, 3, None), pipe=(0, 2, None)))
