"""BulkRead: values arrive whole in whatever memory is given for them, and damage is an error."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepspeed.checkpoint.formats import bulk_read as module
from deepspeed.checkpoint.formats.bulk_read import BulkRead, fetch
from deepspeed.checkpoint.formats.checked_files import Opened, Opener
from deepspeed.checkpoint.formats.source import StoredPart
from deepspeed.checkpoint.storage.durable import write_tensorfile
from deepspeed.checkpoint.storage.manifest import Manifest, write
from deepspeed.errors import CheckpointError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two files of torch.save, one of which a manifest knows."""
    path = tmp_path_factory.mktemp("bulk_read")
    facts = write_tensorfile(path / "known.pt", {"x": torch.arange(3000.0)})
    write_tensorfile(path / "foreign.pt", {"x": torch.arange(3000.0, 6000.0)})
    write(path, Manifest("tag", "deepspeed", 1, {"known.pt": facts}))
    return path


bounds = st.tuples(st.integers(0, 3000), st.integers(0, 3000)).map(sorted)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    wanted=st.lists(st.tuples(bounds, bounds, st.sampled_from([torch.float32, torch.float64])), max_size=4),
    step=st.sampled_from([64, 1000, 2**20]),
)
def test_any_parts_in_any_memory(folder, monkeypatch, wanted, step):
    monkeypatch.setattr(module, "_STEP", step)
    opener, reads, results = Opener(folder), BulkRead(), []
    for (a, b), (c, d), dtype in wanted:
        parts = [
            StoredPart(opener.torch("known.pt").state["x"][a:b], opener.torch("known.pt")),
            StoredPart(opener.torch("foreign.pt").state["x"][c:d], opener.torch("foreign.pt")),
        ]
        expected = torch.cat([torch.arange(3000.0)[a:b], torch.arange(3000.0, 6000.0)[c:d]])
        assert torch.equal(fetch(parts), expected)
        out = torch.full((b - a + d - c,), -1.0, dtype=dtype)
        reads.add(parts, out)
        results.append((out, expected))
    reads.run()
    for out, expected in results:
        assert torch.equal(out, expected.to(out.dtype))


def test_what_lies_in_no_map_is_copied():
    values = torch.arange(5.0)
    part = StoredPart(values, Opened(None, lambda tensor: tensor, lambda tensor: None))
    assert torch.equal(fetch([part, part]), torch.cat([values, values]))


def test_damage_is_an_error(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    opened = Opener(tmp_path).torch("foreign.pt")
    known = bytearray((folder / "known.pt").read_bytes())
    known[len(known) // 2] ^= 1
    (tmp_path / "known.pt").write_bytes(known)
    with pytest.raises(CheckpointError, match=r"known\.pt: damaged between bytes 0"):
        file = Opener(tmp_path).torch("known.pt")
        fetch([StoredPart(file.state["x"], file)])
    (tmp_path / "foreign.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"foreign\.pt: truncated: 0 bytes"):
        fetch([StoredPart(opened.state["x"], opened)])
