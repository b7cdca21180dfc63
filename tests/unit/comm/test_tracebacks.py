"""What is left out of tracebacks that end a program."""

from __future__ import annotations

import sys
import traceback

import pytest

from deepspeed.comm.init import shorten, shorten_uncaught
from deepspeed.errors import CommError
from tests.harness import ROOT

LIBRARY = str(ROOT / "deepspeed" / "made_up.py")  # a file of the package, as far as frames tell


def call(function, *arguments):
    """Call it from a frame of the library."""
    names = {"function": function, "arguments": arguments}
    exec(compile("def inner():\n    return function(*arguments)\nresult = inner()", LIBRARY, "exec"), names)
    return names["result"]


def library_raises(error):
    names = {"error": error}
    exec(compile("def raising():\n    raise error\nraising()", LIBRARY, "exec"), names)


def users_raise(error):
    raise error


def printed(error):
    return "".join(traceback.format_exception(error))


def test_frames_of_libraries_between_the_users_are_left_out():
    with pytest.raises(KeyError) as raised:
        call(users_raise, KeyError("column"))
    assert printed(raised.value).count("made_up.py") == 2
    shorten(raised.value)
    text = printed(raised.value)
    assert "made_up.py" not in text
    assert "in users_raise" in text
    assert text.endswith("(2 frames inside libraries are left out; DEEPSPEED_FULL_TRACEBACK=1 shows them)\n")


def test_an_error_of_the_library_ends_at_the_users_line():
    with pytest.raises(CommError) as raised:
        library_raises(CommError("rank 1 is dead"))
    shorten(raised.value)
    text = printed(raised.value)
    assert "made_up.py" not in text
    assert "in library_raises" in text


def test_where_another_error_comes_from_stays():
    with pytest.raises(TypeError) as raised:
        library_raises(TypeError("a bug"))
    before = printed(raised.value)
    shorten(raised.value)
    assert printed(raised.value) == before
    assert before.count("made_up.py") == 2


def chained(message):
    try:
        library_raises(RuntimeError("Connection closed"))
    except RuntimeError as error:
        raise CommError(message) from error


def test_a_cause_that_the_error_quotes_is_not_printed_again():
    with pytest.raises(CommError) as raised:
        chained("rank 1 is dead\nall_reduce failed: Connection closed")
    shorten(raised.value)
    assert printed(raised.value).count("Traceback") == 1
    with pytest.raises(CommError) as raised:
        chained("something else")
    shorten(raised.value)
    assert printed(raised.value).count("Traceback") == 2


def test_an_error_without_lines_of_the_user_stays_whole():
    error = ValueError("no")
    shorten(error)
    assert printed(error) == "ValueError: no\n"


def test_the_hook_that_prints_is_kept(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append((kind, error, trace)))
    shorten_uncaught()
    hook = sys.excepthook
    shorten_uncaught()
    assert sys.excepthook is hook
    with pytest.raises(KeyError) as raised:
        call(users_raise, KeyError("column"))
    hook(KeyError, raised.value, raised.value.__traceback__)
    assert seen == [(KeyError, raised.value, raised.value.__traceback__)]
    assert "made_up.py" not in printed(raised.value)
    monkeypatch.setenv("DEEPSPEED_FULL_TRACEBACK", "1")
    with pytest.raises(KeyError) as raised:
        call(users_raise, KeyError("column"))
    hook(KeyError, raised.value, raised.value.__traceback__)
    assert printed(raised.value).count("made_up.py") == 2
