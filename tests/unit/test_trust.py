"""Names that stay inside a folder, files that are files, text that a terminal only shows."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import CheckpointError, UsageError, printable
from deepspeed.trust import flaw_of_name, has_link, inside, open_regular, read_regular

GOOD = ["a", "a/b", "a.b", ".hidden", "global_step5", "ä/ö", "a..b", "..a", "a/./b", "x" * 255]
BAD = [
    "",
    ".",
    "..",
    "/",
    "/abs",
    "../x",
    "a/../../x",
    "a/..",
    "a\0",
    "\0",
    "./",
    "x" * 256,
    "a/" * 3000,
    "\ud800",
    5,
    None,
    b"a",
]


@pytest.mark.parametrize("name", GOOD)
def test_good_names(name, tmp_path):
    assert inside(tmp_path, name, "the name") == tmp_path / name


@pytest.mark.parametrize("name", BAD, ids=lambda name: repr(name)[:20])
def test_bad_names(name, tmp_path):
    with pytest.raises(CheckpointError, match=r"the tag .* expected a relative path"):
        inside(tmp_path, name, "the tag")
    with pytest.raises(UsageError):
        inside(tmp_path, name, "the tag", error=UsageError)


@given(st.text(st.sampled_from("./a\0~"), max_size=12))
def test_whatever_passes_stays_inside(name):
    if flaw_of_name(name) is None:
        assert os.path.normpath(os.path.join("/one/two", name)).startswith("/one/two/")


def test_hidden_parts_can_be_refused():
    assert flaw_of_name("a/.b", hidden=False) == "has a part that begins with a dot"


def test_links_are_seen(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert has_link(tmp_path, "link/x")
    assert has_link(tmp_path, "link")
    assert not has_link(tmp_path, "real/x")
    assert not has_link(tmp_path, "absent/x")


def test_only_regular_files_of_bounded_size(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("12345")
    (tmp_path / "link").symlink_to("text")
    assert read_regular(tmp_path / "text", 5) == read_regular(tmp_path / "link", 5) == b"12345"
    with pytest.raises(OSError, match="larger than the 4 bytes"):
        read_regular(tmp_path / "text", 4)
    before = len(os.listdir("/proc/self/fd"))
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            read_regular(path, 10)
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_pipe_that_somebody_writes_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    keep = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        with pytest.raises(OSError, match="not a regular file"):
            read_regular(tmp_path / "pipe", 10)
    finally:
        os.close(keep)


@given(st.text())
def test_printable_text_only_shows(text):
    shown = printable(text)
    assert all(c.isprintable() or c in "\n\t" for c in shown)
    shown.encode("utf-8")
    assert printable(shown) == shown
    if text.isprintable():
        assert shown == text


def test_printable_spells_what_a_terminal_would_obey():
    assert printable("a\x1b[2Jb\r\u202ec\ud800") == "a\\x1b[2Jb\\r\\u202ec\\ud800"
    assert printable("a" * 20, 5) == "aaaaa... (20 characters)"
