"""The example's text: the same on every rank, nothing of the validation text in the training text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.gpt import data


@given(length=st.integers(2, 200), context=st.integers(1, 50))
def test_windows_cover_the_text_once(length, context):
    text = torch.arange(length).to(torch.uint8)
    if length <= context:
        with pytest.raises(ValueError, match=f"{length} tokens.*context of {context}"):
            data.Windows(text, context)
        return
    windows = data.Windows(text, context)
    inputs = torch.cat([windows[index][0] for index in range(len(windows))])
    targets = torch.cat([windows[index][1] for index in range(len(windows))])
    assert inputs.tolist() == list(range(len(inputs)))
    assert targets.tolist() == list(range(1, len(inputs) + 1))
    assert 0 <= length - 1 - len(inputs) < context
    assert inputs.dtype == torch.int64


def test_a_window_outside_is_an_error():
    windows = data.Windows(torch.zeros(10, dtype=torch.uint8), 3)
    with pytest.raises(IndexError, match="window 3 of 3"):
        windows[3]
    assert len(list(windows)) == 3


@given(st.lists(st.sampled_from(["def f():", "\n", " ", "    ", "x = 1"]), min_size=1).map("".join))
def test_ascii_text_survives(text):
    assert data.decode(data.encode(text.encode())) == text


def test_an_indentation_is_one_token():
    assert data.encode(b"        return").tolist() == [9, 9, *b"return"]


def test_other_bytes_are_shown_by_their_code():
    assert data.decode(data.encode("pé".encode())) == r"p\xc3\xa9"


def test_reads_the_standard_library():
    files = data.source_files()
    names = [file.name for file in files]
    assert names == sorted(names)
    assert {"argparse.py", "os.py", "typing.py"} <= set(names)
    assert not any(name.startswith("_sysconfigdata") for name in names)
    training, validation = data.read(files)
    assert len(training) > 2_000_000
    assert len(validation) > 50_000
    assert b"def " in bytes(training.tolist())


def test_no_file_is_in_both_texts(tmp_path):
    for number in range(30):
        (tmp_path / f"m{number:02}.py").write_text(f"<{number:02}>")
    files = data.source_files(tmp_path)
    training, validation = (data.decode(text) for text in data.read(files))
    held_out = [number for number in range(30) if f"<{number:02}>" in validation]
    assert held_out == [9, 19, 29]
    assert [number for number in range(30) if f"<{number:02}>" in training] == [
        number for number in range(30) if number not in held_out
    ]


def test_a_python_without_sources_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="0 Python files"):
        data.source_files(tmp_path)


def test_spread_takes_windows_from_the_whole_text():
    windows = data.Windows(torch.arange(101).to(torch.uint8), 1)
    assert [int(tokens[0]) for tokens, _ in data.spread(windows, 4)] == [0, 25, 50, 75]
    assert len(data.spread(windows, 1000)) == 100
