"""Files with stacks: where they are, whose, and how many stay."""

from __future__ import annotations

import os

from deepspeed.comm.watch.inquiry import write_stacks


def name(number):
    return f"deepspeed-hang-{number:016x}"


def test_the_newest_folders_stay(tmp_path):
    folder = tmp_path / "not" / "there"
    for number in range(9):
        for rank in (0, 1):
            assert write_stacks(folder, name(number), rank) == str(folder / name(number) / f"rank-{rank}.txt")
        os.utime(folder / name(number), (number, number))
    assert sorted(path.name for path in folder.iterdir()) == [name(number) for number in (4, 5, 6, 7, 8)]
    assert sorted(path.name for path in (folder / name(8)).iterdir()) == ["rank-0.txt", "rank-1.txt"]


def test_nothing_else_is_removed(tmp_path):
    for number in range(9):
        (tmp_path / f"deepspeed-hang-of-mine-{number}").mkdir()
        (tmp_path / name(number)).write_text("a file")
    write_stacks(tmp_path, name(100), 0)
    assert len(list(tmp_path.iterdir())) == 19


def test_a_name_that_is_taken_is_left_alone(tmp_path):
    (tmp_path / name(1)).symlink_to(tmp_path)
    assert write_stacks(tmp_path, name(1), 0) == ""
    assert write_stacks(tmp_path, "../deepspeed-hang-0", 0) == ""
    assert [path.name for path in tmp_path.iterdir()] == [name(1)]
