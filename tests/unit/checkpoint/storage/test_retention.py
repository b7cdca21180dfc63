"""Keep last N: only whole checkpoints of ours go, never the named one and never the last good one."""

import os
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint.storage.block_reader import FileProblem
from deepspeed.checkpoint.storage.durable import write_tensorfile
from deepspeed.checkpoint.storage.locate import Checkpoint, expired, find_loadable, retain
from deepspeed.checkpoint.storage.manifest import Manifest, write


def made(place, good=True, ours=True):
    manifest = Manifest(str(place), "test", 1, {}) if ours else None
    return Checkpoint(str(place), Path(str(place)), manifest, () if good else (FileProblem("x", "bad"),), 100.0 - place)


@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), max_size=8),
    st.integers(1, 4),
    st.sets(st.integers(0, 8)),
)
def test_what_goes(kinds, keep, spared):
    all_of_them = [made(place, good, ours) for place, (good, ours) in enumerate(kinds)]
    gone = expired(all_of_them, keep, [str(tag) for tag in spared])
    assert all(checkpoint.manifest is not None for checkpoint in gone)
    assert not {checkpoint.tag for checkpoint in gone} & {str(tag) for tag in spared}
    left = [checkpoint for checkpoint in all_of_them if checkpoint not in gone]
    good = [checkpoint for checkpoint in all_of_them if checkpoint.good]
    assert [c for c in left if c.good][:keep] == good[:keep]
    removable = [c for c in good[keep:] if c.manifest is not None and int(c.tag) not in spared]
    assert [c for c in gone if c.good] == removable[::-1]


def save(folder, tag, saved_at):
    (folder / tag).mkdir()
    facts = write_tensorfile(folder / tag / "model.pt", {"a": torch.arange(100)})
    write(folder / tag, Manifest(tag, "test", 1, {"model.pt": facts}, saved_at=saved_at))


def test_in_a_directory(tmp_path):
    for place, tag in enumerate("abcde"):
        save(tmp_path, tag, float(place))
    (tmp_path / "logs").mkdir()
    (tmp_path / "foreign").mkdir()
    torch.save({}, tmp_path / "foreign" / "mp_rank_00_model_states.pt")
    os.utime(tmp_path / "foreign", (0.5, 0.5))
    (tmp_path / "latest").write_text("b")
    assert [path.name for path in retain(tmp_path, 2, "t")] == ["a", "c"]
    assert sorted(os.listdir(tmp_path)) == ["b", "d", "e", "foreign", "latest", "logs"]
    os.truncate(tmp_path / "e" / "model.pt", 10)
    assert [path.name for path in retain(tmp_path, 1, "t")] == []
    assert find_loadable(tmp_path).tag == "b"
