"""Messages between lines of output: they come through whole, and output is left alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepspeed.launcher.protocol import MessageReader, RelaySetting, encode, new_token

TOKEN = "0123456789abcdef"


@given(
    st.dictionaries(st.text(max_size=5), st.text(max_size=3000), max_size=3),
    st.lists(st.binary(max_size=50).filter(lambda line: b"\n" not in line and b"\r" not in line), max_size=5),
)
def test_messages_come_back_and_lines_stay(message, lines):
    encoded = encode(TOKEN, 3, message).splitlines(keepends=True)
    assert all(len(line) < 700 for line in encoded)  # what Slurm and MPI leave in one piece
    output = [line + b"\n" for line in lines]
    mixed = [*output[:1], *encoded[:1], *output[1:], *encoded[1:]]
    kept, found = MessageReader(TOKEN).split(b"".join(mixed))
    assert kept == b"".join(output)
    assert found == [message]


def test_messages_of_several_senders_may_mix():
    first, second = encode(TOKEN, 0, {"text": "a" * 2000}), encode(TOKEN, 1, {"text": "b" * 2000})
    lines = [line for pair in zip(first.splitlines(True), second.splitlines(True), strict=True) for line in pair]
    reader, found = MessageReader(TOKEN), []
    for line in lines:
        kept, messages = reader.split(line)
        assert kept == b""
        found += messages
    assert [message["text"][0] for message in found] == ["a", "b"]


def test_what_programs_put_around_a_message():
    line = encode(TOKEN, 0, {"x": 1})
    assert MessageReader(TOKEN).split(b"node1: " + line) == (b"", [{"x": 1}])  # pdsh
    assert MessageReader(TOKEN).split(b"unfinished" + line) == (b"unfinished\n", [{"x": 1}])


def test_what_is_no_message():
    for line in (encode("another", 0, {"x": 1}), b"\x1e\n", f"\x1e{TOKEN}\n".encode()):
        assert MessageReader(TOKEN).split(line) == (line, [])
    for rest in (
        b"0 1 0 !!!",
        b"0 1",
        b"0 1 0 W10=",
        b"x y z w v",
        b"0 2 7 AAAA\n" + b"\x1e" + TOKEN.encode() + b" 0 2 8 A",
    ):
        assert MessageReader(TOKEN).split(f"\x1e{TOKEN} ".encode() + rest + b"\n") == (b"", [])


def test_the_variable():
    relayed = RelaySetting.parse(str(RelaySetting("abc", True)))
    assert relayed is not None
    assert (relayed.token, relayed.labels) == ("abc", True)
    assert RelaySetting.parse("abc:plain").labels is False
    assert RelaySetting.parse("") is None
    assert new_token() != new_token()
