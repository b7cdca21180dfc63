"""Process groups of a layout on real ranks: sums over each axis, sharing, closing, and the mesh view."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from deepspeed.errors import LayoutError
from deepspeed.parallel import ParallelLayout, process_groups
from tests.harness import ranks, store_path


def total(axis) -> int:
    """The sum of 10**rank over the ranks that a collective on the axis really reaches."""
    value = torch.tensor(10 ** dist.get_rank())
    dist.all_reduce(value, group=axis.group)
    return int(value)


def expected(axis) -> int:
    return sum(10**rank for rank in axis.ranks)


def count_groups(monkeypatch) -> list[tuple[int, ...]]:
    """Records the rank lists of all groups made from now on."""
    made: list[tuple[int, ...]] = []
    create = process_groups.create_group

    def record(group_ranks, **options):
        made.append(tuple(group_ranks))
        return create(group_ranks, **options)

    monkeypatch.setattr(process_groups, "create_group", record)
    return made


@ranks(4)
@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"pp": 2}, {"sp": 2}, {"pp": 2, "tp": 2}, {"sp": 2, "tp": 2}])
def test_every_axis_reaches_its_own_ranks(sizes):
    with ParallelLayout.build(**sizes) as layout:
        for names in ("pp", "dp", "sp", "tp", ("dp", "sp"), ("pp", "tp"), ("pp", "dp", "sp", "tp")):
            axis = layout[names]
            assert total(axis) == expected(axis), names
            assert dist.get_rank(axis.group) == axis.rank
            assert dist.get_world_size(axis.group) == axis.size
            assert tuple(dist.get_process_group_ranks(axis.group)) == axis.ranks


@ranks(4)
def test_experts_and_splits_reach_their_ranks():
    with ParallelLayout.build(ranks_per_node=2) as layout:
        rank = dist.get_rank()
        for ep in (1, 2, 4):
            experts = layout.experts(ep=ep)
            assert total(experts["ep"]) == expected(experts["ep"])
            assert total(experts["edp"]) == expected(experts["edp"])
        assert layout.experts(ep=2)["ep"].ranks == (rank // 2 * 2, rank // 2 * 2 + 1)
        assert layout.experts(ep=2)["edp"].ranks == (rank % 2, rank % 2 + 2)
        inter, intra = layout["dp"].split(intra_node=True)
        assert total(intra) == (1100 if rank >= 2 else 11)
        assert total(inter) == (1010 if rank % 2 else 101)
        # Node neighbours, runs of two and experts over two ranks are the same rank sets: one group.
        assert intra.group is layout["dp"].split(size=2)[1].group is layout.experts(ep=2)["ep"].group


@ranks(4)
def test_equal_rank_sets_share_one_group():
    monkeypatch = pytest.MonkeyPatch()
    made = count_groups(monkeypatch)
    with ParallelLayout.build(tp=2) as layout:
        assert made == []
        dp = layout["dp"].group
        assert made == [(0, 2), (1, 3)]
        assert layout["dp", "sp"].group is dp
        assert layout["dp", "pp"].group is dp
        assert layout.experts(ep=2)["ep"].group is dp
        assert made == [(0, 2), (1, 3)]
        assert layout.world.group is dist.group.WORLD
        assert layout["dp", "tp"].group is dist.group.WORLD
        assert len(made) == 2
        alone = layout["pp"].group
        assert made[2:] == [(dist.get_rank(),)]
        assert layout["sp"].group is alone
        assert len(made) == 3
    monkeypatch.undo()


@ranks(2)
def test_one_data_parallel_world_costs_no_group():
    monkeypatch = pytest.MonkeyPatch()
    made = count_groups(monkeypatch)
    with ParallelLayout.build() as layout:
        assert layout["dp"].group is layout["dp", "sp"].group is dist.group.WORLD
        layout.create_groups("pp", "dp", "sp", "tp")
    assert made == []
    monkeypatch.undo()


@ranks(4)
def test_created_groups_may_be_used_by_some_ranks_alone():
    with ParallelLayout.build(pp=2, tp=2) as layout:
        layout.create_groups("pp", "tp", ("dp", "tp"))
        if layout.coords["pp"] == 0:
            assert total(layout["tp"]) == 11
        dist.barrier()


@ranks(2)
def test_layouts_come_and_go_while_another_has_the_group_of_a_rank_alone():
    first, second = ParallelLayout.build(), ParallelLayout.build()
    alone = [layout["pp"].group for layout in (first, second)]
    first.close()
    third = ParallelLayout.build()
    value = torch.ones(())
    for group in (alone[1], third["pp"].group):
        dist.all_reduce(value, group=group)
    second.close()
    dist.all_reduce(value, group=third["pp"].group)
    third.close()
    assert value == 1
    assert alone[1] not in dist.distributed_c10d._world.pg_map


@ranks(4)
def test_close_destroys_only_its_own_groups():
    foreign = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    layout = ParallelLayout.build(tp=2)
    other = ParallelLayout.build(tp=2)
    ours, theirs = layout["tp"].group, other["tp"].group
    alone = layout["pp"].group
    assert ours is not theirs
    assert layout["dp", "tp"].group is dist.group.WORLD
    dist.barrier()
    layout.close()
    known = dist.distributed_c10d._world.pg_map
    assert ours not in known
    assert alone not in known
    assert foreign in known
    assert theirs in known
    assert total(other["tp"]) == expected(other["tp"])
    value = torch.ones(())
    dist.all_reduce(value, group=foreign)
    dist.all_reduce(value)
    assert value == 8
    with pytest.raises(LayoutError, match="closed"):
        _ = layout["dp"].group
    other.close()
    other.close()


@ranks(4)
def test_two_layouts_live_side_by_side():
    with ParallelLayout.build(tp=2) as one, ParallelLayout.build(pp=4) as two:
        assert total(one["tp"]) == expected(one["tp"])
        assert total(two["pp"]) == 1111
        assert two["dp"].size == 1
        assert total(one["dp"]) == expected(one["dp"])


@ranks(2)
def test_a_layout_does_not_outlive_its_world():
    layout = ParallelLayout.build(tp=2, pp=1)
    single = layout["dp"].group
    assert dist.get_world_size(single) == 1
    other = ParallelLayout.build(tp=2)
    assert dist.get_world_size(other["dp"].group) == 1
    world = other.world.group
    dist.barrier()
    dist.destroy_process_group()
    layout.close()
    assert layout.closed
    dist.init_process_group("gloo", init_method=f"file://{store_path()}.2", rank=layout.rank, world_size=2)
    for name in ("dp", "tp", ("dp", "tp")):
        with pytest.raises(LayoutError, match="initialised again"):
            _ = other[name].group
    with ParallelLayout.build(tp=2) as again:
        assert again.world.group is dist.group.WORLD
        assert again.world.group is not world
        other.close()
        assert total(again["tp"]) == 11


@ranks(2)
def test_build_must_agree_with_the_world():
    with pytest.raises(LayoutError, match="world size 4 was asked for, but this process is rank"):
        ParallelLayout.build(world=4)
    with pytest.raises(LayoutError, match=r"rank 1 of world size 1 was asked for"):
        ParallelLayout.build(world=1, rank=1)
    assert ParallelLayout.plan(world=4)["dp"].size == 4


@ranks(4)
def test_mesh_view_has_our_ranks_and_our_groups():
    with ParallelLayout.build(pp=2, tp=2) as layout:
        mesh = layout.mesh
        assert mesh.mesh_dim_names == ("pp", "dp", "sp", "tp")
        assert mesh.mesh.shape == (2, 1, 1, 2)
        assert mesh.mesh.flatten().tolist() == [0, 1, 2, 3]
        for name, coordinate in layout.coords.items():
            assert mesh.get_group(name) is layout[name].group
            assert mesh.get_local_rank(name) == coordinate == layout[name].rank
        assert mesh["tp"].mesh.tolist() == list(layout["tp"].ranks)
        assert layout.mesh is mesh


@pytest.mark.slow  # importing DTensor takes seconds
@ranks(2)
def test_mesh_view_serves_dtensor():
    from torch.distributed.tensor import Shard, distribute_tensor

    with ParallelLayout.build(tp=2) as layout:
        whole = torch.arange(8.0).view(4, 2)
        sharded = distribute_tensor(whole, layout.mesh["tp"], [Shard(0)])
        assert sharded.to_local().equal(whole[layout["tp"].rank * 2 :][:2])
        assert sharded.full_tensor().equal(whole)


@ranks(4)
@pytest.mark.parametrize("names", [("data_parallel", "sequence_parallel"), ("tp", "dp"), ("pipe", "model")])
def test_layout_from_mesh_uses_the_groups_of_the_mesh(names):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    short = {"data_parallel": "dp", "sequence_parallel": "sp", "pipe": "pp", "model": "tp"}
    monkeypatch = pytest.MonkeyPatch()
    made = count_groups(monkeypatch)
    layout = ParallelLayout.from_mesh(mesh)
    for name in names:
        axis = layout[short.get(name, name)]
        assert axis.group is mesh.get_group(name)
        assert list(axis.ranks) == mesh[name].mesh.tolist()
        assert total(axis) == expected(axis)
    assert made == []
    monkeypatch.undo()
    assert layout.world.group is dist.group.WORLD
    layout.close()
    dist.barrier(group=mesh.get_group(names[0]))


@ranks(4)
def test_meshes_that_are_no_layout():
    with pytest.raises(LayoutError, match="without names"):
        ParallelLayout.from_mesh(init_device_mesh("cpu", (2, 2)))
    with pytest.raises(LayoutError, match="'width' is no known axis"):
        ParallelLayout.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "width")))
    with pytest.raises(LayoutError, match="mean the same axis"):
        ParallelLayout.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "data")))
    part = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    with pytest.raises(LayoutError, match="all 4 ranks of the world"):
        ParallelLayout.from_mesh(part)
